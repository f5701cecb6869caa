"""Whether settings and a model fit together and into this machine, asked before Ray starts and without torch.

Reads a model's configuration, its tokenizer and the headers of its weights, never a weight.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from deployments.settings import Settings
from drafter.base import DraftLimits
from drafter.factory import DraftPlan, plan_drafter
from verifier.config import ModelConfig
from verifier.errors import BadSetting, DraftreeError
from verifier.weights import Checkpoint
from workers.build import EngineSpec, Reporter, locate_model
from workers.config import EngineConfig
from workers.text import Text

FLOAT32 = 4  # bytes; the KV cache, activations and embeddings
GIB = 2**30


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and the engine's sizes that settings and model give together."""

    name: str  # what clients call it
    config: ModelConfig
    text: Text
    engine: EngineConfig
    drafter: DraftPlan


def served_model(settings: Settings, report: Reporter = lambda line: None) -> ServedModel:
    """Finds the model (fetching the default one if need be) and works out what is left to work out.

    Raises:
        DraftreeError: there is no such model, or a setting does not fit it; one sentence.
    """
    path = locate_model(settings.model, report)
    config = Checkpoint.open(path).config
    plan = plan_drafter(settings.draft_model, config)
    config.check_tensor_parallel(settings.tensor_parallel)
    if settings.tensor_parallel > 1:
        raise BadSetting("tensor_parallel", settings.tensor_parallel, "1, as more ranks are not available yet")
    spec = engine_spec(settings)
    longest = spec.engine_config(config).max_model_len
    if 0 < settings.kv_cache_tokens < longest:
        why = f"at least {longest}, or one request of max_model_len could not run"
        raise BadSetting("kv_cache_tokens", settings.kv_cache_tokens, why)
    # A folder is called by its own name, a hub id is a name already.
    own_name = config.name if not settings.model or Path(settings.model).exists() else settings.model
    return ServedModel(
        settings.served_model_name or own_name, config, Text.load(path), spec.engine_config(config), plan
    )


def engine_spec(settings: Settings) -> EngineSpec:
    """The settings as the engine's builder takes them."""
    return EngineSpec(
        model=settings.model,
        draft_model=settings.draft_model,
        limits=DraftLimits(settings.max_draft, settings.draft_top_k, settings.max_nodes),
        page_size=settings.page_size,
        num_pages=math.ceil(settings.kv_cache_tokens / settings.page_size),
        max_model_len=settings.max_model_len,
        max_running=settings.max_running,
        max_rows=settings.max_rows,
        prefix_cache=settings.prefix_cache,
        exact=settings.exact,
        threads=settings.threads or physical_cores(),
    )


def check_memory(model: ServedModel, available: int) -> None:
    """Refuses what does not fit into ``available`` bytes.

    Raises:
        DraftreeError: weights and KV cache together need more; says how much.
    """
    weights = weight_bytes(model.config)
    cached_tokens = model.engine.num_pages * model.engine.page_size
    cache = cached_tokens * kv_bytes_per_token(model.config)
    drafting = model.drafter.num_bytes(cached_tokens)
    if weights + cache + drafting > available:
        head = f", {model.drafter.name} takes {drafting / GIB:.1f} GiB" if drafting else ""
        raise DraftreeError(
            f"{model.config.name} does not fit: its weights take {weights / GIB:.1f} GiB and a KV cache of "
            f"{cached_tokens} tokens takes {cache / GIB:.1f} GiB{head}, but {available / GIB:.1f} GiB "
            "of memory are available (kv_cache_tokens and max_model_len make the cache smaller)."
        )


def weight_bytes(config: ModelConfig) -> int:
    """Memory of the weights as they are held: embeddings as fp32, matrices as fp16 if they were saved so, else fp32."""
    matrices = 2 if config.dtype == "float16" else FLOAT32
    shapes = config.tensor_shapes()
    embedding = math.prod(shapes.pop("model.embed_tokens.weight"))
    head = embedding if config.tie_word_embeddings else 0  # a tied head is packed apart from the embedding
    return embedding * FLOAT32 + (sum(map(math.prod, shapes.values())) + head) * matrices


def kv_bytes_per_token(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * FLOAT32


def available_memory() -> int:
    """Bytes that can still be used: the kernel's estimate, or what is left of the control group's limit if less."""
    estimates = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = _first_words(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        estimates.append(int(meminfo["MemAvailable:"]) * 1024)
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()) != "max":
        used = int((group / "memory.current").read_text()) - int(_first_words(group / "memory.stat").get("file", 0))
        estimates.append(int(limit) - used)
    return min(estimates)


def physical_cores() -> int:
    """Cores that this process may use. Two hyperthreads of a core share its arithmetic, so they count once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, len(siblings))


def _siblings(cpu: int) -> str:
    """The CPUs that share a core with ``cpu``, as the kernel names them; where it does not say, each is its own."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return path.read_text().strip() if path.is_file() else str(cpu)


def _first_words(path: Path) -> dict[str, str]:
    """``name value …`` lines as a mapping; empty where there is no such file."""
    if not path.is_file():
        return {}
    return {words[0]: words[1] for line in path.read_text().splitlines() if len(words := line.split()) > 1}
