"""A small model in training: it is a Llama, learns what the target says, and counts chains of hits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafter.training.objectives.base import acceptance
from drafter.training.objectives.factory import create_objective
from drafter.training.objectives.small_model import SmallModelObjective
from drafter.training.settings import TrainSettings
from drafter.training.target import Target
from tests.drafter.training.data import conversation
from tests.drafter.training.tiny import countdown, said_by
from tests.models import save_tiny_model
from verifier.errors import BadSetting

VOCAB, HIDDEN = 160, 64
CPU = torch.device("cpu")
IDS = torch.arange(0, VOCAB, 2)
SETTINGS = TrainSettings(method="model", init="random", model_hidden=48, ttt_steps=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(save_tiny_model(tmp_path_factory.mktemp("models") / "target", "llama3", num_hidden_layers=2))


def create(target: Target, ids: torch.Tensor = IDS, **settings: object) -> SmallModelObjective:
    objective = create_objective(TrainSettings(**{**vars(SETTINGS), **settings}), target, 3, ids)
    assert isinstance(objective, SmallModelObjective)
    return objective


@torch.no_grad()
def test_it_is_the_llama_that_transformers_knows(target: Target) -> None:
    objective = create(target)
    for parameter in objective.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    config = objective.config
    assert (config.num_layers, config.num_heads, config.head_dim, config.intermediate_size) == (2, 3, 16, 128)
    llama = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(llama, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.load_state_dict(objective.state_dict(), strict=False)
    conversations = [conversation(n, seed=n, hidden=HIDDEN, vocab=VOCAB) for n in (23, 9, 30)]
    batch = objective.collate(conversations, CPU)
    expected = []
    for each in conversations:
        logits = model(each.ids[None].long()).logits[0]
        expected.append(logits[:-1][(each.mask[:-1] & each.mask[1:]).bool()])
    torch.testing.assert_close(objective.logits(batch), torch.cat(expected), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_it_learns_what_the_target_says_at_the_same_token(target: Target) -> None:
    objective = create(target)
    conversations = [conversation(n, seed=n, hidden=HIDDEN, vocab=VOCAB) for n in (23, 9)]
    batch = objective.collate(conversations, CPU)
    goal = objective.goal(batch)
    row = 0
    for each in conversations:
        for position in range(len(each) - 1):
            if each.mask[position] and each.mask[position + 1]:
                expected = (target.output[IDS] @ target.normed(each.last[position])).softmax(-1)
                torch.testing.assert_close(goal[row, IDS], expected, rtol=1e-4, atol=1e-5)
                assert int(batch.labels[row]) == int(each.ids[position + 1])
                row += 1
    assert row == len(goal) == sum(objective.num_rows(each.ids, each.mask) for each in conversations)
    assert float(goal[:, 1::2].sum()) == 0


def test_hits_in_a_row_are_what_a_chain_is_accepted_with(target: Target) -> None:
    objective = create(target)
    conversations = [conversation(n, seed=n, hidden=HIDDEN, vocab=VOCAB) for n in (23, 9, 30)]
    hits = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.7
    batch = objective.collate(conversations, CPU)
    logits = torch.full((len(batch.rows), VOCAB), 0.0)
    logits[torch.arange(len(batch.rows)), (batch.labels + (~hits[: len(batch.rows)]).long()) % VOCAB] = 1.0
    objective.logits = lambda batch: logits  # type: ignore[method-assign]
    counted = [[0, 0] for _ in range(3)]
    row = 0
    for each in conversations:
        right = [
            bool(hits[(row := row + 1) - 1]) if each.mask[position] and each.mask[position + 1] else None
            for position in range(len(each) - 1)
        ]
        for position in range(len(right)):
            for step in range(3):
                run = right[position : position + step + 1]
                if len(run) == step + 1 and None not in run:
                    counted[step][0] += all(run)
                    counted[step][1] += 1
    assert objective(batch).figures[:, 2:].tolist() == counted
    assert counted[2][0] > 3


def test_it_may_begin_with_the_targets_embedding(target: Target) -> None:
    """Tokens that are alike there are alike here, as far as so many dimensions can tell."""
    weight = create(target, init="target").model.embed_tokens.weight.detach()
    ours, theirs = ((each @ each.T).flatten() for each in (weight, target.embedding))
    assert float(torch.corrcoef(torch.stack((ours, theirs)))[0, 1]) > 0.9
    assert weight.std() == pytest.approx(0.02)


def test_a_width_that_heads_do_not_divide_is_refused(target: Target) -> None:
    with pytest.raises(BadSetting, match="model_hidden is 40, but must be a multiple of 16, the size of the target's"):
        create(target, model_hidden=40)


def test_a_model_wider_than_the_target_cannot_begin_with_its_embedding(target: Target) -> None:
    """It was torch's word on sizes that do not match, in a traceback; and beginning so is the default."""
    with pytest.raises(BadSetting, match="model_hidden is 80, but must be at most 64, the target's width, to begin"):
        create(target, init="target", model_hidden=80)
    create(target, init="random", model_hidden=80)


def test_a_model_learns(target: Target) -> None:
    objective = create(target, torch.arange(100, VOCAB))
    batch = objective.collate([said_by(target, countdown(40, seed)) for seed in range(6)], CPU)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        outcome = objective(batch)
        (outcome.loss / len(batch.rows)).backward()
        optimizer.step()
    assert min(acceptance(outcome.figures)) > 0.9
    assert len(objective.matrices()) == 14
