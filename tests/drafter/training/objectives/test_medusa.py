"""Medusa heads in training: the right tokens and distributions for each head, and that they are learnt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.training.objectives.base import acceptance
from drafter.training.objectives.medusa import MedusaObjective, initialise
from drafter.training.shards import Conversation
from drafter.training.target import Target
from tests.drafter.medusas import MedusaShape, slow_logits
from tests.drafter.training.data import conversation
from tests.models import save_tiny_model

VOCAB, HIDDEN, NUM_HEADS = 160, 64, 3
CPU = torch.device("cpu")
IDS = torch.arange(0, VOCAB, 2)  # a truncated vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(save_tiny_model(tmp_path_factory.mktemp("models") / "target", "llama2"))


def random_objective(target: Target, ids: Tensor) -> MedusaObjective:
    objective = MedusaObjective(target, ids, NUM_HEADS, 0.8, num_layers=2)
    initialise(objective, "target", seed=0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return objective


def test_each_head_learns_what_the_target_says_at_the_place_that_it_guesses(target: Target) -> None:
    """Position by position, head by head, from the definition."""
    objective = random_objective(target, IDS)
    shape = MedusaShape(NUM_HEADS, num_layers=2)
    conversations = [conversation(n, seed=n, hidden=HIDDEN, vocab=VOCAB) for n in (40, 9, 60)]
    known = set(IDS.tolist())
    draft_id = {token: index for index, token in enumerate(IDS.tolist())}
    figures = torch.zeros(NUM_HEADS, 4)
    for each in conversations:
        ids, mask = each.ids.tolist(), each.mask.tolist()
        for position in range(len(ids)):
            right = True
            for head in range(NUM_HEADS):
                guessed = range(position + 2, position + 3 + head)
                if guessed[-1] >= len(ids) or not all(mask[position + 1 : guessed[-1] + 1]):
                    break
                figures[head, 3] += 1
                if not all(ids[place] in known for place in guessed):
                    continue
                logits = slow_logits(shape, objective.state_dict(), target.normed(each.last[position]), head)
                goal = (target.output[IDS] @ target.normed(each.last[guessed[-1] - 1])).softmax(-1)
                right = right and int(logits.argmax()) == draft_id[ids[guessed[-1]]]
                figures[head] += torch.tensor([-(goal @ logits.log_softmax(-1)), 1, right, 0])
    outcome = objective(objective.collate(conversations, CPU))
    torch.testing.assert_close(outcome.figures, figures, rtol=1e-4, atol=1e-4)
    weights = torch.tensor([1, 0.8, 0.64])
    torch.testing.assert_close(outcome.loss, (figures[:, 0] * weights).sum(), rtol=1e-4, atol=1e-4)
    assert figures[2, 1] > 3
    assert sum(objective.num_rows(each.ids, each.mask) for each in conversations) == figures[0, 1]


def test_heads_begin_as_the_targets_own_output(target: Target) -> None:
    objective = MedusaObjective(target, IDS, NUM_HEADS, 0.8)
    initialise(objective, "target", seed=0)
    state = torch.randn(HIDDEN)
    for head in range(NUM_HEADS):
        got = slow_logits(MedusaShape(), objective.state_dict(), state, head)
        torch.testing.assert_close(got, target.output[IDS] @ state, rtol=1e-4, atol=1e-4)
    initialise(objective, "random", seed=0)
    weights = objective.state_dict()
    assert not torch.equal(weights["lm_heads.0.weight"], weights["lm_heads.1.weight"])


def counting(first: int, target: Target) -> Conversation:
    """Tokens count up; the target's states are such that it is sure of the next one."""
    ids = torch.arange(first, first + 60) % VOCAB
    rows = target.output[(ids + 1) % VOCAB] / target.norm
    return Conversation(
        ids=ids.int(),
        mask=torch.ones(60, dtype=torch.uint8),
        kind="chat",
        features=torch.zeros(60, 0).half(),
        last=rows.half(),
    )


def test_heads_learn(target: Target) -> None:
    sure = Target(target.checkpoint, target.embedding, target.norm, 20 * target.output)
    objective = MedusaObjective(sure, torch.arange(VOCAB), NUM_HEADS, 0.8)
    initialise(objective, "random", seed=0)
    batch = objective.collate([counting(first, sure) for first in (0, 50, 100)], CPU)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=0.02)
    assert max(acceptance(objective(batch).figures)) < 0.1
    for _ in range(60):
        optimizer.zero_grad()
        outcome = objective(batch)
        (outcome.loss / len(batch.labels)).backward()
        optimizer.step()
    assert min(acceptance(objective(batch).figures)) > 0.95
