"""Requests and checks that the drafters' tests share."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from drafter.base import DraftLimits, DraftRequest
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree

LIMITS = st.builds(
    DraftLimits,
    max_draft=st.integers(0, 6),
    draft_top_k=st.integers(0, 4),
    max_nodes=st.integers(0, 20),
)


def request(ids: Sequence[int], limits: DraftLimits, sequence: int = 1) -> DraftRequest:
    return DraftRequest(sequence, ids, limits, SamplingParams())


def assert_within(tree: TokenTree, limits: DraftLimits) -> None:
    assert len(tree) - 1 <= limits.max_nodes
    assert max(tree.depths) <= limits.max_draft
    for node in range(len(tree)):
        assert tree.parents.count(node) <= limits.draft_top_k
