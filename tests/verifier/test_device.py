"""A verifier on a GPU that is not there: everything is in its memory, and the logits are those of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

pytest.importorskip("triton")

from tests.gpu import GPU, GpuTensor, OnGpu, pretended_gpu
from tests.models import save_tiny_model
from tests.ranks import on_all
from tests.verifier.test_model import PROMPT, pages_for, random_tree
from tests.verifier.test_ranks import on_sockets
from verifier import collectives
from verifier.attention.triton import TritonAttention
from verifier.batch import Segment, StepPlan
from verifier.device import choose_device
from verifier.errors import BadSetting
from verifier.features import Fusion
from verifier.ranks import Ranks
from verifier.sampling import SamplingParams, draw
from verifier.tree import TokenTree
from verifier.verifier import StepOutput, Verifier

PAGES = pages_for(80, 4)
TREE = random_tree(PROMPT[50], 9, seed=4)
SETTINGS: dict[str, Any] = {"num_pages": 128, "page_size": 4, "max_rows": 64}


def two_steps(verifier: Verifier) -> StepOutput:
    """A prompt and a tree after it, some of whose nodes then move."""
    verifier.taps = (0, 2)
    verifier.keep_features(Fusion("two states", (1, 3), 2 * verifier.config.hidden_size))
    verifier.forward(StepPlan((Segment(0, TokenTree.chain(PROMPT[:50]), PAGES, scored_from=50),)))
    output = verifier.forward(StepPlan((Segment(50, TREE, PAGES, tapped=True),)))
    verifier.move([PAGES[13] * 4 + 1], [PAGES[12] * 4 + 3])
    verifier.copy_pages([(PAGES[0], PAGES[19])])
    return output


def save_in_half(folder: Path, family: str, dtype: torch.dtype) -> Path:
    save_tiny_model(folder, family)
    path, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    config.write_text(config.read_text().replace("float32", str(dtype).removeprefix("torch.")))
    return folder


@pytest.mark.parametrize("family", ["smollm2", "llama3", "llama-biased", "mistral", "qwen3"])
def test_a_step_says_what_it_says_on_the_cpu(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / family, family)
    expected = two_steps(Verifier.load(folder, **SETTINGS))
    with pretended_gpu():
        verifier = Verifier.load(folder, **SETTINGS, device="cuda")
        found = two_steps(verifier)
        assert isinstance(verifier.pool.keys, GpuTensor)
        assert isinstance(found.logits[0], GpuTensor)
        assert isinstance(found.features[0], GpuTensor)
        assert expected.features[0] is not None
        torch.testing.assert_close(found.logits[0].cpu(), expected.logits[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(found.features[0].cpu(), expected.features[0], atol=1e-4, rtol=0)
        features = verifier.keep_features(Fusion("two states", (1, 3), 2 * verifier.config.hidden_size))
        moved, kept = features.read([PAGES[12] * 4 + 3]), features.read([PAGES[13] * 4 + 1])
        assert torch.equal(moved, kept)
        assert bool((moved != 0).any())
        assert verifier.fingerprint.endswith("-no GPU at all")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_what_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_in_half(tmp_path / "model", "qwen2", dtype)
    expected = two_steps(Verifier.load(folder, **SETTINGS)).logits[0]
    with pretended_gpu():
        verifier = Verifier.load(folder, **SETTINGS, exact=False, device="cuda")
        found = two_steps(verifier).logits[0]
        assert verifier.pool.keys.dtype == verifier.model.embedding.dtype == dtype
        assert found.dtype == torch.float32
        error = (found.cpu() - expected).square().mean().sqrt() / expected.std()
        assert 0 < error < 0.03


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_the_kernel_is_called_as_it_wants_to_be(tmp_path: Path) -> None:
    """The very kernel, interpreted, in the place that it has in a step."""
    folder = save_in_half(tmp_path / "model", "mistral", torch.bfloat16)
    plan = StepPlan((Segment(0, TokenTree.chain(PROMPT[:3]), PAGES), Segment(0, TokenTree((1, 2), (-1, 0)), (99,))))
    outputs = []
    for attend in (None, partial(TritonAttention.__call__, TritonAttention())):
        with pretended_gpu(*([attend] if attend else [])):
            verifier = Verifier.load(folder, num_pages=128, page_size=4, exact=False, device="cuda")
            outputs.append(torch.cat(verifier.forward(plan).logits).cpu())
    torch.testing.assert_close(*outputs, atol=0.1, rtol=0)


def test_a_token_is_the_same_wherever_its_logits_are() -> None:
    """Noise and draw are the host's, so they are the same to the last bit."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    with pretended_gpu():
        there = logits.to("cuda")
        for seed in range(20):
            params = SamplingParams(temperature=0.9, top_k=seed % 3 * 40, top_p=1 - seed % 2 / 10, seed=seed)
            assert draw(there, params, 7) == draw(logits, params, 7)


def test_ranks_share_a_model_on_their_gpus(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    expected = two_steps(Verifier.load(folder, **SETTINGS)).logits[0]

    def work(ranks: Ranks) -> torch.Tensor:
        with OnGpu():
            return two_steps(Verifier.load(folder, **SETTINGS, ranks=ranks, device="cuda")).logits[0].cpu()

    with pretended_gpu():
        first, *_ = on_all(3, work)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=0)


class PretendedNccl:
    """NCCL's process group as far as it is used, by way of gloo."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.gloo = collectives._gloo(PrefixStore("pretended", store), rank, size)

    def allgather(self, parts: Sequence[Sequence[Any]], own: Sequence[Any], options: Any) -> Any:
        return self.gloo.allgather([[part.numbers for part in parts[0]]], [own[0].numbers], options)

    def gather(self, parts: Sequence[Sequence[Any]], own: Sequence[Any], options: Any) -> Any:
        return self.gloo.gather([[part.numbers for part in each] for each in parts], [own[0].numbers], options)


def test_what_is_on_gpus_goes_by_way_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_nccl", PretendedNccl)

    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        with OnGpu():
            own = torch.full((2, 3), float(ranks.rank), device=GPU)
            return ranks.sum(own), ranks.gather(own)

    first, other = cast(list[tuple[GpuTensor, GpuTensor]], on_sockets(2, work))
    assert all(isinstance(each, GpuTensor) for each in (*first, *other))
    assert first[0].numbers.tolist() == other[0].numbers.tolist() == [[1.0] * 3] * 2
    assert first[1].numbers.tolist() == [[0.0] * 3 + [1.0] * 3] * 2


def test_what_would_fail_on_a_gpu_fails_here() -> None:
    """The tests with a GPU that is not there are worth what it refuses."""
    with pretended_gpu():
        there, here = torch.zeros(3, device="cuda"), torch.arange(3)
        with pytest.raises(RuntimeError, match="same device"):
            _ = there + here
        with pytest.raises(RuntimeError, match="same device"):
            _ = here[there.long()]
        with pytest.raises(RuntimeError, match="same device"):
            there.index_select(0, here)
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        assert isinstance(there[here], GpuTensor)  # indices may come from the CPU
        assert not isinstance(there.cpu(), GpuTensor)


def test_a_device_that_is_not_there_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(BadSetting, match=r"^device is 'cuda', but must be cpu here, since torch \S+ sees no GPU\.$"):
        choose_device("cuda")
    with pretended_gpu():
        assert choose_device("auto") == choose_device("cuda") == "cuda"
        assert choose_device("cpu", num_gpus=2) == "cpu"
        with pytest.raises(BadSetting, match="tensor_parallel is 2, but must be at most 1"):
            choose_device("auto", num_gpus=2)
