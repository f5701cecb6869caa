"""What a sequence writes down, when it is complete, and which requests are refused."""

from __future__ import annotations

import pytest

from drafter.base import DraftLimits
from verifier.errors import BadRequest
from verifier.sampling import SamplingParams
from workers.config import EngineConfig
from workers.sequence import Request, TokenSequence, longest

GREEDY = SamplingParams(temperature=0)
CONFIG = EngineConfig(num_pages=4, page_size=16, max_model_len=40)


def make_sequence(
    max_tokens: int = 10, *, stop_ids: frozenset[int] = frozenset(), output_ids: tuple[int, ...] = ()
) -> TokenSequence:
    request = Request("r", (5, 6, 7), GREEDY, max_tokens, stop_ids, output_ids)
    return TokenSequence(0, request, lambda progress: None, DraftLimits(), longest(request, CONFIG, 100))


def test_a_run_ends_with_its_first_stop_id() -> None:
    """Elsewhere an end of text inside an accepted run was not seen, and junk followed it."""
    sequence = make_sequence(stop_ids=frozenset({2, 9}))
    assert sequence.extend((4, 4, 9, 2, 4)) == (4, 4, 9)
    assert sequence.ids == [5, 6, 7, 4, 4, 9]
    assert sequence.finish == "stop"


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_run_is_cut_at_max_tokens(max_tokens: int) -> None:
    sequence = make_sequence(max_tokens)
    runs = [sequence.extend((1, 2, 3)), sequence.extend((4, 5, 6)), sequence.extend((7, 8, 9))]
    assert [len(run) for run in runs] == [min(3, max(0, max_tokens - 3 * i)) for i in range(3)]
    assert sequence.num_output == max_tokens
    assert sequence.finish == "length"


def test_a_stop_id_beyond_the_limit_does_not_count() -> None:
    sequence = make_sequence(2, stop_ids=frozenset({9}))
    assert sequence.extend((1, 2, 9)) == (1, 2)
    assert sequence.finish == "length"


def test_a_stop_id_that_is_the_last_allowed_token_is_a_stop() -> None:
    sequence = make_sequence(2, stop_ids=frozenset({9}))
    sequence.extend((1, 9))
    assert sequence.finish == "stop"


def test_a_stop_id_in_the_prompt_is_none() -> None:
    assert make_sequence(stop_ids=frozenset({7})).finish is None


def test_the_context_ends_at_its_limit() -> None:
    sequence = make_sequence(1000)
    assert sequence.remaining == 40 - 3
    assert sequence.extend(range(60)) == tuple(range(37))
    assert (len(sequence.ids), sequence.finish) == (40, "length")


def test_a_replay_counts_what_was_written_before() -> None:
    sequence = make_sequence(5, output_ids=(1, 2, 3))
    assert (sequence.num_output, sequence.remaining, sequence.num_pending) == (3, 2, 6)
    assert sequence.usage().output_tokens == 3
    assert sequence.usage().prompt_tokens == 3
    sequence.extend((4, 5, 6))
    assert sequence.finish == "length"


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_must_be_positive(max_tokens: int) -> None:
    with pytest.raises(BadRequest, match=f"max_tokens is {max_tokens}"):
        make_sequence(max_tokens)


@pytest.mark.parametrize(("num_tokens", "fits"), [(0, False), (1, True), (39, True), (40, False)])
def test_a_prompt_leaves_room_for_one_token(num_tokens: int, fits: bool) -> None:
    """The text gives the limit that applies and the prompt's true length; elsewhere it named another limit."""
    request = Request("r", (1,) * num_tokens, GREEDY, 5)
    if fits:
        assert longest(request, CONFIG, 100) == min(num_tokens + 5, 40)
    else:
        with pytest.raises(BadRequest, match=rf"'{num_tokens} tokens'.*40"):
            longest(request, CONFIG, 100)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for ids in ((1, 100), (-1, 1)):
        with pytest.raises(BadRequest, match="unknown token ids"):
            longest(Request("r", ids, GREEDY, 5), CONFIG, 100)


@pytest.mark.parametrize(("max_tokens", "fits"), [(29, True), (30, False)])
def test_a_request_that_never_fits_the_cache_is_refused_at_once(max_tokens: int, fits: bool) -> None:
    """Admitted, it would be preempted for ever. The last token needs no slot."""
    config = EngineConfig(num_pages=2, page_size=16, max_model_len=100)
    request = Request("r", (1,) * 4, GREEDY, max_tokens)
    if fits:
        assert longest(request, config, 100) == 33
    else:
        with pytest.raises(BadRequest, match="KV cache of 32 tokens"):
            longest(request, config, 100)
