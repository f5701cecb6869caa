"""What this machine has, and whether a model fits into it.

Reads the kernel's files and a model's configuration, never a weight. Needs torch for a GPU's memory alone.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from drafter.factory import DraftPlan
from verifier.config import ModelConfig
from verifier.device import DeviceName, bytes_per_value
from verifier.errors import DraftreeError
from workers.config import EngineConfig

FLOAT32 = 4  # bytes; on CPUs the KV cache, activations and embeddings
GIB = 2**30


def check_memory(config: ModelConfig, engine: EngineConfig, drafter: DraftPlan, available: int) -> None:
    """Refuses what does not fit into ``available`` bytes: of this machine, which has all ranks, or of rank 0's GPU.

    Raises:
        DraftreeError: weights and KV cache together need more; says how much.
    """
    weights, cache = needed_bytes(config, engine)
    cached_tokens = engine.num_pages * engine.page_size
    drafting = drafter.num_bytes(cached_tokens)
    if weights + cache + drafting > available:
        head = f", {drafter.name} takes {drafting / GIB:.1f} GiB" if drafting else ""
        raise DraftreeError(
            f"{config.name} does not fit: its weights take {weights / GIB:.1f} GiB and a KV cache of "
            f"{cached_tokens} tokens takes {cache / GIB:.1f} GiB{head}, but {available / GIB:.1f} GiB "
            "of memory are available (kv_cache_tokens and max_model_len make the cache smaller)."
        )


def check_drafter_memory(drafter: DraftPlan, num_tokens: int, available: int) -> None:
    """Refuses a drafter that does not fit into ``available`` bytes beside a KV cache of so many tokens.

    Raises:
        DraftreeError: it needs more; says how much.
    """
    if (wanted := drafter.num_bytes(num_tokens)) > available:
        raise DraftreeError(
            f"{drafter.name} does not fit: it takes {wanted / GIB:.1f} GiB, but {available / GIB:.1f} GiB of memory "
            "are available."
        )


def needed_bytes(config: ModelConfig, engine: EngineConfig) -> tuple[int, int]:
    """For weights, and for the KV cache: of all ranks together on the CPU, of one rank on a GPU of its own."""
    ranks = engine.tensor_parallel
    copies = max(1, ranks // config.num_kv_heads)  # of each KV head
    cache = engine.num_pages * engine.page_size * kv_bytes_per_token(config, engine.device) * copies
    share = ranks if engine.device == "cuda" else 1
    return weight_bytes(config, engine.device) // share, cache // share


def weight_bytes(config: ModelConfig, device: DeviceName = "cpu") -> int:
    """Memory of the weights as they are held.

    On CPUs embeddings as fp32, matrices as fp16 if they were saved so, else fp32; on GPUs all as they were saved.
    """
    if device == "cuda":
        return sum(map(math.prod, config.tensor_shapes().values())) * bytes_per_value(config, device)
    matrices = 2 if config.dtype == "float16" else FLOAT32
    shapes = config.tensor_shapes()
    embedding = math.prod(shapes.pop("model.embed_tokens.weight"))
    head = embedding if config.tie_word_embeddings else 0  # a tied head is packed apart from the embedding
    return embedding * FLOAT32 + (sum(map(math.prod, shapes.values())) + head) * matrices


def kv_bytes_per_token(config: ModelConfig, device: DeviceName = "cpu") -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value(config, device)


def gpu_memory() -> int:
    """Bytes that are free on the GPU of this process."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return free


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
