"""Tiny tokenizers of the kinds that the Llama family has, made on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = ["hello world, this is some text", "the quick brown fox  jumps", "日本語と絵文字 😀👩‍👩‍👧", "naïve café — 1234"]
END = "<|end|>"  # special: never part of a text
CALL = "<call>"  # added, but an ordinary part of texts
LATIN = "<é ü>"  # added, and not to be spelt in the byte alphabet


@cache
def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and SmolLM: byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=[END], min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(CALL, special=False), AddedToken(LATIN, special=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: characters, ``▁`` for spaces, byte tokens for the rest, one leading space too many."""
    characters = sorted({character for text in TEXTS[:2] for character in text.replace(" ", "▁")})
    pieces = [END, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "th", "▁th", "▁the", "▁▁", "日", "é"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: id for id, piece in enumerate(pieces)},
            merges=[("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "▁")],
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(CALL, special=False)])
    return tokenizer
