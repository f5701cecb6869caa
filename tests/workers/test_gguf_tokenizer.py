"""The tokenizer inside a GGUF file reads text as the model's own does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from tests.workers.tokenizers import CALL, END, byte_fallback, byte_level
from verifier.errors import CheckpointError
from workers.text import Text
from workers.tokenizer import TokenizerFiles

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(
    path: Path, kind: str, pre: str, tokens: Sequence[str], types: Sequence[int], **more: Sequence[object]
) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index(END))
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    for name, values in more.items():
        writer.add_array(f"tokenizer.ggml.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def spelled(tokenizer: Tokenizer) -> tuple[list[str], list[int]]:
    tokens = [tokenizer.id_to_token(id) or "" for id in range(tokenizer.get_vocab_size())]
    kinds = {END: CONTROL, CALL: USER_DEFINED}
    return tokens, [kinds.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]


def write_byte_level(path: Path, pre: str) -> Path:
    merges = json.loads(byte_level().to_str())["model"]["merges"]
    return write(path, "gpt2", pre, *spelled(byte_level()), merges=[" ".join(merge) for merge in merges])


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " cafés", "!", "\n"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " cafés", "!\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " cafés", "!\n"]),
    ],
)
def test_words_are_cut_as_the_name_says(tmp_path: Path, pre: str, words: list[str]) -> None:
    tokenizer = TokenizerFiles.read(write_byte_level(tmp_path / "m.gguf", pre)).tokenizer
    assert tokenizer.pre_tokenizer is not None
    cuts = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str("It's 12345 cafés!\n")]
    assert ["It's 12345 cafés!\n"[start:end] for start, end in cuts] == words


def test_byte_level(tmp_path: Path) -> None:
    text = Text.load(write_byte_level(tmp_path / "m.gguf", "qwen2"))
    source = f"hello 日本語 {CALL}😀"
    assert text.encode(source) == byte_level().encode(source).ids
    assert text.decode(text.encode(source + END)) == source
    bos = byte_level().token_to_id(END)
    assert text.chat_ids([{"content": "hello"}]) == [bos, *text.encode("hello")]
    llama = Text.load(write_byte_level(tmp_path / "l.gguf", "llama-bpe"))
    assert llama.encode("hello") == [bos, *text.encode("hello")]


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges come from scores: what SentencePiece would merge first has the highest."""
    tokens, types = spelled(byte_fallback())
    scores = {"th": -1.0, "▁th": -2.0, "▁the": -3.0, "▁▁": -4.0}
    types[tokens.index("q")] = UNKNOWN
    path = write(tmp_path / "m.gguf", "llama", "default", tokens, types, scores=[scores.get(t, -9.0) for t in tokens])
    text = Text.load(path)
    source = "the fox  the日é 😀"
    assert text.encode(source) == [tokens.index(END), *byte_fallback().encode(source).ids]
    assert text.decode(text.encode(source)) == source


def test_an_unknown_kind_is_refused_and_a_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "m.gguf", "viking")
    with pytest.raises(CheckpointError, match="gpt2/viking"):
        Text.load(path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert Text.load(path).encode("hello") == byte_level().encode("hello").ids
