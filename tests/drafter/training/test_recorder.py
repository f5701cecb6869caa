"""What is recorded while a text is written is what a prefill of that text would compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.base import DraftLimits, DraftRequest
from drafter.training.recorder import RECORDED, Recorder, default_layer_ids
from tests.drafter.heads import target_config
from tests.models import save_tiny_model
from verifier.batch import Segment, StepPlan
from verifier.errors import BadSetting
from verifier.sampling import SamplingParams
from verifier.tree import TokenTree
from verifier.verifier import Verifier
from workers.config import EngineConfig
from workers.engine import Engine
from workers.sequence import Request

PAGE_SIZE = 8
LAYER_IDS = (0, 1, 2)  # of three
HIDDEN = 72


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def prefilled(model: Path, ids: Sequence[int]) -> torch.Tensor:
    """``[len(ids), 4, HIDDEN]`` fp32 of one forward pass over all of ``ids``."""
    verifier = Verifier.load(model, num_pages=32, page_size=PAGE_SIZE, exact=False)
    verifier.taps = (*LAYER_IDS, 3)
    plan = StepPlan((Segment(0, TokenTree.chain(tuple(ids)), tuple(range(32)), tapped=True),))
    features = verifier.forward(plan).features[0]
    assert features is not None
    return features


@pytest.mark.parametrize("num_pages", [12, 64])
def test_recorded_states_equal_those_of_a_prefill(model: Path, num_pages: int) -> None:
    """Six texts with a common beginning, in prompt chunks and prefix hits; with few pages they preempt one another."""
    verifier = Verifier.load(model, num_pages=num_pages, page_size=PAGE_SIZE, exact=False, max_rows=24)
    recorder = Recorder(verifier.config, LAYER_IDS)
    engine = Engine(verifier, recorder, EngineConfig(num_pages, PAGE_SIZE, max_model_len=96, max_rows=24))
    requests = [
        Request(str(i), (*range(20), 30 + i), SamplingParams(temperature=i % 2, seed=i), 40, limits=RECORDED)
        for i in range(6)
    ]
    results = engine.run([*requests, replace(requests[0], id="unrecorded", limits=DraftLimits())])
    stats = engine.stats()
    assert stats.drafter_failures == 0
    assert (stats.counters.preemptions > 0) == (num_pages == 12)
    assert stats.counters.cached_tokens > 0
    for request, result in zip(requests, results, strict=False):
        ids = (*request.prompt_ids, *result.output_ids)
        n = recorder.num_recorded(request.sampling.seed)
        assert len(ids) - 6 < n < len(ids)  # the end is computed when there is no more to draw, or no room to guess
        features, last = recorder.take(request.sampling.seed)
        assert features.dtype == last.dtype == torch.float16
        expected = prefilled(model, ids[:n])
        torch.testing.assert_close(features.float().view(n, 3, HIDDEN), expected[:, :3], atol=4e-3, rtol=2e-3)
        torch.testing.assert_close(last.float(), expected[:, 3], atol=4e-3, rtol=2e-3)
        assert recorder.num_recorded(request.sampling.seed) == 0


def test_states_beyond_fp16_stay_finite() -> None:
    """A model's first token can be far larger than the rest, and infinity times zero is NaN."""
    recorder = Recorder(target_config(), (2, 15, 27))
    width = 4 * 64
    request = DraftRequest(
        0, (5, 6), RECORDED, SamplingParams(seed=9), lambda first, end: torch.full((end - first, width), -1e6)
    )
    recorder.start([request])
    features, last = recorder.take(9)
    assert features.shape == (1, 3 * 64)
    assert last.tolist() == [[-65504.0] * 64]


def test_a_request_that_never_decoded_has_an_empty_recording() -> None:
    features, last = Recorder(target_config(), (2, 15, 27)).take(1)
    assert (len(features), len(last)) == (0, 0)


@pytest.mark.parametrize("layer_ids", [(), (2, 2, 27), (15, 2, 27), (2, 15, 31), (-1, 15, 27)])
def test_impossible_layers_are_refused(layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(BadSetting, match=r"layer_ids is .* ascending, from 0 to 30"):
        Recorder(target_config(), layer_ids)


def test_default_layers() -> None:
    assert default_layer_ids(30) == (2, 15, 27)
