"""The trainable network against the definition of the serving one, and training-time test against its dense mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.training.objectives.eagle3 import Eagle3Objective, initialise
from drafter.training.shards import Conversation
from drafter.training.target import Target
from tests.drafter.heads import HeadShape, SlowHead
from tests.models import save_tiny_model

CPU = torch.device("cpu")
VOCAB, WIDTH, STEPS = 160, 72, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(save_tiny_model(tmp_path_factory.mktemp("target"), "smollm2"))


def make_objective(
    target: Target, *, skipped: int = VOCAB, least_path: float = 0.0, start: str = "random"
) -> Eagle3Objective:
    """With weights large enough to matter, and all ids but the multiples of ``skipped``."""
    decoder = replace(target.config, num_layers=1, intermediate_size=80, layer_windows=(None,))
    ids = torch.tensor([each for each in range(VOCAB) if each % skipped])
    objective = Eagle3Objective(target, decoder, 3, ids, num_steps=STEPS, step_weight=0.8, least_path=least_path)
    initialise(objective, target, start, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif start == "random":
                parameter.mul_(8)
    return objective


def conversation(num_tokens: int, start: int, *, seed: int = 0) -> Conversation:
    generator = torch.Generator().manual_seed(seed)
    return Conversation(
        ids=torch.randint(0, VOCAB, (num_tokens,), generator=generator, dtype=torch.int32),
        mask=(torch.arange(num_tokens) >= start).to(torch.uint8),
        kind="chat",
        features=torch.randn(num_tokens, 3 * WIDTH, generator=generator).half(),
        last=torch.randn(num_tokens, WIDTH, generator=generator).half(),
    )


def serving_logits(objective: Eagle3Objective, target: Target, each: Conversation, slot: int, num_steps: int) -> Tensor:
    """``[steps, ids]`` of the serving network: the context up to ``slot``, then a chain of what was written."""
    decoder = objective.decoder
    shape = HeadShape(
        hidden=WIDTH,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        rope_theta=decoder.rope_theta,
        rms_norm_eps=decoder.rms_norm_eps,
    )
    weights = dict(objective.state_dict())
    theirs = load_file(target.checkpoint._files._files["model.norm.weight"])  # type: ignore[attr-defined]
    head = SlowHead(shape, weights, theirs)
    cache: list[list[tuple[Tensor, Tensor]]] = [[]]
    ids = each.ids.tolist()
    for place in range(slot + 1):
        fused = head.fuse(each.features[place].float().split(WIDTH))
        state = head.slot(ids[place + 1], fused, place, cache)
    logits = [objective.logits(state)]
    for step in range(1, num_steps):
        state = head.slot(ids[slot + 1 + step], state, slot + step, cache)
        logits.append(objective.logits(state))
    return torch.stack(logits)


@torch.no_grad()
def test_unrolled_it_is_the_serving_network(target: Target) -> None:
    """All steps of every row: what a chain of drafts would compute if the tokens written were those guessed."""
    objective = make_objective(target)
    conversations = [conversation(9, 4), conversation(14, 6, seed=1), conversation(12, 3, seed=2)]
    batch = objective.collate(conversations, CPU)
    state = objective.begin(batch)
    by_step = [objective.logits(state.hidden)]
    for shift, step in enumerate(batch.steps[1:], start=1):
        state = objective.advance(batch, state, step, shift)
        by_step.append(objective.logits(state.hidden))
    rows = [0] * STEPS
    for each in conversations:
        start = int(each.mask.argmax())
        for slot in range(start - 1, len(each) - 2):
            num_steps = min(STEPS, len(each) - 2 - slot)
            expected = serving_logits(objective, target, each, slot, num_steps)
            for depth in range(num_steps):
                torch.testing.assert_close(by_step[depth][rows[depth]], expected[depth], rtol=1e-4, atol=1e-4)
                rows[depth] += 1
    assert rows == [len(logits) for logits in by_step]


@torch.no_grad()
def test_attention_is_that_of_the_dense_mask(target: Target) -> None:
    """``[tril | I | I | …]``: step 0's keys up to the query's slot, and of each later step the slot's own."""
    objective = make_objective(target)
    each = conversation(11, 0)
    batch = objective.collate([each], CPU)
    num_slots = len(each) - 2
    heads, kv_heads, dim = objective.decoder.num_heads, objective.decoder.num_kv_heads, objective.decoder.head_dim
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, STEPS, num_slots, kv_heads, dim, generator=generator)
    queries = torch.randn(num_slots, heads, dim, generator=generator)
    mask = torch.cat((torch.ones(num_slots, num_slots).tril(), *[torch.eye(num_slots)] * (STEPS - 1)), dim=1).bool()
    all_keys, all_values = (each.flatten(0, 1).repeat_interleave(heads // kv_heads, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, all_keys) * dim**-0.5
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), all_values)
    step = replace(batch.steps[0], slots=torch.arange(num_slots), owners=torch.zeros(num_slots, dtype=torch.int64))
    first_keys, first_values = (each[0].transpose(0, 1).unsqueeze(0) for each in (keys, values))
    attended, weight = objective._attend_context(queries, first_keys, first_values, batch, step)
    own = [(keys[i], values[i]) for i in range(1, STEPS)]
    torch.testing.assert_close(objective._attend_own(queries, attended, weight, own), expected)


@torch.no_grad()
def test_loss_and_figures_are_their_definition(target: Target) -> None:
    objective = make_objective(target, skipped=4)
    conversations = [conversation(13, 5), conversation(16, 2, seed=4)]
    outcome = objective(objective.collate(conversations, CPU))
    loss, figures = 0.0, torch.zeros(STEPS, 4)
    for each in conversations:
        ids = each.ids.tolist()
        for slot in range(int(each.mask.argmax()) - 1, len(each) - 2):
            steps = range(min(STEPS, len(each) - 2 - slot))
            figures[: len(steps), 3] += 1
            logits = serving_logits(objective, target, each, slot, len(steps))
            right = True
            for step in steps:
                written = ids[slot + 2 + step]
                if written not in objective.target_ids:
                    break
                normed = target.normed(each.last[slot + 1 + step])
                goal = (target.output[objective.target_ids] @ normed).softmax(0)
                lost = float(-(goal * logits[step].log_softmax(0)).sum())
                right = right and int(objective.target_ids[logits[step].argmax()]) == written
                loss += 0.8**step * lost
                figures[step, :3] += torch.tensor([lost, 1.0, right])
    torch.testing.assert_close(outcome.figures, figures, rtol=1e-4, atol=1e-3)
    assert float(outcome.loss) == pytest.approx(loss, rel=1e-4)
    assert 0 < figures[2, 1] < figures[1, 1] < figures[0, 1] < figures[0, 3]  # some tokens are outside, step by step


def test_rows_whose_tokens_the_head_would_never_guess_go_no_further(target: Target) -> None:
    batch_of = [conversation(30, 2, seed=6)]
    everything = make_objective(target)
    wide = everything(everything.collate(batch_of, CPU)).figures
    likely = make_objective(target, least_path=0.005)
    outcome = likely(likely.collate(batch_of, CPU))
    assert outcome.figures[0].tolist() == wide[0].tolist()
    assert 0 < outcome.figures[1, 1] < wide[1, 1]
    assert outcome.figures[:, 2:].tolist() == wide[:, 2:].tolist()  # what is guessed right is always followed
    outcome.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in likely.parameters())


def test_mixed_precision_says_nearly_the_same(target: Target) -> None:
    """As on GPUs: matrices in bfloat16, the residual stream and the loss in fp32."""
    objective = make_objective(target)
    batch = objective.collate([conversation(20, 4), conversation(25, 9, seed=1)], CPU)
    exact = objective(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = objective(batch)
    assert float(rough.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.02)
    rough.loss.backward()
    assert objective.fc.weight.grad is not None
    assert objective.fc.weight.grad.dtype == torch.float32


@torch.no_grad()
def test_a_head_may_start_from_the_target(target: Target) -> None:
    objective = make_objective(target, skipped=2, start="target")
    theirs = {name: target.checkpoint.tensor(f"model.layers.2.{name}.weight").float() for name in ("self_attn.k_proj",)}
    assert torch.equal(objective.lm_head.weight, target.output[objective.target_ids])
    assert torch.equal(objective.midlayer.self_attn.k_proj.weight[:, WIDTH:], theirs["self_attn.k_proj"])
    assert objective.midlayer.mlp.up_proj.weight.shape == (80, WIDTH)  # not the target's 96: stays as it was
    assert 0 < objective.midlayer.mlp.up_proj.weight.std() < 0.03
