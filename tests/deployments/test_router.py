"""Where a text ends, what is counted, and what is refused before anything runs."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from deployments.errors import ApiError
from deployments.router import Generation, Limits, Piece, Router
from tests.deployments.fakes import END, MAX_MODEL_LEN, TEXT, VOCAB_SIZE, ScriptedVerifier, says, usage
from verifier.sampling import SamplingParams
from workers.sequence import Progress, Request


def generation(
    prompt: str = "Hi",
    *,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    seed: int | None = 7,
) -> Generation:
    return Generation(
        prompt_ids=tuple(TEXT.encode(prompt)),
        prompt_field="prompt",
        continues=True,
        budget_field="max_tokens",
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        sampling=SamplingParams(seed=seed or 0),
        has_seed=seed is not None,
    )


def router(verifier: ScriptedVerifier) -> Router:
    return Router(verifier, TEXT, Limits(MAX_MODEL_LEN, VOCAB_SIZE, frozenset({END})))


async def pieces(verifier: ScriptedVerifier, wanted: Generation) -> list[Piece]:
    asked = router(verifier)
    return [piece async for piece in asked.generate(wanted, asked.admit(wanted))]


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def counted(pieces: list[Piece]) -> tuple[int, int, int]:
    """Tokens of the prompt, of the answer, and cached."""
    usage = pieces[-1].usage
    assert usage is not None
    return usage[:3]


async def test_a_text_ends_at_its_end_mark_which_is_counted_and_not_shown() -> None:
    found = await pieces(ScriptedVerifier(says("Hel", "lo")), generation())
    assert joined(found) == "Hello"
    assert [piece.finish for piece in found] == [None, "stop"]
    assert counted(found) == (2, 6, 2)


async def test_an_end_mark_inside_a_run_ends_it() -> None:
    """The engine cuts a run at a stop id; whatever it would have drafted beyond must not reach the text."""
    found = await pieces(ScriptedVerifier(says("Hello<|end|>junk")), generation())
    assert joined(found) == "Hello"
    assert counted(found) == (2, 6, 2)


async def test_ignored_end_marks_do_not_end_a_text() -> None:
    verifier = ScriptedVerifier(says("a<|end|>b", end=False))
    found = await pieces(verifier, generation(ignore_eos=True, max_tokens=3))
    assert joined(found) == "ab"
    assert (found[-1].finish, counted(found)) == ("length", (2, 3, 2))


async def test_an_ordinary_id_may_be_a_stop_id() -> None:
    found = await pieces(ScriptedVerifier(says("abcdef")), generation(stop_token_ids=tuple(TEXT.encode("d"))))
    assert joined(found) == "abc"
    assert counted(found) == (2, 4, 2)


@pytest.mark.parametrize(
    ("runs", "stop", "text", "num_tokens"),
    [
        (("one two three four five",), "two", "one ", 7),  # inside a run
        (("two three", " four"), "two", "", 3),  # at the very start of a long run
        (("one t", "wo three"), "two", "one ", 7),  # across two runs
        (("one t", "w", "o three"), "two", "one ", 7),  # across three
        (("one two",), "wo", "one t", 7),  # in the middle of a word
        (("ab\n\n", "cd"), "\n\n", "ab", 4),
        (("größe",), "ß", "grö", 6),  # characters of several tokens
    ],
)
async def test_stop_strings_cut_where_they_begin(runs: tuple[str, ...], stop: str, text: str, num_tokens: int) -> None:
    """A search in the tail of a run only misses a stop string at its start; and tokens past a stop must not count."""
    verifier = ScriptedVerifier(says(*runs))
    found = await pieces(verifier, generation(stop=(stop,)))
    assert joined(found) == text
    assert found[-1].finish == "stop"
    assert counted(found) == (2, num_tokens, 2), "also what was cached, although the verifier has not finished"
    assert sum(piece.finish is not None for piece in found) == 1


async def test_a_stop_string_frees_the_request() -> None:
    verifier = ScriptedVerifier(says("one two", " three", " four"))
    await pieces(verifier, generation(stop=("two",)))
    assert verifier.aborted == [verifier.requests[0].id]


async def test_the_beginning_of_a_stop_string_is_given_out_when_the_text_ends() -> None:
    found = await pieces(ScriptedVerifier(says("one tw")), generation(stop=("two",)))
    assert joined(found) == "one tw"
    assert found[-1].finish == "stop"


async def test_characters_are_never_split() -> None:
    balloon = TEXT.encode("🎈")
    spent = usage(Request("", (1, 2), SamplingParams(), 1))
    runs = [Progress("", (token,), usage=spent) for token in balloon]
    verifier = ScriptedVerifier(lambda request: [*runs, Progress("", (END,), "stop", spent)])
    found = await pieces(verifier, generation())
    assert [piece.text for piece in found] == ["🎈", ""]


async def test_a_budget_that_cuts_a_character_gives_a_replacement_character() -> None:
    verifier = ScriptedVerifier(says("a🎈"))
    found = await pieces(verifier, generation(max_tokens=3))
    assert joined(found) == "a\N{REPLACEMENT CHARACTER}"
    assert (found[-1].finish, counted(found)) == ("length", (2, 3, 2))


async def test_leaving_aborts() -> None:
    verifier = ScriptedVerifier(says("one", "two", "three"))
    asked = router(verifier)
    async with aclosing(asked.generate(generation(), asked.admit(generation()))) as generated:
        await anext(generated)
    assert verifier.aborted == [verifier.requests[0].id]


@pytest.mark.parametrize("finish", ["error", "abort"])
async def test_a_failure_is_raised_without_the_engines_words(finish: str) -> None:
    verifier = ScriptedVerifier(lambda request: [Progress(request.id, (), finish, error="RuntimeError: SECRET")])  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="failed") as caught:
        await pieces(verifier, generation())
    assert caught.value.status == 500
    assert "SECRET" not in caught.value.message


def test_the_budget_defaults_to_the_rest_of_the_context() -> None:
    request = router(ScriptedVerifier()).admit(generation("x" * 1500))
    assert request.max_tokens == MAX_MODEL_LEN - 1500
    assert request.stop_ids == {END}


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"), [(MAX_MODEL_LEN, None, "prompt"), (2049, 5, "prompt"), (2000, 49, "max_tokens")]
)
def test_too_long_prompts_are_told_the_limit_and_their_length(length: int, max_tokens: int | None, param: str) -> None:
    """The message must name the limit that was hit, and the prompt's true count."""
    with pytest.raises(ApiError, match=rf"{MAX_MODEL_LEN} tokens .* has {length}\b") as caught:
        router(ScriptedVerifier()).admit(generation("x" * length, max_tokens=max_tokens))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_may_leave_room_for_one_token() -> None:
    assert router(ScriptedVerifier()).admit(generation("x" * (MAX_MODEL_LEN - 1))).max_tokens == 1


@pytest.mark.parametrize(("ids", "stops", "param"), [((VOCAB_SIZE,), (), "prompt"), ((1,), (9999,), "stop_token_ids")])
def test_ids_outside_the_vocabulary_are_refused(ids: tuple[int, ...], stops: tuple[int, ...], param: str) -> None:
    wanted = Generation(ids, "prompt", True, "max_tokens", 5, (), stops, False, SamplingParams(), True)
    with pytest.raises(ApiError) as caught:
        router(ScriptedVerifier()).admit(wanted)
    assert caught.value.param == param


def test_a_missing_seed_is_drawn_and_a_given_one_kept() -> None:
    admit = router(ScriptedVerifier()).admit
    assert admit(generation(seed=5)).sampling.seed == 5
    assert admit(generation(seed=0)).sampling.seed == 0
    assert len({admit(generation(seed=None)).sampling.seed for _ in range(8)}) == 8
    assert admit(generation()).id != admit(generation()).id
