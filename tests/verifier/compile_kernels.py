"""Compiles the Triton kernels to machine code for GPUs that need not be here.

As ``python -m tests.verifier.compile_kernels 80 90``: a process of its own, since the tests' runs kernels in Triton's
interpreter, which compiles nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verifier.attention.reference import BLOCK
from verifier.attention.triton import SPLIT, add_splits, attend_split

THREADS = 32  # in a warp
FLOATS, INTS = "*fp32", "*i32"
TYPES = {
    **dict.fromkeys(("out", "mixed", "largest", "total", "queries"), FLOATS),
    **dict.fromkeys(("keys", "values"), "*bf16"),
    **dict.fromkeys(("starts", "page_offsets", "path_offsets", "pages", "paths"), INTS),
    **dict.fromkeys(("query_stride", "num_splits", "window"), "i32"),
    "positions": "*i64",
    "scale": "fp32",
}
LLAMA_3 = {"KV_HEADS": 8, "GROUP": 8, "GROUP_LANES": 8, "HEAD_DIM": 128, "DIM_LANES": 128, "SPLIT": SPLIT}
OF_BLOCKS = {"PAGE_SIZE": 16, "BLOCK": BLOCK}


def machine_code(kernel: Any, capability: int) -> bytes:
    """
    Args:
        capability: of the GPU, as 90 for 9.0.
    """
    sizes = {name: size for name, size in (LLAMA_3 | OF_BLOCKS).items() if name in kernel.arg_names}
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): size for name, size in sizes.items()})
    code: bytes = triton.compile(source, target=GPUTarget("cuda", capability, THREADS)).asm["cubin"]
    return code


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for kernel in (attend_split, add_splits):
            assert machine_code(kernel, int(argument)).startswith(b"\x7fELF")
