"""A verifier, a draft network and a text: what the tests of networks and of sessions stand on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafter.base import DraftLimits, DraftRequest
from drafter.checkpoints import DraftFolder
from drafter.network_draft import NetworkDraft
from drafter.networks import plan_network
from drafter.options import DraftOptions
from tests.drafter.eagle_heads import EagleShape, save_tiny_eagle
from tests.drafter.heads import HeadShape, SlowHead, save_tiny_head
from tests.models import save_tiny_model
from verifier.attention import create_attention
from verifier.batch import Segment, StepPlan
from verifier.features import FeaturePool
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree
from verifier.verifier import Verifier

PAGE_SIZE = 4
NUM_PAGES = 64
TEXT = random.Random(7).choices(range(160), k=40)
CHAIN = DraftLimits(max_draft=4, draft_top_k=1, max_nodes=4)
TREE = DraftLimits(max_draft=5, draft_top_k=2, max_nodes=12)
GREEDY = SamplingParams(temperature=0)
# A small network of each kind for `Target`, by what saves it into a folder.
SAVE: dict[str, Callable[..., Path]] = {
    "eagle3": partial(save_tiny_head, shape=HeadShape(), eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
    "eagle": partial(save_tiny_eagle, shape=EagleShape()),
    "model": partial(save_tiny_model, family="smollm2", seed=5, num_hidden_layers=2),
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


class Bench:
    """A verifier and a drafter from a network's folder, with one sequence in the verifier's pages."""

    def __init__(self, target: Target, folder: Path, options: DraftOptions, slow: SlowHead | None = None) -> None:
        self.target, self.options = target, options
        self.verifier = Verifier.load(target.folder, num_pages=NUM_PAGES, page_size=PAGE_SIZE, exact=False, max_rows=96)
        self._plan = plan_network(DraftFolder(folder), self.verifier.config, options)
        self._slow = slow
        self.drafter = self.create()
        fusion = self.drafter.fusion
        self._features = self.verifier.keep_features(fusion) if fusion else None
        self.pages = tuple(random.Random(1).sample(range(NUM_PAGES), NUM_PAGES))

    @property
    def slow(self) -> SlowHead:
        """The head by its definition."""
        assert self._slow is not None
        return self._slow

    @property
    def features(self) -> FeaturePool:
        """What the network reads."""
        assert self._features is not None
        return self._features

    @torch.inference_mode()
    def create(self, num_pages: int = NUM_PAGES, options: DraftOptions | None = None) -> NetworkDraft:
        """Another drafter, without sessions."""
        network = self._plan.load(self.verifier.model, create_attention())
        return NetworkDraft(network, num_pages=num_pages, page_size=PAGE_SIZE, options=options or self.options)

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
        return DraftRequest(sequence, ids, limits, sampling, self.read if self._features else None)

    def fused(self, ids: Sequence[int]) -> list[Tensor]:
        """Features of all positions but the last, by the definition and `transformers`."""
        taps = self.features.fusion.taps
        return [self.slow.fuse(states) for states in self.target.states(ids[:-1], taps)]

    def context(self, drafter: NetworkDraft, sequence: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and last state of a session."""
        sessions = drafter.sessions
        session = sessions.by_sequence[sequence]
        lease = session.lease
        assert len(lease.pages) == -(-lease.num_committed // PAGE_SIZE), "the expansion was not dropped"
        slots = [sessions.pages.slot(lease, logical) for logical in range(lease.num_committed)]
        return sessions.pool.keys[:, slots], sessions.pool.values[:, slots], session.state

    def assert_rebuilt(self, ids: Sequence[int]) -> None:
        """The drafter's session equals one made of the accepted text alone."""
        fresh = self.create()
        fresh.propose(self.request(ids))
        for ours, theirs in zip(self.context(self.drafter), self.context(fresh), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        assert self.drafter.sessions.by_sequence[1].ids == list(ids)
