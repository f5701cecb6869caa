"""EAGLE-1 in training: the states and the loss of its definition, and that it is learnt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.training.objectives.eagle import EagleObjective, initialise
from drafter.training.objectives.factory import create_objective, head_decoder
from drafter.training.settings import TrainSettings
from drafter.training.target import Target
from tests.drafter.eagle_heads import EagleShape, SlowEagle
from tests.drafter.training.data import conversation
from tests.drafter.training.tiny import countdown, said_by
from tests.models import save_tiny_model

VOCAB, HIDDEN = 160, 64
CPU = torch.device("cpu")
IDS = torch.arange(0, VOCAB, 2)
SETTINGS = TrainSettings(method="eagle", init="random")
SHAPE = EagleShape(own_embedding=False, rope_theta=5e5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(save_tiny_model(tmp_path_factory.mktemp("models") / "target", "llama3", num_hidden_layers=2))


def random_objective(target: Target) -> EagleObjective:
    objective = create_objective(SETTINGS, target, 3, IDS)
    assert isinstance(objective, EagleObjective)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return objective


@torch.no_grad()
def test_states_and_loss_are_those_of_the_definition(target: Target) -> None:
    """Conversation by conversation, slot by slot; padding and what is not trained on make no difference."""
    objective = random_objective(target)
    weights = {name: tensor.detach() for name, tensor in objective.state_dict().items()}
    slow = SlowEagle(SHAPE, weights, {"model.embed_tokens.weight": target.embedding, "lm_head.weight": target.output})
    conversations = [conversation(n, seed=n, hidden=HIDDEN, vocab=VOCAB) for n in (23, 9, 30)]
    batch = objective.collate(conversations, CPU)
    expected: list[Tensor] = []
    loss = torch.zeros(())
    num_hits = 0
    for each in conversations:
        cache: list[list[tuple[Tensor, Tensor]]] = [[]]
        states = target.normed(each.last)
        for slot in range(len(each) - 2):
            state = slow.slot(int(each.ids[slot + 1]), states[slot], slot, cache)
            if not (each.mask[slot + 1] and each.mask[slot + 2]):
                continue
            expected.append(state)
            goal = (target.output[IDS] @ states[slot + 1]).softmax(-1)
            logits = target.output[IDS] @ state
            distance = F.smooth_l1_loss(state, states[slot + 1])
            loss += distance - 0.1 * (goal @ logits.log_softmax(-1))
            num_hits += int(IDS[logits.argmax()] == each.ids[slot + 2])
    torch.testing.assert_close(objective.continued(batch), torch.stack(expected), rtol=1e-4, atol=1e-4)
    outcome = objective(batch)
    torch.testing.assert_close(outcome.loss, loss, rtol=1e-4, atol=1e-3)
    assert outcome.figures[0, 1:].tolist() == [len(expected), num_hits, len(expected)]
    assert sum(objective.num_rows(each.ids, each.mask) for each in conversations) == len(expected)


def test_noise_is_for_learning_alone_and_comes_again(target: Target) -> None:
    objective = random_objective(target)
    batch = objective.collate([conversation(40, hidden=HIDDEN, vocab=VOCAB)], CPU)
    noisy = objective.continued(batch).detach()
    assert torch.equal(objective.continued(batch), noisy)
    with torch.no_grad():
        clean = objective.continued(batch)
    assert 1e-3 < float((noisy - clean).abs().mean()) < 1


def test_it_may_begin_with_the_targets_last_layer(target: Target) -> None:
    """Its output matrices made logits of some hundreds of features that are normed."""
    objective = EagleObjective(target, head_decoder(SETTINGS, target.config), IDS, seed=0)
    initialise(objective, target, "target", seed=0)
    theirs = target.checkpoint.tensor("model.layers.1.mlp.gate_proj.weight")
    assert torch.equal(objective.state_dict()["layers.0.mlp.gate_proj.weight"], theirs)
    each = conversation(20, hidden=HIDDEN, vocab=VOCAB)
    with torch.no_grad():
        states = objective.continued(batch := objective.collate([each], CPU))
    features = target.normed(batch.features).flatten(0, 1)[batch.rows]
    torch.testing.assert_close(states, features, rtol=0.1, atol=1.0)


def test_a_head_learns(target: Target) -> None:
    objective = create_objective(SETTINGS, target, 3, torch.arange(VOCAB))
    batch = objective.collate([said_by(target, countdown(40, seed)) for seed in range(6)], CPU)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=0.005)
    before = objective(batch).figures
    for _ in range(60):
        optimizer.zero_grad()
        outcome = objective(batch)
        (outcome.loss / len(batch.rows)).backward()
        optimizer.step()
    assert outcome.figures[0, 0] < before[0, 0] / 2
    assert outcome.figures[0, 2] > 0.9 * outcome.figures[0, 3]
