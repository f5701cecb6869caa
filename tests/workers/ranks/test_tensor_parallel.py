"""Promise 1 over ranks: any tree, batch and cache gives one rank's text, and to the last bit that of as many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafter.base import Drafter, DraftLimits
from drafter.factory import plan_drafter
from drafter.scripted import Bushy, Oracle
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.matrix import MAX_ROWS, Case, check, pairwise
from tests.models import save_tiny_model
from tests.ranks import ThreadRanks, leading
from tests.workers.test_promise import PAGE_SIZE, LoadedModel
from verifier.batch import Segment, StepPlan
from verifier.sampling import SamplingParams, draw
from verifier.tree import TokenTree
from verifier.verifier import Verifier
from workers.build import EngineSpec, build_engine
from workers.engine import Engine, EngineConfig
from workers.measuring.prompts import PROMPTS, read_prompts
from workers.sequence import Request
from workers.stats import NEAR_TIE

LIMITS = DraftLimits(max_draft=4, draft_top_k=2, max_nodes=8)
FEW = [
    Case("oracle", True, 6, 4, 0.0, True, False),
    Case("mixed", True, 1, 16, 1.0, True, False),
    Case("ngram", False, 6, 1, 1.0, False, False),
]
SPLITS = [("smollm2", 3), ("llama-biased", 2), ("qwen3", 4)]

LoadFamily = Callable[[str], tuple[Path, LoadedModel]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> LoadFamily:
    """A family's folder, and its model on one rank."""
    loaded: dict[str, tuple[Path, LoadedModel]] = {}

    def load_family(family: str) -> tuple[Path, LoadedModel]:
        if family not in loaded:
            folder = save_tiny_model(tmp_path_factory.mktemp(family) / family, family)
            verifier = Verifier.load(folder, num_pages=128 // PAGE_SIZE, page_size=PAGE_SIZE)
            loaded[family] = folder, LoadedModel(verifier)
        return loaded[family]

    return load_family


def check_ranks(case: Case, family: str, size: int, load: LoadFamily) -> None:
    folder, alone = load(family)
    with ExitStack() as groups:

        def create_verifier(num_pages: int, page_size: int) -> Verifier:
            group = leading(folder, size, num_pages=num_pages, page_size=page_size, max_rows=MAX_ROWS)
            return groups.enter_context(group)

        check(case, create_verifier, alone.decode_plainly, alone.vocab_size)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_ids_are_those_of_one_rank(case: Case, load: LoadFamily) -> None:
    check_ranks(case, "smollm2", 3, load)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size"), SPLITS)
@pytest.mark.parametrize("case", pairwise()[::3], ids=str)
def test_ids_are_those_of_one_rank_in_every_case(case: Case, family: str, size: int, load: LoadFamily) -> None:
    check_ranks(case, family, size, load)


def requests_of(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    """Each prompt greedily and with a seed."""
    return [
        Request(f"{index} {temperature:g}", tuple(prompt), SamplingParams(temperature, seed=index), num_tokens)
        for index, prompt in enumerate(prompts)
        for temperature in (0.0, 0.8)
    ]


def ids(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    return {result.request_id: result.output_ids for result in engine.run(requests)}


def test_draft_networks_read_rank_0s_features(tmp_path: Path) -> None:
    """They are fused from the residual stream, which is whole there; so are the embedding and head that they share."""
    target = save_tiny_model(tmp_path / "target")
    head = save_tiny_eagle(tmp_path / "head", EagleShape(target_hidden=72, hidden=72))
    requests = requests_of([range(3, 30), range(90, 100)], 12)

    def serve(verifier: Verifier) -> tuple[dict[str, tuple[int, ...]], Tensor, int]:
        drafter = plan_drafter(str(head), verifier.config).create(verifier)
        assert drafter.fusion is not None
        engine = Engine(verifier, drafter, EngineConfig(64, 4, max_rows=MAX_ROWS, limits=LIMITS))
        texts = ids(engine, requests)
        assert engine.stats().drafter_failures == 0
        features = verifier.keep_features(drafter.fusion).read(range(64 * 4))
        return texts, features, engine.counters.speculation.drafted_tokens

    alone = serve(Verifier.load(target, num_pages=64, page_size=4, max_rows=MAX_ROWS))
    with leading(target, 3, num_pages=64, page_size=4, max_rows=MAX_ROWS) as verifier:
        together = serve(verifier)
    assert (together[0], together[2]) == (alone[0], alone[2])
    assert together[1].any()
    torch.testing.assert_close(together[1], alone[1], atol=1e-4, rtol=1e-4)


def test_ranks_that_disagree_do_what_rank_0_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise on its own logits a rank would accept other tokens, and wait for ever in the next collective."""
    noise = torch.Generator().manual_seed(0)
    gather = ThreadRanks.gather

    def noisy(self: ThreadRanks, part: Tensor) -> Tensor:
        return gather(self, part + torch.randn(part.shape, generator=noise) if self.rank == 1 else part)

    monkeypatch.setattr(ThreadRanks, "gather", noisy)
    requests = requests_of([range(3, 20), range(40, 50)], 16)
    with leading(save_tiny_model(tmp_path / "m"), 3, num_pages=64, page_size=4, max_rows=MAX_ROWS) as verifier:
        drafter = Bushy(Oracle(lambda text: [text[-1] + 1] * 4), vocab_size=160)
        engine = Engine(verifier, drafter, EngineConfig(64, 4, max_rows=MAX_ROWS, limits=LIMITS))
        results = engine.run(requests)
        assert [(len(result.output_ids), result.finish) for result in results] == [(16, "length")] * 4
        assert engine.dead is None
        engine.check_integrity()


@pytest.mark.slow
def test_the_default_model_says_on_three_ranks_what_it_says_on_one() -> None:
    """In processes, as it is served. Sums over three ranks round otherwise, so that a near-tie may go the other way."""
    spec = EngineSpec(draft_model="none", max_model_len=512, num_pages=160, max_rows=96, adaptive=False)
    alone, text = build_engine(spec)
    prompts = [text.chat_ids([{"role": "user", "content": each.text}]) for each in read_prompts(PROMPTS, 6)]
    requests = requests_of(prompts, 40)
    expected = ids(alone, requests)
    three, _ = build_engine(replace(spec, tensor_parallel=3))
    try:
        truth = ids(three, requests)
        # The very same ids in other batches and trees: a row's bits depend on the number of ranks and on nothing else.
        guessing = Engine(three.verifier, oracle(requests, truth), replace(three.config, limits=LIMITS))
        assert ids(guessing, requests) == truth
        assert guessing.counters.speculation.accepted_tokens > 100
    finally:
        three.stop()
    margins = [margin_at_parting(alone, each, expected[each.id], truth[each.id]) for each in requests]
    flipped = [margin for margin in margins if margin is not None]
    assert all(margin < NEAR_TIE for margin in flipped), flipped
    assert len(flipped) <= 1


def oracle(requests: Sequence[Request], truth: dict[str, tuple[int, ...]]) -> Drafter:
    texts = [(*request.prompt_ids, *truth[request.id]) for request in requests]

    def continuation(so_far: Sequence[int]) -> Sequence[int]:
        known = (text for text in texts if text[: len(so_far)] == tuple(so_far))
        return next(known, ())[len(so_far) :]

    return Bushy(Oracle(continuation), vocab_size=49152)


def margin_at_parting(engine: Engine, request: Request, ours: Sequence[int], theirs: Sequence[int]) -> float | None:
    """How close the choice was at the first token that differs; None where none does."""
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if place is None:
        return None
    tokens = (*request.prompt_ids, *ours[:place])
    pages = tuple(range(-(-len(tokens) // engine.config.page_size)))
    start, logits = 0, torch.empty(0)
    while start < len(tokens):
        chunk = TokenTree.chain(tokens[start : start + 64])
        logits = engine.verifier.forward(StepPlan((Segment(start, chunk, pages),))).logits[0]
        start += len(chunk)
    return draw(logits[-1], request.sampling, len(tokens)).margin
