"""The definitions of what is counted, with figures that can be checked by hand."""

from __future__ import annotations

from verifier.tree import TokenTree
from workers.stats import Speculation


def test_figures_of_a_known_pattern() -> None:
    """Right, wrong, right, right in each of ten rounds: what follows the first wrong guess is not accepted."""
    total = Speculation()
    for _ in range(10):
        total += Speculation.of_step(TokenTree.chain((0, 1, 2, 3, 4)), nodes=(0, 1), num_output=2)
    assert (total.steps, total.drafted_tokens, total.accepted_tokens) == (10, 40, 10)
    assert total.acceptance_rate == 0.25
    assert total.mean_acceptance_length == 2.0
    assert total.drafted_by_position == (10, 10, 10, 10)
    assert total.accepted_by_position == (10, 0, 0, 0)
    assert total.acceptance_where_tried == (1.0, 0.0)


def test_a_tree_counts_its_nodes_and_its_depth() -> None:
    tree = TokenTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 2))
    step = Speculation.of_step(tree, nodes=(0, 1, 3), num_output=3)
    assert step.drafted_tokens == 4
    assert step.drafted_by_position == (1, 1)
    assert step.accepted_by_position == (1, 1)


def test_a_walk_tries_only_what_hangs_below_it() -> None:
    """Node 1 is right and has no children; that the tree is deeper elsewhere says nothing of the second guess."""
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 0, 2))
    leaf = Speculation.of_step(tree, nodes=(0, 1), num_output=2)
    assert (leaf.drafted_by_position, leaf.tried_by_position) == ((1, 1), (1, 0))
    missed = Speculation.of_step(tree, nodes=(0, 2), num_output=2)
    assert missed.tried_by_position == (1, 1)
    both = leaf + missed
    assert (both.drafted_by_position, both.accepted_by_position) == ((2, 2), (2, 0))
    assert both.acceptance_where_tried == (1.0, 0.0)
    assert (leaf + leaf).acceptance_where_tried == (1.0,)


def test_a_text_that_ends_in_the_middle_of_a_walk_tried_no_further() -> None:
    """Three guesses were right, but the second was a stop id: neither the third nor a bonus token is output."""
    step = Speculation.of_step(TokenTree.chain((0, 1, 2, 3)), nodes=(0, 1, 2, 3), num_output=2)
    assert (step.verified_tokens, step.accepted_tokens) == (2, 2)
    assert step.accepted_by_position == (1, 1, 0)
    assert step.tried_by_position == (1, 1, 0)


def test_positions_of_different_depths_add_up() -> None:
    shallow = Speculation.of_step(TokenTree.chain((0, 1)), (0, 1), 2)
    deep = Speculation.of_step(TokenTree.chain((0, 1, 2)), (0,), 1)
    assert (shallow + deep).drafted_by_position == (2, 1)
    assert (deep + shallow).accepted_by_position == (1, 0)


def test_nothing_drafted_is_no_rate() -> None:
    """Elsewhere 0/0 was shown as nan."""
    assert Speculation().mean_acceptance_length is None
    assert Speculation().acceptance_rate is None
    plain = Speculation.of_step(TokenTree.chain((0,)), (0,), 1)
    assert plain.mean_acceptance_length == 1.0
    assert plain.acceptance_rate is None
    assert plain.acceptance_where_tried == ()
