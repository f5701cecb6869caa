"""A target with a tokenizer, and a head that was fitted to what it says: its first guesses are nearly all right."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from drafter.base import DraftLimits, NoDraft
from tests.deployments.fakes import END, TEMPLATE, TEXT, VOCAB_SIZE
from tests.drafter.heads import HeadShape, random_weights
from tests.models import save_tiny_model
from verifier.batch import Segment, StepPlan
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree
from verifier.verifier import Verifier
from workers.measuring.contest import Asked, engine_of
from workers.sequence import Request

FITTED = (2, 3, 5)  # boundary ids of the layers that the head is made for; the target has six
NUM_TOKENS = 40  # of an answer: enough to say more than the matrix has columns
WORDS = ("one fish", "two fish", "red fish", "blue fish", "old fish", "new fish")
SHAPE = HeadShape(
    target_hidden=72,
    target_vocab=VOCAB_SIZE,
    hidden=VOCAB_SIZE,
    intermediate=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    draft_vocab=VOCAB_SIZE,
    max_positions=2048,
    own_embedding=True,
)


def make_target(folder: Path) -> Path:
    save_tiny_model(folder, num_hidden_layers=6, vocab_size=VOCAB_SIZE, max_position_embeddings=2048, eos_token_id=END)
    TEXT._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@torch.inference_mode()
def fitted_head(verifier: Verifier, asked: list[Asked]) -> dict[str, torch.Tensor]:
    """The weights of a head that does nothing but guess the token after next by a matrix over three layers' states.

    The matrix is fitted to the target's own answers, by least squares.
    """
    requests = [Request(str(i), each.ids, SamplingParams(temperature=0), NUM_TOKENS) for i, each in enumerate(asked)]
    answers = engine_of(verifier, NoDraft(), DraftLimits()).run(requests)
    verifier.taps = FITTED
    states: list[torch.Tensor] = []
    following: list[int] = []
    for prompt, answer in zip(asked, answers, strict=True):
        ids = (*prompt.ids, *answer.output_ids)
        segment = Segment(0, TokenTree.chain(ids), tuple(range(verifier.pool.num_pages - 1)), len(ids), tapped=True)
        features = verifier.forward(StepPlan((segment,))).features[0]
        assert features is not None
        first = len(prompt.ids) - 1
        states.append(features[first:-2].flatten(1))
        following += ids[first + 2 :]
    wanted = torch.nn.functional.one_hot(torch.tensor(following), VOCAB_SIZE).float()
    weights = random_weights(SHAPE)
    weights["fc.weight"] = torch.linalg.lstsq(torch.cat(states), wanted).solution.T
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        weights[name] = torch.zeros_like(weights[name])
    weights["norm.weight"] = torch.ones(VOCAB_SIZE)
    weights["lm_head.weight"] = torch.eye(VOCAB_SIZE)
    return weights
