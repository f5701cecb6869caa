"""Medusa (Cai et al., 2024, https://arxiv.org/abs/2401.10774): heads on the target's last hidden state.

    position   …  p-1    p      p+1     p+2
    token      …         x_p    head 0  head 1  …        x_p is the root; the target's own output drew it from the
    feature    …  h_p-1                                  state that all heads read, which is that of position p-1

Head j guesses the token j + 2 places after the state's, whatever stands between: so all nodes of one depth have the
same candidates, and a tree costs one pass of the heads. A drafter of this kind has no sessions and no cache. Knows
hidden states and ids. Never decides a token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.base import DraftLimits, DraftRequest, InstantDraft
from drafter.growth import EAGLE_TREE, GrowthNode, Guesses, StaticGrowth, TreeBuilder, grow
from drafter.medusa_config import MedusaCheckpoint
from drafter.network import last_state
from drafter.network_draft import add_noise, best_guesses
from drafter.options import DraftOptions
from drafter.scored import ScoredTree
from verifier.features import Fusion
from verifier.linear import Linear
from verifier.model import Model
from verifier.verifier import Verifier

DEFAULTS = DraftOptions()


class MedusaHeads:
    """The weights of all heads and their forward pass.

    Attributes:
        fusion: for the verifier; the hidden state after the final norm.
        target_ids: ``[draft vocabulary]`` int64, the target's id of each draft id.
    """

    def __init__(self, checkpoint: MedusaCheckpoint, target: Model) -> None:
        self.config = checkpoint.config
        self.fusion = last_state(target)
        self.target_ids = checkpoint.target_ids
        self._columns = self.target_ids.to(target.device)
        checkpoint = checkpoint.on(target.device)
        heads, layers = range(self.config.num_heads), range(self.config.num_layers)
        # The first blocks read the same state, so they run as one; later ones read what their own head has made of it.
        self._first = [_block(checkpoint, heads, layer) for layer in layers[:1]]
        self._later = [[_block(checkpoint, (head,), layer) for layer in layers[1:]] for head in heads]
        if self.config.outputs == "own":
            self._outputs = [Linear([checkpoint.output(head)]) for head in heads]
        else:
            shared = Linear([checkpoint.output(0)]) if self.config.outputs == "shared" else target.head
            self._outputs = [shared] * self.config.num_heads

    def logits(self, features: Tensor, num_heads: int) -> Tensor:
        """``[num_heads, rows, draft vocabulary]`` fp32 of the first heads, from ``features [rows, hidden]``."""
        states = features.unsqueeze(1).expand(-1, self.config.num_heads, -1)
        for block in self._first:
            states = states + F.silu(block(features)).view_as(states)
        return torch.stack([self._finish(states[:, head], head) for head in range(num_heads)])

    def _finish(self, states: Tensor, head: int) -> Tensor:
        """One head's logits from what its first block gives."""
        for block in self._later[head]:
            states = states + F.silu(block(states.contiguous()))
        logits = self._outputs[head](states.contiguous()) * self.config.logit_scale
        return logits if logits.shape[1] == len(self._columns) else logits[:, self._columns]


def _block(checkpoint: MedusaCheckpoint, heads: Sequence[int], layer: int) -> Linear:
    names = [f"blocks.{head}.layers.{layer}" for head in heads]
    biases = [checkpoint.tensor(f"{name}.bias") for name in names] if checkpoint.config.has_bias else []
    return Linear([checkpoint.tensor(f"{name}.weight") for name in names], biases)


class MedusaDraft(InstantDraft):
    """Proposes trees of the heads' candidates, all sequences of a batch in one pass.

    Args:
        options: how trees grow: dynamic ones keep the paths that their own heads think likeliest; and whether
            candidates at temperatures above 0 are ranked with the acceptance noise, which depends on depth alone, too.
        choices: the shape of static trees as paths of ranks, as in the published lists; cut to a request's limits.
    """

    def __init__(
        self, heads: MedusaHeads, options: DraftOptions = DEFAULTS, choices: Sequence[Sequence[int]] = EAGLE_TREE
    ) -> None:
        super().__init__()
        self.heads = heads
        self.fusion: Fusion | None = heads.fusion
        self._options, self._choices = options, choices

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        checkpoint: MedusaCheckpoint,
        verifier: Verifier,
        options: DraftOptions = DEFAULTS,
        choices: Sequence[Sequence[int]] = EAGLE_TREE,
    ) -> MedusaDraft:
        """A drafter for ``verifier``."""
        return cls(MedusaHeads(checkpoint, verifier.model), options, choices)

    def propose(self, request: DraftRequest) -> ScoredTree:
        return self.propose_all([request]).get(request.sequence, ScoredTree.root(request.ids[-1]))

    @torch.inference_mode()
    def propose_all(self, batch: Sequence[DraftRequest]) -> Mapping[int, ScoredTree]:
        ready: list[DraftRequest] = []
        features: list[Tensor] = []
        for request in batch:
            root = len(request.ids) - 1
            if request.features is not None and root > 0 and not request.limits.off:
                ready.append(request)
                features.append(request.features(root - 1, root))
        if not ready:
            return {}
        num_heads = min(self.heads.config.num_heads, max(request.limits.max_draft for request in ready))
        logits = self.heads.logits(torch.cat(features), num_heads)
        if self._options.noise_ranking and not all(request.sampling.is_greedy for request in ready):
            logits = self._with_noise(ready, logits)
        num_guesses = max(request.limits.draft_top_k for request in ready)
        guesses = best_guesses(logits.transpose(0, 1).flatten(0, 1), self.heads.target_ids, num_guesses)
        return {
            request.sequence: self._grow(request, guesses[index * num_heads : (index + 1) * num_heads])
            for index, request in enumerate(ready)
        }

    def _with_noise(self, requests: Sequence[DraftRequest], logits: Tensor) -> Tensor:
        """``logits [num_heads, rows, draft vocabulary]`` with the noise of the positions that the heads guess."""
        ids = self.heads.target_ids.numpy()
        rows = [
            add_noise(row, ids, request.sampling, len(request.ids) + head)
            for head, of_head in enumerate(logits)
            for row, request in zip(of_head.split(1), requests, strict=True)
        ]
        return torch.cat(rows).view_as(logits)

    def _grow(self, request: DraftRequest, levels: Sequence[Guesses]) -> ScoredTree:
        root, limits, options = request.ids[-1], request.limits, self._options
        if options.growth == "static":
            return grow(StaticGrowth(root, self._choices, limits), _Levels(levels))
        return grow_likeliest(root, levels, limits, threshold=options.threshold, decay=options.decay)


class _Levels:
    """A source of scores that knows a node's depth alone."""

    def __init__(self, levels: Sequence[Guesses]) -> None:
        self._levels = levels

    def expand(self, frontier: Sequence[GrowthNode], num_guesses: int) -> Sequence[Guesses]:
        return [self._levels[node.depth] if node.depth < len(self._levels) else () for node in frontier]


def grow_likeliest(
    root: int, levels: Sequence[Guesses], limits: DraftLimits, *, threshold: float = 0.0, decay: float = 1.0
) -> ScoredTree:
    """The ``max_nodes`` likeliest of all paths of guesses, one of each level, by the product of their probabilities.

    Exactly those, for a path is found from one that ranks no lower: from the path to its parent, or to the sibling
    before it. Equals go to the shallower path, then to the one found first.

    Args:
        levels: for each depth the guesses there, likeliest first, of different tokens.
        threshold, decay: as in `drafter.growth.BestFirstGrowth`.
    """
    builder = TreeBuilder(root, limits)
    least, log_decay = math.log(threshold) if threshold else -math.inf, math.log(decay)
    found: list[tuple[float, int, int, float, int, int]] = []  # a heap; the first entry ranks, least first
    numbers = count()

    def find(parent: int, above: float, depth: int, rank: int) -> None:
        """``above``: the log-probability of the path to the parent."""
        if depth <= min(len(levels), limits.max_draft) and rank < min(len(levels[depth - 1]), limits.draft_top_k):
            log_prob = above + min(levels[depth - 1][rank][1], 0.0)
            if log_prob >= least:
                heapq.heappush(found, (-log_prob - depth * log_decay, depth, next(numbers), above, parent, rank))

    find(0, 0.0, 1, 0)
    while found and not builder.is_full:
        _, depth, _, above, parent, rank = heapq.heappop(found)
        token, log_prob = levels[depth - 1][rank]
        log_prob = min(log_prob, 0.0)  # a log-softmax can come out a rounding error above
        node = builder.add(parent, token, math.exp(log_prob))
        assert node is not None, "a path was found beyond the limits"
        find(node, above + log_prob, depth + 1, 0)
        find(parent, above, depth, rank + 1)
    return builder.build()
