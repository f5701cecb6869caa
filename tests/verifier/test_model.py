"""Logits and hidden states of every family against `transformers` in fp32, for prompts, chunks and trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import FAMILIES, reference_logits, save_tiny_model
from verifier.batch import Segment, StepPlan
from verifier.rows import RowCounts
from verifier.tree import TokenTree
from verifier.verifier import Verifier

TOLERANCE = 1e-4
PROMPT = [random.Random(5).randrange(160) for _ in range(70)]


def load(folder: Path, page_size: int = 4, exact: bool = True) -> Verifier:
    return Verifier.load(folder, num_pages=512 // page_size, page_size=page_size, exact=exact, max_rows=96)


def pages_for(num_slots: int, page_size: int, seed: int = 1) -> tuple[int, ...]:
    """Pages in no order, as a long-running pool hands them out."""
    pages = list(range(512 // page_size))
    random.Random(seed).shuffle(pages)
    return tuple(pages[: -(-num_slots // page_size)])


def random_tree(root: int, num_nodes: int, seed: int) -> TokenTree:
    draw = random.Random(seed)
    nodes: dict[tuple[int, int], None] = {(-1, root): None}
    while len(nodes) < num_nodes:
        nodes[draw.randrange(len(nodes)), draw.randrange(160)] = None
    return TokenTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


def forward(verifier: Verifier, *segments: Segment) -> list[torch.Tensor]:
    return verifier.forward(StepPlan(segments)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_in_chunks_then_tree_equals_transformers(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / family, family)
    verifier = load(folder)
    pages = pages_for(len(PROMPT) + 16, 4)
    chunks = [
        forward(verifier, Segment(start, TokenTree.chain(PROMPT[start : start + 33]), pages))[0]
        for start in range(0, 66, 33)
    ]
    torch.testing.assert_close(torch.cat(chunks), reference_logits(folder, PROMPT[:66]), atol=TOLERANCE, rtol=0)

    tree = random_tree(PROMPT[66], 16, seed=3)
    logits = forward(verifier, Segment(66, tree, pages))[0]
    for node in range(len(tree)):
        path = [tree.tokens[ancestor] for ancestor in tree.paths[node]]
        expected = reference_logits(folder, PROMPT[:66] + path)[-1]
        torch.testing.assert_close(logits[node], expected, atol=TOLERANCE, rtol=0)


def test_ragged_batch_says_what_each_says_alone(tmp_path: Path) -> None:
    """Prompt chunks and trees of several sequences share one flat batch; in exact mode to the last bit."""
    verifier = load(save_tiny_model(tmp_path / "model"), page_size=16)
    pages = pages_for(512, 16)
    prefix = Segment(0, TokenTree.chain(PROMPT[:20]), pages[:3])
    forward(verifier, prefix)
    segments = [
        Segment(20, random_tree(PROMPT[20], 7, seed=8), pages[:3]),
        Segment(0, TokenTree.chain(PROMPT[5:36]), pages[3:5], scored_from=30),
        Segment(0, TokenTree.chain(PROMPT[40:41]), pages[5:6]),
    ]
    together = forward(verifier, *segments)
    alone = [forward(verifier, segment)[0] for segment in segments]
    assert [len(logits) for logits in together] == [7, 1, 1]
    for both, one in zip(together, alone, strict=True):
        assert torch.equal(both, one)


def test_taps_are_transformers_hidden_states(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama3")
    verifier = load(folder)
    verifier.taps = (0, 1, 2)
    output = verifier.forward(StepPlan((Segment(0, TokenTree.chain(PROMPT[:9]), pages_for(9, 4), tapped=True),)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states: Sequence[torch.Tensor] = model(torch.tensor([PROMPT[:9]]), output_hidden_states=True).hidden_states
    assert output.features[0] is not None
    torch.testing.assert_close(
        output.features[0], torch.stack([states[i][0] for i in (0, 1, 2)], dim=1), atol=1e-4, rtol=0
    )


def test_kept_nodes_move_into_place(tmp_path: Path) -> None:
    """The KV of a branch that is not a prefix of the tree serves as context once it was moved."""
    folder = save_tiny_model(tmp_path / "model")
    verifier = load(folder)
    pages = pages_for(40, 4)
    forward(verifier, Segment(0, TokenTree.chain(PROMPT[:10]), pages))
    tree = TokenTree((PROMPT[10], 7, 8, 9, 11, 12), (-1, 0, 0, 2, 2, 4))
    forward(verifier, Segment(10, tree, pages))

    def slot(logical: int) -> int:
        return pages[logical // 4] * 4 + logical % 4

    verifier.move([slot(10 + node) for node in (2, 4, 5)], [slot(logical) for logical in (11, 12, 13)])
    logits = forward(verifier, Segment(14, TokenTree.chain([33]), pages))[0]
    expected = reference_logits(folder, [*PROMPT[:11], 8, 11, 12, 33])[-1:]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "mistral"])
def test_exact_mode_gives_the_same_bits_however_rows_are_batched(family: str, tmp_path: Path) -> None:
    """One token at a time, in chunks, and as a branch of a tree: the same logits, bit for bit."""
    verifier = load(save_tiny_model(tmp_path / family, family))
    pages = pages_for(80, 4)
    one_by_one = torch.cat(
        [forward(verifier, Segment(start, TokenTree.chain([token]), pages))[0] for start, token in enumerate(PROMPT)]
    )
    fresh = pages_for(120, 4, seed=2)
    chunked = forward(verifier, Segment(0, TokenTree.chain(PROMPT[:61]), fresh))[0]
    assert torch.equal(chunked, one_by_one[:61])
    # The true continuation as the last branch at every level, beside a wrong one.
    tokens, parents, at = [PROMPT[61]], [-1], 0
    branch = [0]
    for token in PROMPT[62:68]:
        tokens += [(token + 1) % 160, token]
        parents += [at, at]
        at = len(tokens) - 1
        branch.append(at)
    logits = forward(verifier, Segment(61, TokenTree(tuple(tokens), tuple(parents)), fresh))[0]
    assert torch.equal(logits[branch], one_by_one[61:68])


def test_rows_that_only_pad_the_batch_write_to_no_page_that_can_be_lent(tmp_path: Path) -> None:
    verifier = load(save_tiny_model(tmp_path / "model"))
    verifier.row_counts = RowCounts((8,))
    forward(verifier, Segment(0, TokenTree.chain(PROMPT[:3]), (1,)))
    written = verifier.pool.keys.abs().sum(dim=(0, 2, 3)).nonzero().flatten().tolist()
    page_size, num_lent = 4, 512 // 4
    assert [slot for slot in written if slot < num_lent * page_size] == [page_size, page_size + 1, page_size + 2]
    assert len(written) == 4  # the padding's is the fourth
