"""The head against its definition, its sessions against rebuilt ones, its trees against best-first growth by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafter import eagle3
from drafter.base import DraftLimits, DraftRequest
from drafter.checkpoints import HeadCheckpoint
from drafter.eagle3 import Eagle3Draft
from drafter.growth import BestFirstGrowth, GrowthNode, Guesses, grow
from tests.drafter.heads import HeadShape, SlowHead, random_weights, safeailab_config, save_head
from tests.models import save_tiny_model
from verifier.batch import Segment, StepPlan
from verifier.features import FeaturePool
from verifier.sampling import SamplingParams, gumbel_noise
from verifier.tree import TokenTree
from verifier.verifier import Verifier

PAGE_SIZE = 4
TEXT = [random.Random(7).randrange(160) for _ in range(40)]
CHAIN = DraftLimits(max_draft=4, draft_top_k=1, max_nodes=4)
TREE = DraftLimits(max_draft=5, draft_top_k=2, max_nodes=12)
GREEDY = SamplingParams(temperature=0)
SHAPES = {
    "plain": HeadShape(),
    "norm_before_residual": HeadShape(norm_before_residual=True),
    "norm_before_fc": HeadShape(norm_before_fc=True),
    "fc_norm": HeadShape(fc_norm=True),
    "norm_output": HeadShape(norm_output=True),
    "norm_output, norm_before_residual": HeadShape(norm_output=True, norm_before_residual=True),
    "no fc": HeadShape(fuses_layers=False, num_taps=1),
    "attention_bias": HeadShape(attention_bias=True),
    "qk_norm": HeadShape(qk_norm=True),
    "three layers": HeadShape(num_layers=3),
    "own embedding, narrower": HeadShape(own_embedding=True, hidden=48, norm_output=True),
    "the target's output": HeadShape(own_output=False, draft_vocab=160),
    "four taps, other base": HeadShape(num_taps=4, rope_theta=500.0, rms_norm_eps=1e-3),
}


class Target:
    """A tiny target with six layers, its weights by name, and its hidden states by `transformers`."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_tiny_model(folder, "llama3", num_hidden_layers=6)
        self.weights = load_file(self.folder / "model.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    @torch.inference_mode()
    def states(self, ids: Sequence[int], taps: Sequence[int]) -> list[list[Tensor]]:
        """By position, then by tap, ``[hidden]`` each; a tap after the last layer is taken before the final norm."""
        last: list[Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(lambda *call: last.append(call[2]))
        states = self.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        hook.remove()
        by_tap = [last[0] if tap == len(states) - 1 else states[tap] for tap in taps]
        return [[each[0, position] for each in by_tap] for position in range(len(ids))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("target") / "target")


class Bench:
    """A verifier and a head, with one sequence in the verifier's pages."""

    def __init__(self, target: Target, folder: Path, shape: HeadShape, *, noise_ranking: bool = False) -> None:
        self.target, self.shape, self.noise_ranking = target, shape, noise_ranking
        self.weights = random_weights(shape, seed=3)
        config = safeailab_config(shape)
        if shape.fuses_layers:
            config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4, 6][-shape.num_taps :]
        save_head(folder / "head", self.weights, config)
        self.verifier = Verifier.load(target.folder, num_pages=64, page_size=PAGE_SIZE, exact=False, max_rows=96)
        self.checkpoint = HeadCheckpoint.open(folder / "head", self.verifier.config)
        self.drafter = self.fresh()
        assert self.drafter.fusion is not None
        self.features: FeaturePool = self.verifier.keep_features(self.drafter.fusion)
        self.pages = tuple(random.Random(1).sample(range(64), 64))
        self.slow = SlowHead(shape, self.weights, target.weights)

    def fresh(self) -> Eagle3Draft:
        return Eagle3Draft.load(self.checkpoint, self.verifier, noise_ranking=self.noise_ranking)

    def verify(self, ids: Sequence[int], chunk: int = 96) -> None:
        """Computes the committed tokens of a text, all but its last."""
        for start in range(0, len(ids) - 1, chunk):
            tokens = TokenTree.chain(ids[start : min(start + chunk, len(ids) - 1)])
            self.verifier.forward(StepPlan((Segment(start, tokens, self.pages, scored_from=len(tokens)),)))

    def slot(self, logical: int) -> int:
        return self.pages[logical // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE

    def read(self, first: int, end: int) -> Tensor:
        return self.features.read([self.slot(position) for position in range(first, end)])

    def request(
        self, ids: Sequence[int], limits: DraftLimits = TREE, sampling: SamplingParams = GREEDY, sequence: int = 1
    ) -> DraftRequest:
        return DraftRequest(sequence, ids, limits, sampling, self.read)

    def fused(self, ids: Sequence[int]) -> list[Tensor]:
        """Features of all positions but the last, by the definition and `transformers`."""
        taps = self.checkpoint.config.layer_ids
        return [self.slow.fuse(states) for states in self.target.states(ids[:-1], taps)]

    def context(self, drafter: Eagle3Draft, sequence: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and last state of a session."""
        session = drafter.sessions[sequence]
        lease = session.lease
        assert len(lease.pages) == -(-lease.num_committed // PAGE_SIZE), "the expansion was not dropped"
        slots = [drafter.pages.slot(lease, logical) for logical in range(lease.num_committed)]
        return drafter.pool.keys[:, slots], drafter.pool.values[:, slots], session.state

    def assert_rebuilt(self, ids: Sequence[int], drafter: Eagle3Draft | None = None) -> None:
        """The drafter's session equals one made of the accepted text alone."""
        fresh = self.fresh()
        fresh.propose(self.request(ids))
        drafter = drafter or self.drafter
        for ours, theirs in zip(self.context(drafter), self.context(fresh), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert drafter.sessions[1].ids == list(ids)


@pytest.fixture
def bench(target: Target, tmp_path: Path) -> Callable[..., Bench]:
    return lambda shape=SHAPES["plain"], **options: Bench(target, tmp_path, shape, **options)


# ── the network ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SHAPES)
def test_every_flag_computes_what_its_definition_says(name: str, bench: Callable[..., Bench]) -> None:
    """Features, logits of the context, and a chain of four guesses that feed on the head's own output."""
    here = bench(SHAPES[name])
    ids = TEXT[:12]
    here.verify(ids)
    fused = here.fused(ids)
    torch.testing.assert_close(here.read(0, 11), torch.stack(fused), atol=1e-4, rtol=1e-4)

    logits, guesses = here.slow.run(ids[1:], fused, num_guesses=3)
    tree = here.drafter.propose(here.request(ids, CHAIN)).tree
    assert tree == TokenTree.chain([ids[-1], *guesses])
    state = here.drafter.sessions[1].state
    assert state is not None
    torch.testing.assert_close(here.drafter.head.logits(state[None])[0], logits[10], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["plain", "norm_output", "three layers"])
def test_trees_are_best_first_growth_over_the_definition(name: str, bench: Callable[..., Bench]) -> None:
    here = bench(SHAPES[name])
    ids = TEXT[:9]
    here.verify(ids)
    fused = here.fused(ids)
    target_ids = here.checkpoint.target_ids
    paths: dict[int, list[int]] = {0: []}

    class Slow:
        def expand(self, frontier: Sequence[GrowthNode], num_guesses: int) -> list[Guesses]:
            return [self._guesses(node, num_guesses) for node in frontier]

        def _guesses(self, node: GrowthNode, num_guesses: int) -> Guesses:
            paths[node.number] = [*paths[node.parent], node.token] if node.number else []
            logits = slow_logits(here, ids, fused, paths[node.number])
            best = logits.log_softmax(-1).topk(num_guesses)
            return [(int(target_ids[i]), float(value)) for value, i in zip(*best, strict=True)]

    expected, ours = grow(BestFirstGrowth(ids[-1], TREE), Slow()), here.drafter.propose(here.request(ids))
    assert ours.tree == expected.tree
    assert ours.shares == pytest.approx(expected.shares, rel=1e-3)
    assert len(expected.tree) == 13
    assert max(expected.tree.depths) > 2
    assert not expected.tree.is_chain


def slow_logits(here: Bench, ids: Sequence[int], fused: list[Tensor], path: Sequence[int]) -> Tensor:
    """At the end of a path of guesses, each slot fed with the output of the one before."""
    shape, cache = here.shape, [[] for _ in range(here.shape.num_layers)]  # type: ignore[var-annotated]
    state = torch.empty(0)
    for slot, token in enumerate([*ids[1:], *path]):
        output = here.slow._slot(token, fused[slot] if slot < len(fused) else state, slot, cache)
        normed = torch.nn.functional.rms_norm(output, output.shape, here.weights["norm.weight"], shape.rms_norm_eps)
        state = normed if shape.norm_output else output
    return here.weights["lm_head.weight"] @ normed


def test_several_sequences_grow_together_as_each_does_alone(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.verify(TEXT)
    texts = [TEXT[:10], TEXT[:23], TEXT[:2], TEXT[:17]]
    limits = [TREE, CHAIN, TREE, replace(TREE, max_draft=1)]
    requests = [here.request(*each, sequence=i) for i, each in enumerate(zip(texts, limits, strict=True))]
    together = here.drafter.collect(here.drafter.start(requests), 1.0)
    assert {sequence: scored.tree for sequence, scored in together.items()} == {
        request.sequence: here.fresh().propose(request).tree for request in requests
    }
    assert len({len(tree.tree) for tree in together.values()}) > 2


def test_noise_ranks_what_the_target_would_draw_first(bench: Callable[..., Bench]) -> None:
    here = bench(noise_ranking=True)
    here.verify(TEXT[:12])
    sampling = SamplingParams(temperature=0.8, seed=5)
    tree = here.drafter.propose(here.request(TEXT[:12], DraftLimits(1, 1, 1), sampling)).tree
    logits, _ = here.slow.run(TEXT[1:12], here.fused(TEXT[:12]))
    ids = here.checkpoint.target_ids
    scores = logits[-1] / 0.8 + torch.from_numpy(gumbel_noise(5, 0, 12, 0, 160))[ids]
    assert tree.tokens[1] == int(ids[scores.argmax()])
    assert tree.tokens[1] != int(ids[logits[-1].argmax()])  # the seed is one with which it makes a difference


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_each_round_the_cache_holds_what_was_accepted_and_nothing_else(bench: Callable[..., Bench]) -> None:
    """Rejected branches once stayed visible, and accepted guesses kept their own states instead of the target's."""
    here = bench()
    here.verify(TEXT)
    end = 6
    for accepted in (0, 3, 1, 4, 0, 5, 2):
        here.drafter.propose(here.request(TEXT[:end]))
        here.assert_rebuilt(TEXT[:end])
        end += accepted + 1
    here.drafter.close(1)
    here.drafter.pages.check_integrity([])
    assert here.drafter.pages.num_used == 0


def test_a_text_that_is_no_continuation_starts_a_new_session(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.verify(TEXT)
    here.drafter.propose(here.request(TEXT[:20]))
    other = [*TEXT[:9], *TEXT[20:30]]
    here.verify(other)
    here.drafter.propose(here.request(other))
    here.assert_rebuilt(other)
    here.drafter.propose(here.request(other[:12]))  # an earlier point of the same text
    here.assert_rebuilt(other[:12])


def test_asked_twice_it_answers_twice(bench: Callable[..., Bench]) -> None:
    """A step that failed is taken again with the same text."""
    here = bench()
    here.verify(TEXT)
    first = here.drafter.propose(here.request(TEXT[:11]))
    assert here.drafter.propose(here.request(TEXT[:11])) == first


def test_chunked_prefill_gives_the_same_state(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """At a chunk's edge the next token is the prompt's, not a guess; on the verifier's side and on the drafter's."""
    here = bench()
    here.verify(TEXT, chunk=7)
    monkeypatch.setattr(eagle3, "CATCH_UP_ROWS", 5)
    request = here.request(TEXT)
    rounds = [here.drafter.propose(request) for _ in range(8)]
    assert [len(tree.tree) > 1 for tree in rounds] == [False] * 7 + [True]  # 39 slots
    monkeypatch.undo()
    here.verify(TEXT)
    here.assert_rebuilt(TEXT)
    assert rounds[-1] == here.fresh().propose(request)


def test_drafting_stops_at_the_heads_own_positions(bench: Callable[..., Bench]) -> None:
    """Past the end of its rotary table a head used to take the whole engine down."""
    here = bench(HeadShape(max_positions=16))
    here.verify(TEXT)
    depths = {
        end: max(here.drafter.propose(here.request(TEXT[:end], CHAIN)).tree.depths)
        for end in (12, 14, 15, 16, 17, 18, 30)
    }
    assert depths == {12: 4, 14: 4, 15: 3, 16: 2, 17: 1, 18: 0, 30: 0}


def test_a_full_cache_forgets_the_session_used_longest_ago(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.verify(TEXT)
    small = Eagle3Draft(here.drafter.head, num_pages=16, page_size=PAGE_SIZE)
    for sequence in range(4):
        assert len(small.propose(here.request(TEXT[:20], CHAIN, sequence=sequence)).tree) == 5
    assert list(small.sessions) == [1, 2, 3]
    assert len(small.propose(here.request(TEXT, replace(TREE, draft_top_k=20), sequence=9)).tree) == 1  # can never fit
    small.pages.check_integrity([session.lease for session in small.sessions.values()])


def test_without_features_nothing_is_guessed(bench: Callable[..., Bench]) -> None:
    here = bench()
    request = replace(here.request(TEXT), features=None)
    assert here.drafter.collect(here.drafter.start([request, here.request(TEXT[:1], sequence=2)]), 1.0) == {}


# ── the verifier's side ──────────────────────────────────────────────────────────────────────────────────────────────


def test_features_move_and_are_copied_with_their_tokens(bench: Callable[..., Bench]) -> None:
    here = bench()
    here.verify(TEXT[:11])
    tree = TokenTree((TEXT[10], 7, 8, 9, 11, 12), (-1, 0, 0, 2, 2, 4))
    here.verifier.forward(StepPlan((Segment(10, tree, here.pages),)))
    here.verifier.move([here.slot(10 + node) for node in (2, 4, 5)], [here.slot(logical) for logical in (11, 12, 13)])
    ids = [*TEXT[:11], 8, 11, 12, 33]
    torch.testing.assert_close(here.read(0, 14), torch.stack(here.fused(ids)), atol=1e-4, rtol=1e-4)
    before = here.read(0, 14)
    source, spare = here.pages[2], here.pages[40]
    here.verifier.copy_pages([(source, spare)])
    assert torch.equal(here.features.read(range(spare * PAGE_SIZE, (spare + 1) * PAGE_SIZE)), before[8:12])


def test_another_head_has_features_of_its_own(bench: Callable[..., Bench], target: Target, tmp_path: Path) -> None:
    here = bench()
    fusion = here.drafter.fusion
    assert fusion is not None
    without = here.verifier.cached_bytes
    assert here.verifier.keep_features(replace(fusion)) is here.features
    assert here.verifier.cached_bytes == without
    assert here.verifier.keep_features(replace(fusion, key="other")) is not here.features
    assert here.verifier.cached_bytes == without + here.features.num_bytes
