"""From a few settings to a running engine: the one recipe for the command line, the benchmarks and the service.

Imports torch only when an engine is built, so that settings can be read and refused without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.base import DraftLimits
from drafter.factory import plan_drafter
from verifier.config import ModelConfig
from verifier.default_model import default_model_path
from verifier.errors import BadSetting
from verifier.weights import Checkpoint, resolve_model
from workers.config import EngineConfig
from workers.text import Text

if TYPE_CHECKING:
    from workers.engine import Engine

DEFAULT_LIMITS = DraftLimits(max_draft=7, draft_top_k=2, max_nodes=7)
LONGEST_BY_DEFAULT = 8192  # tokens; what models offer beyond that costs memory that few requests use

Reporter = Callable[[str], None]


@dataclass(frozen=True)
class EngineSpec:
    """What to load and how to run it. 0 and "" mean "work it out"."""

    model: str = ""  # folder, GGUF file or hub id; empty: the embedded default model
    draft_model: str = "ngram"  # none, ngram or the folder of an EAGLE-3 head
    limits: DraftLimits = DEFAULT_LIMITS
    page_size: int = 16  # tokens
    num_pages: int = 0  # of the KV cache; 0: as many as two of the longest requests need
    max_model_len: int = 0  # tokens of prompt and output; 0: what the model allows, at most LONGEST_BY_DEFAULT
    max_running: int = 16
    max_rows: int = 96
    prefix_cache: bool = True
    exact: bool = True
    threads: int = 0  # 0: torch's own choice

    def engine_config(self, model: ModelConfig) -> EngineConfig:
        """What is left to work out, for this model.

        Raises:
            BadSetting: a value that does not fit the model, or cannot work at all.
        """
        longest = self.max_model_len or min(model.max_positions, LONGEST_BY_DEFAULT)
        if longest > model.max_positions:
            raise BadSetting("max_model_len", longest, f"at most {model.max_positions}, the positions of {model.name}")
        return EngineConfig(
            num_pages=self.num_pages or math.ceil(2 * longest / self.page_size),
            page_size=self.page_size,
            max_model_len=longest,
            max_running=self.max_running,
            max_rows=self.max_rows,
            prefix_cache=self.prefix_cache,
            exact=self.exact,
            limits=self.limits,
        )


def locate_model(name: str, report: Reporter = lambda line: None) -> Path:
    """The folder or GGUF file of a model; the default one is fetched on its first use.

    Raises:
        ModelNotFound: there is none of that name.
    """
    return resolve_model(name) if name else default_model_path(report)


def build_engine(spec: EngineSpec, report: Reporter = lambda line: None) -> tuple[Engine, Text]:
    """An engine that is ready to be started, and its model's tokenizer. What is cheap to check is checked first.

    Raises:
        DraftreeError: a setting, the model or its files are not what they should be; in one sentence.
    """
    path = locate_model(spec.model, report)
    model = Checkpoint.open(path).config
    plan = plan_drafter(spec.draft_model, model)
    config = spec.engine_config(model)
    text = Text.load(path)

    report(f"Loading {model.name} …")
    import torch

    from verifier.verifier import Verifier
    from workers.engine import Engine

    if spec.threads:
        torch.set_num_threads(spec.threads)
    verifier = Verifier.load(
        path, num_pages=config.num_pages, page_size=config.page_size, exact=config.exact, max_rows=config.max_rows
    )
    return Engine(verifier, plan.create(verifier), config), text
