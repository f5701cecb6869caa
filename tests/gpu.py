"""A GPU that is not there: tensors that say they are on one, with their numbers on the CPU.

All that torch refuses on a real GPU is refused: operations between it and the CPU, numpy's view of its memory. So code
that forgets to say where a tensor should be fails here as it would there, and what it computes can be looked at. Says
nothing of kernels: operations are the CPU's. (torch's own fake tensors refuse the same, but have no numbers.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from verifier.attention import Attention, reference
from verifier.attention.layout import RowLayout
from verifier.attention.triton import TritonAttention

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
READS = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__)  # copy by themselves
COPIES = (aten._to_copy.default, aten.copy_.default)


class GpuTensor(Tensor):
    """See the module.

    Attributes:
        numbers: what it holds, on the CPU.
    """

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> GpuTensor:
        with torch.inference_mode(False):  # or views of what was made without it could not be made within it
            tensor: GpuTensor = Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                numbers.stride(),
                numbers.storage_offset(),
                dtype=numbers.dtype,
                # For torch's own C++, which could not switch to a GPU without CUDA; all others are told of the GPU.
                device=torch.device("meta"),
            )
        tensor.numbers = numbers
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        strangers = [each for each in given if not isinstance(each, GpuTensor) and each.dim() > 0]
        if strangers and function not in COPIES:
            raise RuntimeError(f"Expected all tensors to be on the same device: {function} met cuda:0 and cpu")
        settings = {**(kwargs or {})}
        leaves = settings.get("device") is not None and torch.device(settings["device"]).type == "cpu"
        if "device" in settings:
            settings["device"] = torch.device("cpu")
        out = function(*tree_map(_on_cpu, args), **tree_map(_on_cpu, settings))
        if leaves:
            return out
        known = {id(each.numbers): each for each in given if isinstance(each, GpuTensor)}
        return tree_map(lambda each: known[id(each)] if id(each) in known else _on_gpu(each), out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GpuTensor({self.numbers})"


def _on_cpu(value: Any) -> Any:
    return value.numbers if isinstance(value, GpuTensor) else value


def _on_gpu(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) and not isinstance(value, GpuTensor) else value


class OnGpu(TorchFunctionMode):
    """Makes tensors on the GPU for whoever asks for one there, and moves them there."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        settings = {**(kwargs or {})}
        if function in READS:
            return function(_on_cpu(args[0]))
        if function is Tensor.__getitem__ and isinstance(args[0], GpuTensor):  # which the CPU may do with its indices
            return GpuTensor(args[0].numbers[tree_map(_on_cpu, args[1])])
        if not any(_is_gpu(each) for each in (*args[1:], settings.get("device"))):
            return function(*args, **settings)
        if function is Tensor.to and isinstance(args[0], GpuTensor):
            return args[0]
        on_cpu = [torch.device("cpu") if _is_gpu(each) else each for each in args]
        if "device" in settings:
            settings["device"] = torch.device("cpu")
        if function is Tensor.to:
            return GpuTensor(args[0].to(*on_cpu[1:], **settings, copy=True))
        return _on_gpu(function(*on_cpu, **settings))


def _is_gpu(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


@contextmanager
def pretended_gpu(attend: Attention = reference.attend) -> Iterator[None]:
    """While it lasts, this thread has a GPU.

    Args:
        attend: what stands in for the kernel; gets tensors on the CPU.
    """

    def on_gpu(
        kernel: TritonAttention,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: RowLayout,
        window: int | None,
        scale: float,
    ) -> Tensor:
        arguments = {each.name: getattr(layout, each.name) for each in fields(layout)}
        for tensor in (queries, keys, values, *arguments.values()):
            assert not isinstance(tensor, Tensor) or isinstance(tensor, GpuTensor), (
                "the kernel was given the CPU's memory"
            )
        there = RowLayout(**{name: _on_cpu(each) for name, each in arguments.items()})
        return GpuTensor(attend(_on_cpu(queries), _on_cpu(keys), _on_cpu(values), there, window, scale))

    with (
        OnGpu(),
        mock.patch.object(TritonAttention, "__call__", on_gpu),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.get_device_name", return_value="no GPU at all"),
        mock.patch("torch.cuda.mem_get_info", return_value=(2**40, 2**40)),
    ):
        yield
