"""From a few settings to a running engine: the one recipe for the command line, the benchmarks and the service.

Imports torch only when an engine is built, so that settings can be read and refused without it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.base import DraftLimits
from drafter.factory import DraftPlan, check_name, plan_drafter
from drafter.options import DraftOptions
from verifier.config import ModelConfig
from verifier.default_model import default_model_path
from verifier.device import DeviceName, choose_device
from verifier.errors import BadSetting
from verifier.hub import resolve_model
from verifier.weights import Checkpoint
from workers.config import Acceptance, EngineConfig
from workers.machine import available_memory, check_memory, gpu_memory
from workers.remote.placement import Elsewhere, plan_remote, remote_part
from workers.text import Text

if TYPE_CHECKING:
    from workers.engine import Engine

# Packed fp16 kernels take up to six rows at a time: a root and five guesses cost little more than the root alone.
DEFAULT_LIMITS = DraftLimits(max_draft=5, draft_top_k=2, max_nodes=5)
LONGEST_BY_DEFAULT = 8192  # tokens; what models offer beyond that costs memory that few requests use

Reporter = Callable[[str], None]


@dataclass(frozen=True)
class EngineSpec:
    """What to load and how to run it. 0 and "" mean "work it out"."""

    model: str = ""  # folder, GGUF file or hub id; empty: the embedded default model
    draft_model: str = "auto"  # none, ngram, eagle3 or the folder of a draft network; several joined by +
    limits: DraftLimits = DEFAULT_LIMITS
    draft_options: DraftOptions = field(default_factory=DraftOptions)  # of draft networks
    draft_deadline_s: float = 0.5  # after this a step goes on without its trees
    page_size: int = 16  # tokens
    num_pages: int = 0  # of the KV cache; 0: as many as two of the longest requests need
    max_model_len: int = 0  # tokens of prompt and output; 0: what the model allows, at most LONGEST_BY_DEFAULT
    max_running: int = 16
    max_rows: int = 96
    prefix_cache: bool = True
    exact: bool = True
    tensor_parallel: int = 1  # ranks that share the model, each in a process of its own
    device: DeviceName = "auto"  # auto: cuda if torch sees a GPU
    acceptance: Acceptance = "exact"
    adaptive: bool = True  # guess only as far as it pays, within the limits
    max_stretch: float = 3.0  # adaptive: how many times longer than without guesses a step may take
    threads: int = 0  # of all ranks together; 0: torch's own choice

    def engine_config(self, model: ModelConfig) -> EngineConfig:
        """What is left to work out, for this model.

        Raises:
            BadSetting: a value that does not fit the model, or cannot work at all.
        """
        longest = self.max_model_len or min(model.max_positions, LONGEST_BY_DEFAULT)
        if longest > model.max_positions:
            raise BadSetting("max_model_len", longest, f"at most {model.max_positions}, the positions of {model.name}")
        model.check_tensor_parallel(self.tensor_parallel)
        return EngineConfig(
            num_pages=self.num_pages or math.ceil(2 * longest / self.page_size),
            page_size=self.page_size,
            max_model_len=longest,
            max_running=self.max_running,
            max_rows=self.max_rows,
            prefix_cache=self.prefix_cache,
            tensor_parallel=self.tensor_parallel,
            device=self.device,
            exact=self.exact,
            acceptance=self.acceptance,
            adaptive=self.adaptive,
            max_stretch=self.max_stretch,
            limits=self.limits,
            draft_deadline_s=self.draft_deadline_s,
        )


def locate_model(name: str, report: Reporter = lambda line: None) -> Path:
    """The folder or GGUF file of a model; the default one is fetched on its first use.

    Raises:
        ModelNotFound: there is none of that name.
    """
    return resolve_model(name) if name else default_model_path(report)


def build_engine(
    spec: EngineSpec, report: Reporter = lambda line: None, elsewhere: Elsewhere | None = None
) -> tuple[Engine, Text]:
    """An engine that is ready to be started, and its model's tokenizer. What is cheap to check is checked first.

    Args:
        elsewhere: where its draft network runs; None: here.

    Raises:
        DraftreeError: a setting, the model or its files are not what they should be; in one sentence.
    """
    check_name(spec.draft_model)
    path = locate_model(spec.model, report)
    model = Checkpoint.open(path).config
    plan = plan_guesses(spec, path, elsewhere)
    config = spec.engine_config(model)
    if elsewhere and spec.adaptive and remote_part(spec.draft_model, model):
        config = replace(config, max_lanes=2)
    text = Text.load(path)
    for name, value in openmp_environment().items():
        os.environ.setdefault(name, value)  # takes effect if torch is not imported yet
    config = replace(config, device=choose_device(config.device))
    on_gpu = config.device == "cuda"
    check_memory(model, config, plan, gpu_memory() if on_gpu else available_memory())

    report(f"Loading {model.name}{' onto the GPU' if on_gpu else ''} …")
    # GNU OpenMP keeps a team of threads for every thread that has run torch, and once there are more of them than
    # cores all wait passively, which makes a step half as long again. So the model is loaded on a thread that ends,
    # and takes its team along; whichever thread steps the engine then has the only one.
    with ThreadPoolExecutor(max_workers=1) as loader:
        return loader.submit(_load, spec.threads, path, config, plan).result(), text


def plan_guesses(spec: EngineSpec, path: Path, elsewhere: Elsewhere | None) -> DraftPlan:
    """The drafter of ``spec``, for the model at ``path``.

    Raises:
        DraftreeError: it does not fit the model, or is damaged.
    """
    if elsewhere:
        return plan_remote(spec.draft_model, path, spec.draft_options, spec.draft_deadline_s, elsewhere)
    return plan_drafter(spec.draft_model, Checkpoint.open(path).config, spec.draft_options, path)


def openmp_environment() -> dict[str, str]:
    """How long OpenMP's threads should spin before they sleep, unless the user has said so.

    They wait for one another hundreds of times a step. Asleep they wake too late: a step takes half as long again.
    Spinning without a bound, they keep a core from the very thread they wait for whenever other processes have moved
    both to one core: then a step was seen to take ten times as long. This is about 0.1 ms.
    """
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys() else {"GOMP_SPINCOUNT": "10000"}


def _load(threads: int, path: Path, config: EngineConfig, plan: DraftPlan) -> Engine:
    import torch

    from workers.engine import Engine
    from workers.profile import profile
    from workers.ranks.group import load_ranks

    if threads:
        torch.set_num_threads(threads)
    verifier = load_ranks(path, config)
    engine = Engine(verifier, plan.create(verifier), config)
    verifier.lead.when_lost(engine.give_up)
    if config.adaptive:
        profile(verifier, engine.pages, engine.costs, engine.clock)
    return engine
