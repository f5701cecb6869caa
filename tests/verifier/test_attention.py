"""Paged tree attention: all backends against a dense softmax, and bit for bit against themselves.

Triton's kernels run on the GPU if there is one, else in Triton's interpreter, which takes a twentieth of a second for
what one row and kv head attend to: then examples are as small as they can be.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from verifier.attention import Attention, cpu, create_attention, reference
from verifier.attention.layout import RowLayout
from verifier.batch import Segment
from verifier.errors import BadSetting
from verifier.tree import TokenTree

ROOT = TokenTree((0,), (-1,))


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def attention(backend: str) -> Attention:
    on_gpu = backend == "triton" and torch.cuda.is_available()
    try:
        attention = create_attention(backend, "cuda" if on_gpu else "cpu")
    except BadSetting as error:
        if not lacks(backend):
            raise
        pytest.skip(str(error))
    return there_and_back(attention) if on_gpu else attention


def lacks(backend: str) -> bool:
    """Whether this machine has not what a kernel is built with; one that fails all the same is a fault."""
    if backend == "cpu":
        return not (shutil.which("cc") or shutil.which("gcc"))
    return backend == "triton" and find_spec("triton") is None


@pytest.fixture
def interpreted(backend: str) -> bool:
    return backend == "triton" and not torch.cuda.is_available()


def there_and_back(attention: Attention) -> Attention:
    """For tensors on the CPU, on the GPU."""

    def attend(
        queries: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, window: int | None, scale: float
    ) -> Tensor:
        moved: dict[str, Any] = {each.name: getattr(layout, each.name) for each in fields(layout)}
        moved = {name: each.cuda() for name, each in moved.items() if isinstance(each, Tensor)}
        there = replace(layout, **moved)
        return attention(queries.cuda(), keys.cuda(), values.cuda(), there, window, scale).cpu()

    return attend


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operators on several threads spend their time waiting for each other, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_tree(rng: random.Random, num_nodes: int) -> TokenTree:
    return TokenTree(tuple(range(num_nodes)), (-1, *(rng.randrange(node) for node in range(1, num_nodes))))


@dataclass
class Example:
    """One sequence's vectors: of its committed tokens, then of its tree's nodes."""

    tree: TokenTree
    keys: Tensor  # [start + nodes, K, D]
    values: Tensor
    queries: Tensor  # [nodes, H, D]

    @classmethod
    def random(cls, start: int, tree: TokenTree, heads: int, kv_heads: int, head_dim: int) -> Example:
        shape = (start + len(tree), kv_heads, head_dim)
        return cls(tree, torch.randn(shape), torch.randn(shape), 2 * torch.randn(len(tree), heads, head_dim))

    @property
    def start(self) -> int:
        return len(self.keys) - len(self.tree)

    def dense(self, window: int | None, scale: float) -> Tensor:
        """Every node's softmax over its own path, in float64: [nodes, H, D]."""
        rows = []
        for query, path in zip(self.queries.double(), self.tree.paths, strict=True):
            seen = [*range(self.start), *(self.start + node for node in path)][-(window or 0) :]
            group = len(query) // self.keys.shape[1]
            keys, values = (x[seen].double().repeat_interleave(group, 1) for x in (self.keys, self.values))
            weights = (torch.einsum("hd,shd->hs", query, keys) * scale).softmax(-1)
            rows.append(torch.einsum("hs,shd->hd", weights, values))
        return torch.stack(rows)


def attend(
    attention: Attention,
    sequences: Sequence[Example],
    page_size: int,
    window: int | None = None,
    padding: int = 0,
    seed: int = 0,
) -> list[Tensor]:
    """One output per sequence, whose pages are dealt at random from a pool that is NaN wherever nobody wrote."""
    sizes = [-(-len(sequence.keys) // page_size) for sequence in sequences]
    deck = list(range(1, sum(sizes) + 3))
    random.Random(seed).shuffle(deck)
    segments = []
    for sequence, size in zip(sequences, sizes, strict=True):
        segments.append(Segment(sequence.start, sequence.tree, tuple(deck[:size])))
        del deck[:size]
    rows = sum(len(sequence.tree) for sequence in sequences)
    layout = RowLayout.of(segments, page_size, num_rows=rows + padding, scratch_slot=0)
    num_slots = (sum(sizes) + 3) * page_size
    pools = []
    for name in ("keys", "values"):
        first: Tensor = getattr(sequences[0], name)
        pool = torch.full((num_slots, *first.shape[1:]), torch.nan)
        for segment, sequence in zip(segments, sequences, strict=True):
            vectors: Tensor = getattr(sequence, name)
            for logical, vector in enumerate(vectors):
                pool[segment.pages[logical // page_size] * page_size + logical % page_size] = vector
        pool[layout.slots[rows:]] = 1.0
        pools.append(pool)
    queries = torch.cat([sequence.queries for sequence in sequences])
    queries = torch.cat([queries, torch.ones(padding, *queries.shape[1:])])
    out = attention(queries, pools[0], pools[1], layout, window, queries.shape[2] ** -0.5)
    assert out.shape == queries.shape
    assert out[rows:].isfinite().all()
    return list(torch.split(out[:rows], [len(sequence.tree) for sequence in sequences]))


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group", "page_size", "window"),
    [
        (64, 3, 3, 1, None),
        (64, 3, 3, 16, 70),
        (80, 2, 1, 4, 1),
        (80, 2, 1, 32, None),
        (96, 1, 4, 16, 7),
        (96, 1, 4, 1, 70),
        (128, 2, 7, 32, None),
        (128, 2, 7, 4, 64),
        (16, 2, 2, 16, 1),
        (12, 2, 2, 4, 7),
    ],
)
def test_agrees_with_a_dense_softmax_over_every_path(
    attention: Attention,
    interpreted: bool,
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    window: int | None,
) -> None:
    rng = random.Random(page_size + head_dim)
    torch.manual_seed(0)
    trees = {0: ROOT, 63: random_tree(rng, 9), 150: ROOT, 5: TokenTree.chain(range(70)), 64: random_tree(rng, 5)}
    if interpreted:
        trees = {0: ROOT, 63: random_tree(rng, 4), 130: ROOT}
    sequences = [Example.random(start, tree, kv_heads * group, kv_heads, head_dim) for start, tree in trees.items()]
    for sequence, out in zip(sequences, attend(attention, sequences, page_size, window, padding=3), strict=True):
        torch.testing.assert_close(out, sequence.dense(window, head_dim**-0.5).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 1500])
def test_long_contexts_agree(attention: Attention, interpreted: bool, window: int | None) -> None:
    torch.manual_seed(1)
    tree, kv_heads = (TokenTree.chain((0, 1)), 1) if interpreted else (random_tree(random.Random(1), 6), 2)
    sequence = Example.random(3000, tree, 2 * kv_heads, kv_heads, 64)
    sequence.queries *= 5  # sharp: the largest score moves from block to block
    (out,) = attend(attention, [sequence], 16, window)
    torch.testing.assert_close(out, sequence.dense(window, 64**-0.5).float(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
def test_a_row_is_bitwise_the_same_in_any_company(attention: Attention, interpreted: bool, window: int | None) -> None:
    rng = random.Random(2)
    torch.manual_seed(2)
    sizes = [(200, 1), (77, 6), (0, 3), (130, 13), (64, 2), (63, 1)]  # committed, nodes
    kv_heads = 3
    if interpreted:
        sizes, kv_heads = [(1030, 1), (77, 3), (1, 2)], 1
    sequences = [Example.random(start, random_tree(rng, nodes), 3 * kv_heads, kv_heads, 64) for start, nodes in sizes]
    alone = [attend(attention, [sequence], 16, window)[0] for sequence in sequences]
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for trial in range(2):
            order = rng.sample(range(len(sequences)), len(sequences) - trial)
            together = attend(attention, [sequences[i] for i in order], 4, window, padding=trial, seed=trial)
            for i, out in zip(order, together, strict=True):
                assert torch.equal(out, alone[i])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("length", [1, 64, 65, 150])
def test_a_row_is_bitwise_the_same_wherever_its_keys_come_from(
    attention: Attention, interpreted: bool, length: int, window: int | None
) -> None:
    """Committed context and one row, a prompt chunk, or a branch among others: the same tokens, the same bits."""
    rng = random.Random(length)
    torch.manual_seed(length)
    base, kv_heads = (max(0, length - 4), 1) if interpreted else (0, 2)
    whole = Example.random(base, TokenTree.chain(range(length - base)), 3 * kv_heads, kv_heads, 80)
    (truth,) = attend(attention, [whole], 16, window)
    for page_size in (4,) if interpreted else (1, 4, 32):
        for start in {base, max(base, length // 2), length - 1, max(base, length - 7)}:
            parents, at = [-1], [0]  # at: the node of each of the sequence's own tokens
            while len(at) < length - start:
                if rng.random() < 0.5:
                    parents.append(rng.randrange(len(parents)))  # another branch
                else:
                    parents.append(at[-1])
                    at.append(len(parents) - 1)
            tree = TokenTree(tuple(range(len(parents))), tuple(parents))
            branch = Example.random(start, tree, 3 * kv_heads, kv_heads, 80)
            own = [*range(start), *(start + node for node in at)]
            branch.keys[own], branch.values[own] = whole.keys, whole.values
            branch.queries[at] = whole.queries[start - base :]
            (out,) = attend(attention, [branch], page_size, window, seed=page_size)
            assert torch.equal(out[at], truth[start - base :])


def test_rows_of_queries_may_lie_apart(attention: Attention) -> None:
    """The model splits queries, keys and values off one merged matrix and does not copy the queries."""
    torch.manual_seed(3)
    merged = torch.randn(5, 9, 64)
    layout = RowLayout.of([Segment(0, TokenTree.chain(range(5)), (0, 1))], 4)
    keys, values = torch.randn(2, 8, 3, 64)
    apart = attention(merged[:, :6], keys, values, layout, None, 0.1)
    assert torch.equal(apart, attention(merged[:, :6].contiguous(), keys, values, layout, None, 0.1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_cache_of_half_precision_is_read_as_what_it_holds(attention: Attention, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    keys, values = torch.randn(2, 8, 2, 16).to(dtype)
    layout = RowLayout.of([Segment(3, TokenTree((0, 1, 2), (-1, 0, 0)), (1, 0))], 4)
    queries = torch.randn(3, 4, 16)
    out = attention(queries, keys, values, layout, None, 0.25)
    assert out.dtype == torch.float32
    assert torch.equal(out, attention(queries, keys.float(), values.float(), layout, None, 0.25))


def test_layout_gives_each_row_its_path() -> None:
    tree = TokenTree((7, 8, 9, 10, 11), (-1, 0, 0, 1, 1))
    chunk = Segment(0, TokenTree.chain((1, 2, 3)), (9,))
    layout = RowLayout.of([chunk, Segment(6, tree, (5, 2, 8))], 4, num_rows=10, scratch_slot=39)
    assert layout.num_rows == 10
    assert layout.longest == 9
    assert layout.token_ids.tolist() == [1, 2, 3, 7, 8, 9, 10, 11, 0, 0]
    assert layout.positions.tolist() == [0, 1, 2, 6, 7, 7, 8, 8, 0, 0]
    assert layout.slots.tolist() == [36, 37, 38, 10, 11, 32, 33, 34, 39, 39]
    context = [20, 21, 22, 23, 8, 9]
    assert layout.key_slots(2).tolist() == [36, 37, 38]
    assert layout.key_slots(3).tolist() == [*context, 10]
    assert layout.key_slots(5).tolist() == [*context, 10, 32]
    assert layout.key_slots(7).tolist() == [*context, 10, 11, 34]
    assert layout.key_slots(9).tolist() == [39]


def test_a_chain_costs_memory_by_its_length_not_its_square() -> None:
    segments = [Segment(0, TokenTree.chain(range(512)), tuple(range(32)))] * 3
    assert len(RowLayout.of(segments, 16).paths) == 3 * 512


def test_an_empty_batch_is_no_trouble(attention: Attention) -> None:
    out = attention(torch.empty(0, 4, 64), torch.empty(8, 2, 64), torch.empty(8, 2, 64), RowLayout.of([], 4), None, 1.0)
    assert out.shape == (0, 4, 64)


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """The interpreter runs what the compiler refuses, as a parameter that is annotated with a name of Python's."""
    pytest.importorskip("triton")
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.verifier.compile_kernels", "80", "90"]
    environment = compiling | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernel_and_torch_share_one_pool_of_threads() -> None:
    """Two OpenMP libraries in a process would each keep their own threads, and these would fight for the cores."""
    maps = Path("/proc/self/maps")
    if lacks("cpu") or not maps.exists():
        pytest.skip("the kernel needs a C compiler, and the test Linux's /proc")
    create_attention("cpu")
    assert len({line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}) == 1


def test_the_kernel_may_be_built_twice_at_once(tmp_path: Path) -> None:
    if lacks("cpu"):
        pytest.skip("the kernel needs a C compiler, which this machine lacks")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(cpu.build, [tmp_path, tmp_path])
    assert first == second
    assert list(tmp_path.iterdir()) == [first]
    built = first.stat().st_mtime_ns
    assert cpu.build(tmp_path).stat().st_mtime_ns == built


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("PATH", str(tmp_path))
    cpu._load.cache_clear()
    yield tmp_path / "cc"
    cpu._load.cache_clear()


def test_without_a_compiler_the_reference_serves_and_one_line_says_so(
    fake_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert create_attention() is reference.attend
    assert [record.getMessage() for record in caplog.records] == [
        "Attention falls back on the slow plain-torch definition: there is no C compiler (cc or gcc)."
    ]


def test_a_compiler_that_fails_is_quoted(fake_compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake_compiler.write_text("#!/bin/sh\necho 'cc: error: unrecognized option -march=native' >&2\nexit 4\n")
    fake_compiler.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        assert create_attention() is reference.attend
    (record,) = caplog.records
    assert "failed with exit code 4: cc: error: unrecognized option -march=native" in record.getMessage()


def test_a_backend_that_cannot_be_had_is_a_bad_setting(fake_compiler: Path) -> None:
    with pytest.raises(BadSetting, match="there is no C compiler"):
        create_attention("cpu")
    with pytest.raises(BadSetting, match="one of auto, reference, cpu, triton"):
        create_attention("cuda")
    with pytest.raises(BadSetting, match="there is no kernel for meta"):
        create_attention("cpu", "meta")


def test_triton_is_for_gpus_and_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BadSetting, match=r"cuda, and for cpu with TRITON_INTERPRET=1, not for cpu\.$"):
        create_attention("triton")
    with pytest.raises(BadSetting, match=r"not for meta\.$"):
        create_attention("triton", "meta")


def test_without_triton_the_reference_serves_gpus_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING):
        assert create_attention("auto", "cuda") is reference.attend
    assert "the package triton is not installed" in caplog.text
    with pytest.raises(BadSetting, match="triton is not installed"):
        create_attention("triton", "cuda")


def test_a_gpu_gets_the_kernel() -> None:
    triton = pytest.importorskip("verifier.attention.triton")
    assert isinstance(create_attention("auto", "cuda"), triton.TritonAttention)
