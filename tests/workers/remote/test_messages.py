"""What crosses the wire: read back as it was, or refused."""

from __future__ import annotations

import random

import pytest
import torch

from drafter.base import DraftLimits
from verifier.sampling import SamplingParams
from workers.remote import messages
from workers.remote.messages import (
    Answer,
    Ask,
    BadMessage,
    Close,
    Hello,
    Part,
    Refusal,
    Rows,
    Stranger,
    Terms,
    ToDrafter,
    ToVerifier,
    Turn,
    Welcome,
    Wish,
    decode_to_drafter,
    decode_to_verifier,
    encode,
    text_check,
)

WISH = Wish.of(DraftLimits(5, 2, 12), SamplingParams(temperature=0.5, seed=2**64 - 1))
TURN = Turn(3, 4, [7, 8, 9], 123, Rows.of(torch.randn(3, 4), "fp16"), WISH)
ASK = Ask(1, "life", 0.5, [TURN])
TO_DRAFTER: list[ToDrafter] = [Hello(Terms("t", "h", 4, 10)), ASK, Close([1, 2])]
TO_VERIFIER: list[ToVerifier] = [
    Welcome("life", 512),
    Refusal("no"),
    Stranger(),
    Answer(1, "life", [Part(3, 6, 7, [9, 1], [-1, 0], [1.0, 0.5])]),
]


def test_messages_are_read_as_they_were_written() -> None:
    assert [decode_to_drafter(encode(message)) for message in TO_DRAFTER] == TO_DRAFTER
    assert [decode_to_verifier(encode(message)) for message in TO_VERIFIER] == TO_VERIFIER


def test_questions_may_be_asked_for_years() -> None:
    """Their numbers ended at 2**31, which an engine that asks a thousand a second has used up in a month."""
    ask, answer = Ask(2**40, "life", 0.5, []), Answer(2**40, "life", [])
    assert decode_to_drafter(encode(ask)) == ask
    assert decode_to_verifier(encode(answer)) == answer


def test_a_wish_holds_whatever_a_request_may_ask_for() -> None:
    """A top_k beyond 64 bits raised, and cost all requests in the same question their trees."""
    wish = Wish.of(DraftLimits(1, 1, 1), SamplingParams(top_k=10**30, seed=-(2**63), choice=2**64 - 1))
    ask = Ask(1, "life", 0.5, [Turn(0, 0, [1], 0, wish=wish)])
    assert decode_to_drafter(encode(ask)) == ask
    assert wish.sampling.top_k >= 2**31 - 1


def test_what_is_no_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(ASK)
    for wrong in (b"", b"\xc1", frame[:-1], frame + b"x", encode(TO_VERIFIER[0]), b"\x91\xa4none"):
        with pytest.raises(BadMessage):
            decode_to_drafter(wrong)
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", len(frame) - 1)
    with pytest.raises(BadMessage, match="are allowed"):
        decode_to_drafter(frame)


def test_any_bytes_are_a_message_or_a_bad_one() -> None:
    generator = random.Random(0)
    for message in TO_DRAFTER:
        frame = encode(message)
        for _ in range(300):
            wrong = bytearray(frame)
            for _ in range(generator.randint(1, 3)):
                wrong[generator.randrange(len(wrong))] = generator.randrange(256)
            try:
                read = decode_to_drafter(bytes(wrong))
                if isinstance(read, Ask):
                    for turn in read.turns:
                        turn.features.tensor(4)
                        assert turn.wish is None or turn.wish.sampling
            except BadMessage:
                pass


def test_features_keep_their_values_as_far_as_their_type_goes() -> None:
    rows = torch.randn(5, 8)
    torch.testing.assert_close(Rows.of(rows, "fp16").tensor(8), rows.half().float(), rtol=0, atol=0)
    torch.testing.assert_close(Rows.of(rows, "fp32").tensor(8), rows, rtol=0, atol=0)
    assert Rows().tensor(8).shape == (0, 8)


def test_what_half_precision_cannot_hold_goes_as_it_is() -> None:
    """Massive activations would have become infinite."""
    rows = torch.tensor([[1.0, 70_000.0]])
    packed = Rows.of(rows, "fp16")
    assert packed.dtype == "fp32"
    assert packed.tensor(2).equal(rows)


def test_features_of_another_shape_or_no_numbers_are_refused() -> None:
    packed = Rows.of(torch.randn(2, 4), "fp16")
    for count, width in ((2, 5), (3, 4), (0, 4)):
        with pytest.raises(BadMessage, match="rows of"):
            Rows(count, "fp16", packed.data).tensor(width)
    with pytest.raises(BadMessage, match="finite"):
        Rows.of(torch.tensor([[torch.nan]]), "fp32").tensor(1)


def test_what_is_no_tree_is_refused() -> None:
    for part in (
        Part(1, 2, 3, [1, 2], [-1], [1.0, 0.5]),
        Part(1, 2, 3, [1, 2], [-1, 1], [1.0, 0.5]),
        Part(1, 2, 3, [1, 2], [-1, 0], [1.0, float("nan")]),
    ):
        with pytest.raises(BadMessage):
            _ = part.tree
    assert Part(1, 2, 3).tree is None


def test_a_check_can_be_continued() -> None:
    ids = list(range(50, 70))
    assert text_check(ids[7:], text_check(ids[:7])) == text_check(ids)
    assert text_check([*ids[:-1], 0]) != text_check(ids)
