"""What a verifier and a remote drafter say to one another: plain data as MessagePack, read back only if it fits.

    verifier                                    drafter
    Hello(terms)                         →      Welcome(epoch) or Refusal(why)
    Ask(number, turns)                   →      Answer(number, parts)
    Close(sequences)                     →
    anything before Hello                →      Stranger()

A turn begins at the last position that the drafter acknowledged, so a message that is lost is contained in the next,
and one that comes twice says nothing new. Durations are seconds from a message's arrival; no clock is shared. Knows
bytes. Knows no sockets, sessions or networks.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from msgspec import DecodeError, Meta, Struct, ValidationError, msgpack

from drafter.base import DraftLimits
from drafter.scored import ScoredTree
from verifier.errors import BadRequest, DraftreeError
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

PROTOCOL = 2
MAX_FRAME_BYTES = 2**26
MAX_TURNS = 4096  # sequences in one message
MAX_NODES = 1024
MOST_IDS = 2**31 - 1  # of any vocabulary

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # of a question: there may be thousands a second for months
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LONGEST_S = 3600.0
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_S)]
FeatureType = Literal["fp16", "fp32"]
BYTES = {"fp16": 2, "fp32": 4}


class BadMessage(DraftreeError):
    """Bytes that are no message, or one that contradicts itself."""


class Terms(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What both ends must agree on before anything else is said."""

    target: str  # fingerprints
    head: str
    width: Count  # of a fused feature; 0: the network reads text alone
    vocab_size: Count  # the target's
    protocol: Count = PROTOCOL

    def difference(self, other: Terms) -> str | None:
        """Why the two ends, ``other`` the drafter's, cannot work together, in words; None if they can."""
        for name, words in (
            ("protocol", "speaks version {theirs} of the protocol, this verifier version {ours}"),
            ("target", "drafts for another model (fingerprint {theirs}) than this verifier's ({ours})"),
            ("vocab_size", "drafts for a vocabulary of {theirs} ids, this verifier has {ours}"),
            ("width", "reads features of width {theirs}, this verifier makes them {ours} wide"),
            ("head", "has another draft network (fingerprint {theirs}) than this verifier ({ours})"),
        ):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return "The drafter " + words.format(ours=_short(ours), theirs=_short(theirs)) + "."
        return None


class Rows(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Features ``[count, width]``, row after row, little-endian."""

    count: Count = 0
    dtype: FeatureType = "fp16"
    data: bytes = b""

    @classmethod
    def of(cls, rows: Tensor, dtype: FeatureType) -> Rows:
        """``rows [count, width]`` fp32. What fp16 cannot hold goes as fp32 whatever was asked for."""
        half = rows.half() if dtype == "fp16" else None
        if half is not None and bool(half.isfinite().all()):
            return cls(len(rows), "fp16", half.cpu().numpy().tobytes())
        return cls(len(rows), "fp32", rows.float().cpu().numpy().tobytes())

    def tensor(self, width: int) -> Tensor:
        """``[count, width]`` fp32.

        Raises:
            BadMessage: bytes of another shape, or values that are not finite.
        """
        import torch

        if len(self.data) != self.count * width * BYTES[self.dtype]:
            raise BadMessage(f"{len(self.data)} bytes are no {self.count} rows of {width} {self.dtype} values")
        if not self.count:
            return torch.empty(0, width)
        dtype = torch.float16 if self.dtype == "fp16" else torch.float32
        rows = torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.count, width).float()
        if not bool(rows.isfinite().all()):
            raise BadMessage("features must be finite")
        return rows


class Wish(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tree that is wanted on the text's last token, and how far it may grow; the noise ranks its guesses."""

    max_draft: Annotated[int, Meta(ge=1, le=64)]
    draft_top_k: Annotated[int, Meta(ge=1, le=64)]
    max_nodes: Annotated[int, Meta(ge=1, le=MAX_NODES)]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int

    @classmethod
    def of(cls, limits: DraftLimits, sampling: SamplingParams) -> Wish:
        return cls(
            limits.max_draft,
            limits.draft_top_k,
            min(limits.max_nodes, MAX_NODES),
            sampling.temperature,
            min(sampling.top_k, MOST_IDS),
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            sampling.choice,
        )

    @property
    def limits(self) -> DraftLimits:
        return DraftLimits(self.max_draft, self.draft_top_k, self.max_nodes)

    @property
    def sampling(self) -> SamplingParams:
        """
        Raises:
            BadMessage: a value out of its range.
        """
        try:
            return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.choice)
        except BadRequest as error:
            raise BadMessage(str(error)) from None


class Turn(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sequence's text from position ``start`` on, with the features of positions ``max(start - 1, 0)`` up to and
    without the last; a chunk of it, without a wish, where all is too much for one message.
    """

    sequence: Count
    start: Count
    tokens: list[Token]
    check: int  # `text_check` of the whole text up to the last of ``tokens``
    features: Rows = Rows()
    wish: Wish | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def first_feature(self) -> int:
        """The position of the first row."""
        return max(self.start - 1, 0)


class Hello(Struct, frozen=True, tag="hello", array_like=True, forbid_unknown_fields=True):
    terms: Terms


class Ask(Struct, frozen=True, tag="ask", array_like=True, forbid_unknown_fields=True):
    """Trees wanted within ``deadline_s`` of the message's arrival; afterwards nobody needs them."""

    number: Number  # ascending
    epoch: str  # of the welcome
    deadline_s: Seconds
    turns: Annotated[list[Turn], Meta(max_length=MAX_TURNS)]


class Close(Struct, frozen=True, tag="close", array_like=True, forbid_unknown_fields=True):
    """These sequences ended."""

    sequences: list[Count]


class Welcome(Struct, frozen=True, tag="welcome", array_like=True, forbid_unknown_fields=True):
    """``epoch`` names the drafter's life: sessions do not survive it."""

    epoch: str
    max_positions: Count  # texts of more tokens are beyond the network


class Refusal(Struct, frozen=True, tag="refusal", array_like=True, forbid_unknown_fields=True):
    why: str


class Stranger(Struct, frozen=True, tag="stranger", array_like=True, forbid_unknown_fields=True):
    """The drafter does not know who asks: say hello first."""


class Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What became of one turn. ``known`` tokens of the text are there: the next turn may start with the one after.

    The tree is there if one was wanted and could be had; its root lies at position ``base``.
    """

    sequence: Count
    base: Count
    known: Count
    tokens: Annotated[list[Token], Meta(max_length=MAX_NODES + 1)] = []
    parents: Annotated[list[int], Meta(max_length=MAX_NODES + 1)] = []
    shares: Annotated[list[float], Meta(max_length=MAX_NODES + 1)] = []

    @property
    def tree(self) -> ScoredTree | None:
        """
        Raises:
            BadMessage: what is there is no tree.
        """
        if not self.tokens:
            return None
        try:
            return ScoredTree(TokenTree(tuple(self.tokens), tuple(self.parents)), tuple(self.shares))
        except ValueError as error:
            raise BadMessage(str(error)) from None


class Answer(Struct, frozen=True, tag="answer", array_like=True, forbid_unknown_fields=True):
    number: Number
    epoch: str
    parts: Annotated[list[Part], Meta(max_length=MAX_TURNS)]
    busy: bool = False  # the drafter has more to do than it can: trees are smaller than wished, or missing
    spent_s: Seconds = 0.0  # from the question's arrival to this answer


ToDrafter = Hello | Ask | Close
ToVerifier = Welcome | Refusal | Stranger | Answer
_Message = TypeVar("_Message")

_encoder = msgpack.Encoder()
_to_drafter: msgpack.Decoder[ToDrafter] = msgpack.Decoder(ToDrafter)
_to_verifier: msgpack.Decoder[ToVerifier] = msgpack.Decoder(ToVerifier)


def encode(message: ToDrafter | ToVerifier) -> bytes:
    return _encoder.encode(message)


def decode_to_drafter(frame: bytes) -> ToDrafter:
    """
    Raises:
        BadMessage: the bytes are none of these messages.
    """
    return _decode(_to_drafter, frame)


def decode_to_verifier(frame: bytes) -> ToVerifier:
    """As `decode_to_drafter`."""
    return _decode(_to_verifier, frame)


def _decode(decoder: msgpack.Decoder[_Message], frame: bytes) -> _Message:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadMessage(f"a frame of {len(frame)} bytes; {MAX_FRAME_BYTES} are allowed")
    try:
        return decoder.decode(frame)
    except (ValidationError, DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(str(error)) from None


def text_check(ids: Sequence[int], before: int = 0) -> int:
    """Tells texts apart; ``before``: the check of what comes before ``ids``."""
    return zlib.crc32(array("q", ids).tobytes(), before)


def _short(value: object) -> object:
    return value[:12] if isinstance(value, str) else value
