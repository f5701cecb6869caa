"""Where a checkpoint keeps its tokenizer, and how it is read. Knows files, and nothing of what is done with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from verifier.errors import CheckpointError

MARKS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer and what belongs to it."""

    tokenizer: Tokenizer
    chat_template: str | None
    marks: dict[str, str]  # special tokens by name, as templates refer to them

    @classmethod
    def read(cls, path: Path) -> TokenizerFiles:
        """Of a Hugging Face folder, or of a GGUF file (``tokenizer.json`` beside it wins over what is in it).

        Raises:
            CheckpointError: there is none, or one that cannot be read.
        """
        folder = path.parent if path.is_file() else path
        if (folder / "tokenizer.json").is_file():
            return cls._from_folder(folder)
        if path.is_file():
            from workers.gguf_tokenizer import read_gguf_tokenizer

            return cls(*read_gguf_tokenizer(path))
        raise CheckpointError(
            f"{folder} has no tokenizer.json. "
            "transformers writes one: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )

    @classmethod
    def _from_folder(cls, folder: Path) -> TokenizerFiles:
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the tokenizers library raises nothing more precise
            raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from error
        # Some checkpoints keep what their training padded and cut to.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        values = {name: settings.get(name) for name in MARKS}
        marks = {
            name: value["content"] if isinstance(value, dict) else value for name, value in values.items() if value
        }
        return cls(tokenizer, _chat_template(folder, settings), marks)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own in newer checkpoints, an entry of the settings in older ones; of several the default one."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    return content
