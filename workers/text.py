"""From text to token ids and back, a few tokens at a time.

Knows one model's tokenizer. Knows no model, no requests, and neither torch nor transformers, so that a process which
only speaks text stays small.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from verifier.errors import BadRequest
from workers.pieces import Pieces
from workers.template import ChatTemplate
from workers.tokenizer import TokenizerFiles


class Text:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._pieces = Pieces(tokenizer)

    @classmethod
    def load(cls, path: Path) -> Text:
        """Of a Hugging Face folder or a GGUF file.

        Raises:
            CheckpointError: there is no tokenizer, or one of an unknown kind.
        """
        files = TokenizerFiles.read(path)
        template = ChatTemplate(files.chat_template, files.marks) if files.chat_template else None
        return cls(files.tokenizer, template)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the beginning-of-text mark if this model has one.

        Raises:
            BadRequest: the text cannot be encoded.
        """
        return self._encode(text, "prompt", add_special_tokens=True)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation, ready for the assistant's answer. A message has ``role`` and ``content``.

        Raises:
            BadRequest: the model's template does not take these messages, or it has none.
        """
        if self._template is None:
            raise BadRequest("messages", "a conversation", "left for a plain prompt: this model has no chat template")
        return self._encode(self._template.render(messages), "messages", add_special_tokens=False)

    def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can carry half of a surrogate pair
            raise BadRequest(field, "a text with half of a surrogate pair", "valid Unicode text") from error
        # As a batch, since only that leaves Python's other threads alone meanwhile, which a long text takes seconds of.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """For one answer. ``continues`` says that it goes on in the middle of a text, whose spaces all count."""
        return Detokenizer(self._pieces, continues=continues)

    def stop_strings(self, stops: Sequence[str]) -> StopStrings:
        return StopStrings(stops)


class Detokenizer:
    """The text of one answer as its tokens come; what was said is never taken back.

    Whatever the runs, the pieces joined are what the tokenizer makes of all ids at once. A character is held back until
    its last byte is there, and bytes that are no character become U+FFFD as soon as that is certain.
    """

    def __init__(self, pieces: Pieces, *, continues: bool = False) -> None:
        self._pieces = pieces
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._bytes: _ByteDecoder = _WholeRuns() if pieces.whole_byte_runs else utf8("replace")
        self._spaces_to_strip = 0 if continues else pieces.leading_spaces

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token in ids:
            piece = self._pieces[token]
            if isinstance(piece, bytes):
                parts.append(self._bytes.decode(piece))
            elif piece:
                parts.append(self._bytes.decode(b"", final=True))
                parts.append(piece)
        return self._stripped("".join(parts))

    def flush(self) -> str:
        """What was held back, at the end."""
        return self._stripped(self._bytes.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._spaces_to_strip and text:
            self._spaces_to_strip = self._spaces_to_strip - 1 if text[0] == " " else 0
            text = text.removeprefix(" ")
        return text


class _ByteDecoder(Protocol):
    """The part of `codecs.IncrementalDecoder` that is used here."""

    def decode(self, input: bytes, final: bool = False) -> str: ...


class _WholeRuns:
    """Byte tokens that follow one another are text only if all of them together are; else each is a U+FFFD."""

    def __init__(self) -> None:
        self._run = b""

    def decode(self, input: bytes, final: bool = False) -> str:
        self._run += input
        if not final:
            return ""
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)


class StopStrings:
    """Cuts a text where a stop string begins. Of several, the one that is complete first counts, the longest of those.

    Holds back only what may yet become a stop string, so the result does not depend on how the text arrives.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string has ended it; nothing comes after that."""
        if self._stopped:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self._stopped = "", True
            return text[: min(matches)[1]], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
