from __future__ import annotations

import pytest
from hypothesis import given

from tests.verifier.trees import token_trees
from verifier.tree import TokenTree


@given(token_trees())
def test_depths_and_paths_follow_the_parents(tree: TokenTree) -> None:
    for node, path in enumerate(tree.paths):
        assert path[0] == 0
        assert path[-1] == node
        assert tree.depths[node] == len(path) - 1
        assert [tree.parents[step] for step in path] == [-1, *path[:-1]]


@given(token_trees())
def test_child_finds_every_node_below_its_parent_and_nothing_else(tree: TokenTree) -> None:
    for node in range(1, len(tree)):
        assert tree.child(tree.parents[node], tree.tokens[node]) == node
    for node in range(len(tree)):
        for token in range(-1, 8):
            child = tree.child(node, token)
            assert child is None or (tree.parents[child], tree.tokens[child]) == (node, token)


def test_a_chain_is_a_tree_without_alternatives() -> None:
    tree = TokenTree.chain([7, 7, 9])
    assert tree.parents == (-1, 0, 1)
    assert tree.depths == (0, 1, 2)
    assert tree.paths == ((0,), (0, 1), (0, 1, 2))


def test_the_same_token_may_stand_below_different_parents() -> None:
    tree = TokenTree((1, 2, 3, 2, 2), (-1, 0, 0, 1, 2))
    assert tree.child(1, 2) == 3
    assert tree.child(2, 2) == 4


@pytest.mark.parametrize(
    ("tokens", "parents", "complaint"),
    [
        ((), (), "0 and 0"),
        ((1, 2), (-1,), "1 and 2"),
        ((1,), (0,), "node 0 is the root"),
        ((1, 2), (-1, 1), "node 1 must come after its parent"),
        ((1, 2, 3), (-1, 2, 0), "node 1 must come after its parent"),
        ((1, 2), (-1, -1), "node 1 must come after its parent"),
        ((1, 2, 2), (-1, 0, 0), "same token"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TokenTree(tokens, parents)
