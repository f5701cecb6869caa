"""Another draft model for an engine that runs: found, checked, loaded and tried beside it, and only then handed over.

Whatever is wrong with it is said in one sentence, and the engine has not noticed anything. Knows files and memory, and
that a drafter guesses. When it is taken up, and what becomes of texts that are being written, the engine knows.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from drafter.base import Drafter, DraftLimits, DraftRequest
from drafter.factory import DraftPlan
from drafter.united import UnitedDraft
from verifier.config import ModelConfig
from verifier.errors import CheckpointError, DraftreeError
from verifier.features import Fusion
from verifier.sampling import SamplingParams
from verifier.verifier import Verifier
from workers.build import EngineSpec, locate_model, plan_guesses
from workers.engine import Engine
from workers.machine import available_memory, check_drafter_memory, gpu_memory
from workers.remote.placement import Elsewhere

TRIAL_IDS = (0, 1, 2, 3)
TRIAL = DraftLimits(max_draft=2, draft_top_k=2, max_nodes=4)
TRIAL_S = 60.0


def load_drafter(name: str, engine: Engine, spec: EngineSpec, elsewhere: Elsewhere | None = None) -> Drafter:
    """The drafter of that name for `Engine.exchange_drafter`. Takes as long as loading takes; from any thread.

    Args:
        name: as ``draft_model``.
        spec: that the engine was built from; all but the name stays.
        elsewhere: as for `workers.build.build_engine`.

    Raises:
        DraftreeError: it does not fit the model or into memory, is damaged, or cannot guess; in one sentence.
    """
    verifier = engine.verifier
    assert isinstance(verifier, Verifier)
    plan = plan_guesses(replace(spec, draft_model=name), locate_model(spec.model), elsewhere)
    memory = gpu_memory() if verifier.pool.device.type == "cuda" else available_memory()
    check_drafter_memory(plan, engine.pages.num_pages * engine.pages.page_size, memory)
    # On a thread that ends, as in `workers.build`: its team of threads would slow the engine's down for good.
    with ThreadPoolExecutor(max_workers=1) as loader:
        return loader.submit(_load, plan, verifier, tried=elsewhere is None).result()


def _load(plan: DraftPlan, verifier: Verifier, *, tried: bool) -> Drafter:
    try:
        drafter = plan.create(verifier)
    except DraftreeError:
        raise
    except Exception as error:
        raise CheckpointError(f"{plan.name} cannot be loaded: {type(error).__name__}: {error}") from error
    rows = _trial_features(drafter.fusion, verifier)
    if rows is not None and not bool(rows.isfinite().all()):
        raise CheckpointError(f"{plan.name} makes features that are no numbers.")
    if tried and not _gets_through(drafter, verifier.config, rows):
        raise CheckpointError(f"{plan.name} fails at its first guess; the log says how.")
    return drafter


@torch.inference_mode()
def _trial_features(fusion: Fusion | None, verifier: Verifier) -> Tensor | None:
    """``[len(TRIAL_IDS), width]``, of hidden states that no text has."""
    if fusion is None:
        return None
    states = torch.ones(len(TRIAL_IDS), verifier.config.hidden_size, device=verifier.pool.device)
    return fusion([states] * len(fusion.taps))


def _gets_through(drafter: Drafter, target: ModelConfig, rows: Tensor | None) -> bool:
    """Whether a new drafter guesses without failing; what it guesses does not matter."""

    def features(first: int, end: int) -> Tensor:
        assert rows is not None
        return rows[first:end]

    united = UnitedDraft.of(drafter, target.vocab_size)
    request = DraftRequest(0, TRIAL_IDS, TRIAL, SamplingParams(temperature=0), features if rows is not None else None)
    united.collect(united.start([request]), TRIAL_S)
    united.close(request.sequence)
    return united.failures == 0
