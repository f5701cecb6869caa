"""Tree attention by the C kernel beside this file, compiled on first use for the very machine it runs on.

Knows the compiler and the call. The mathematics is in ``cpu.c``, the definition in ``reference.py``. The kernel
uses libgomp under the name by which torch has loaded its own already, so the two share one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verifier.attention import reference
from verifier.attention.layout import RowLayout
from verifier.cache import cache_dir

SOURCE = Path(__file__).with_name("cpu.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
LANES = 8  # floats; the kernel works on whole vectors of them
COMPILE_LIMIT_S = 60

_POINTERS = (ctypes.c_void_p,) * 10
_NUMBERS = (ctypes.c_int,) * 4 + (ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_int)


class KernelUnavailable(Exception):
    """The kernel cannot be had on this machine; the text says why."""


class CpuAttention:
    """Like `verifier.attention.reference.attend`, for float32 on the CPU.

    Head sizes that are no multiple of 8 are left to the reference.

    Raises:
        KernelUnavailable: from the constructor.
    """

    def __init__(self) -> None:
        self._kernel = _load()

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, layout: RowLayout, window: int | None, scale: float
    ) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        if head_dim % LANES:
            return reference.attend(queries, keys, values, layout, window, scale)
        assert queries.dtype == keys.dtype == values.dtype == torch.float32
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert queries.stride()[1:] == (head_dim, 1)  # rows may lie apart, as when they are split off a merged matrix
        assert num_rows == layout.num_rows
        kv_heads = keys.shape[1]
        out = queries.new_empty(num_rows, num_heads, head_dim)
        self._kernel(
            out.data_ptr(),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            layout.positions.data_ptr(),
            layout.starts.data_ptr(),
            layout.page_offsets.data_ptr(),
            layout.path_offsets.data_ptr(),
            layout.pages.data_ptr(),
            layout.paths.data_ptr(),
            num_rows,
            kv_heads,
            num_heads // kv_heads,
            head_dim,
            queries.stride(0),
            layout.page_size,
            window or 0,
            scale,
            torch.get_num_threads(),
        )
        return out


@cache
def _load() -> Callable[..., None]:
    """The kernel's entry point. It releases the GIL and trusts its arguments."""
    try:
        kernel = ctypes.CDLL(str(build(cache_dir() / "kernels"))).attend
    except OSError as error:
        raise KernelUnavailable(str(error)) from error
    kernel.argtypes = (*_POINTERS, *_NUMBERS)
    kernel.restype = None
    return kernel


def build(folder: Path) -> Path:
    """The compiled kernel in ``folder``, compiled unless it is there.

    Its name is a hash of all that it depends on: source, flags, compiler, and the instructions that the compiler finds
    this CPU to have. It appears whole or not at all, and of two processes at once either may win.

    Raises:
        KernelUnavailable: no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise KernelUnavailable("there is no C compiler (cc or gcc)")
    source = SOURCE.read_bytes()
    # With -v the compiler names its version and what -march=native stands for.
    compiler_says = _run([compiler, *FLAGS, "-v", "-E", "-x", "c", os.devnull])
    name = hashlib.sha256(b"\0".join([source, " ".join(FLAGS).encode(), compiler_says.encode()])).hexdigest()[:32]
    library = folder / f"attention-{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as scratch:
            unfinished = Path(scratch) / library.name
            _run([compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)])
            os.replace(unfinished, library)
    return library


def _run(command: list[str]) -> str:
    """What ``command`` writes to its standard error."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=COMPILE_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailable(f"{command[0]} took more than {COMPILE_LIMIT_S} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise KernelUnavailable(f"{command[0]} failed with exit code {done.returncode}: {lines[0].strip()}")
    return done.stderr
