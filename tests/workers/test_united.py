"""A head and n-grams together on a tiny model: promise 1 holds, and both are listened to."""

from __future__ import annotations

from pathlib import Path

from drafter.base import DraftLimits
from drafter.factory import plan_drafter
from tests.drafter.heads import HeadShape, save_tiny_head
from tests.models import save_tiny_model
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.engine import Engine, EngineConfig
from workers.sequence import Request


def test_a_head_and_ngrams_guess_together(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "target")
    head = save_tiny_head(
        tmp_path / "head",
        HeadShape(target_hidden=72, hidden=72, head_dim=16),
        eagle_aux_hidden_state_layer_ids=[0, 1, 3],
    )
    verifier = Verifier.load(target, num_pages=64, page_size=8)
    requests = [
        Request(f"{seed}", (1, 2, 3, 4, 1, 2), SamplingParams(temperature=seed % 2, seed=seed), 30) for seed in range(4)
    ]
    config = EngineConfig(64, 8, limits=DraftLimits(4, 2, 8))
    plain = Engine(verifier, plan_drafter("none", verifier.config).create(verifier), config).run(requests)
    engine = Engine(verifier, plan_drafter(f"ngram+{head}", verifier.config).create(verifier), config)
    assert [result.output_ids for result in engine.run(requests)] == [result.output_ids for result in plain]
    assert engine.stats().drafter_failures == 0
    assert {"ngram", str(head)} <= {learnt["who"] for learnt in engine.drafter.calibration.numbers()}
    assert engine.stats().counters.speculation.drafted_tokens > 0
