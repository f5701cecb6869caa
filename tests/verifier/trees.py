"""Random trees for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from verifier.tree import TokenTree


@st.composite
def token_trees(draw: st.DrawFn, max_nodes: int = 12, vocab_size: int = 6) -> TokenTree:
    """Any shape and any order of nodes in which parents come first."""
    tokens, parents = [draw(st.integers(0, vocab_size - 1))], [-1]
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent = draw(st.integers(0, len(tokens) - 1))
        token = draw(st.integers(0, vocab_size - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))
