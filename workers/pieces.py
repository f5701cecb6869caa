"""What one token is worth in an answer: characters, bytes of a character, or nothing.

Reads a tokenizer's decoder, of the two kinds that the Llama family has:

* *byte level* (Llama 3, Qwen, SmolLM): every token is bytes, spelt in an alphabet of printable characters;
* *byte fallback* (Llama 2, Mistral): tokens are characters, ``▁`` for a space; bytes are the exception, ``<0xE4>``.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from verifier.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Pieces:
    """By token id: text, or the bytes of (a part of) a character. Empty for special tokens and for unused ids.

    Raises:
        CheckpointError: the tokenizer's decoder is of neither kind.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._known: dict[int, str | bytes] = {}
        steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        if not kinds or not (self._byte_level or set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}):
            raise CheckpointError(f"The tokenizer's decoder is {' + '.join(kinds) or 'missing'}, which is not known.")
        self._replacements = [
            (step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"
        ]
        self.whole_byte_runs = "ByteFallback" in kinds
        self.leading_spaces: int = sum(step["start"] for step in steps if step["type"] == "Strip")

    def __getitem__(self, token: int) -> str | bytes:
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._piece(token)
        return piece

    def _piece(self, token: int) -> str | bytes:
        spelt = self._tokenizer.id_to_token(token)
        if spelt is None or token in self._special:
            return ""
        if self._byte_level:
            try:
                return bytes([_BYTES[character] for character in spelt])
            except KeyError:  # an added token, which is spelt as it is
                return spelt.encode()
        if self.whole_byte_runs and (byte := _BYTE_TOKEN.fullmatch(spelt)):
            return bytes.fromhex(byte[1])
        for pattern, content in self._replacements:
            spelt = spelt.replace(pattern, content)
        return spelt


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return [] if tokenizer.decoder is None else _flat(json.loads(tokenizer.decoder.__getstate__()))


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat(part)]
    return [decoder]
