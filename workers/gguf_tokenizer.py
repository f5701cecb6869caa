"""The tokenizer inside a GGUF file, as the tokenizers library's.

Knows the two kinds that the Llama family has: ``gpt2``, byte-level BPE whose way of cutting words is only *named*
(``tokenizer.ggml.pre``), and ``llama``, SentencePiece BPE. A name that is not in the table is refused: with another
way of cutting, the model would read other tokens than it was trained on, and nobody would notice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from verifier.errors import CheckpointError
from verifier.gguf import GGUFFile

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # GGUF's token types that matter here

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT_GROUPS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}


def read_gguf_tokenizer(path: Path) -> tuple[Tokenizer, str | None, dict[str, str]]:
    """The tokenizer, the chat template, and the special tokens by name.

    Raises:
        CheckpointError: a tokenizer of another kind, or none.
    """
    metadata = {name.removeprefix("tokenizer."): value for name, value in GGUFFile(path).metadata.items()}
    kind, pre = metadata.get("ggml.model"), metadata.get("ggml.pre")
    if kind == "llama":
        tokenizer = _sentencepiece(metadata)
    elif kind == "gpt2" and (pre == "smollm" or pre in _DIGIT_GROUPS):
        tokenizer = _byte_level(metadata)
    else:
        raise CheckpointError(
            f"The tokenizer in {path.name} is of kind {kind}/{pre}, which is not known; "
            "with the model's own tokenizer.json in the same folder it is not needed."
        )
    tokens, types = metadata["ggml.tokens"], metadata["ggml.token_type"]
    for special, wanted in ((True, CONTROL), (False, USER_DEFINED)):
        added = [token for token, type_ in zip(tokens, types, strict=True) if type_ == wanted]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"ggml.{word}_token_id") for name, word in names.items()}
    marks = {name: tokens[id] for name, id in ids.items() if id is not None}
    if metadata.get("ggml.add_bos_token", kind == "llama" or pre == "llama-bpe") and "bos_token" in marks:
        bos = (marks["bos_token"], ids["bos_token"])
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $0", special_tokens=[bos])
    return tokenizer, metadata.get("chat_template"), marks


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    pre = metadata["ggml.pre"]
    vocabulary = {token: id for id, token in enumerate(metadata["ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["ggml.merges"]]
    # Llama 3 takes a word that is in the vocabulary as it is, whatever the merges would make of it.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    smollm = pre == "smollm"  # cuts words as GPT-2 did, once digits are apart
    cut: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    if not smollm:
        cut = pre_tokenizers.Split(Regex(_WORDS % _DIGIT_GROUPS[pre]), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=smollm)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    tokens, types = metadata["ggml.tokens"], metadata["ggml.token_type"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    merges = _merges(vocabulary, metadata["ggml.scores"])
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece stores pieces with scores instead of merges: of those that can be made, the best is made first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, id in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
