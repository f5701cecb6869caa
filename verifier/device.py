"""On what a verifier computes: the CPU, or one GPU for each rank. Imports torch only when asked about the machine.

On the CPU all is fp32 but for matrices that can be packed as fp16. On a GPU matrices, embeddings and the KV cache have
the checkpoint's own type; what goes from layer to layer, norms and the softmax stay fp32. Tokens are drawn on the host
whatever the device (`verifier.sampling`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from verifier.errors import BadSetting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from verifier.config import ModelConfig

DeviceName = Literal["auto", "cpu", "cuda"]


def choose_device(name: DeviceName, num_gpus: int = 1) -> DeviceName:
    """``auto`` takes the GPU if there is one.

    Args:
        num_gpus: that this process has to see, if any.

    Raises:
        BadSetting: a GPU is wanted, and there are not so many.
    """
    if name == "cpu":
        return name
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not seen:
        return "cpu"
    if not seen:
        raise BadSetting("device", name, f"cpu here, since torch {torch.__version__} sees no GPU")
    if seen < num_gpus:
        raise BadSetting("tensor_parallel", num_gpus, f"at most {seen}, as each rank needs a GPU, or on device cpu")
    return "cuda"


def use_gpu(name: DeviceName, index: int = 0) -> torch.device:
    """The device for tensors; of several GPUs, this thread's kernels run on that one from here on."""
    import torch

    if name == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def wait_for(device: torch.device) -> None:
    """Returns when all that was begun is done, so that whoever holds a clock measures work and not its beginning."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def kind_of(device: torch.device) -> str:
    """Part of a fingerprint: GPUs of another kind may round otherwise. Empty for CPUs."""
    if device.type == "cpu":
        return ""
    import torch

    return f"-{torch.cuda.get_device_name(device)}"


def as_held(weight: Tensor) -> Tensor:
    """An embedding as it is kept: what is looked up in it becomes fp32 in either case."""
    return weight.float() if weight.device.type == "cpu" else weight


def cache_type(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Of keys and values."""
    import torch

    kept: torch.dtype = torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)
    return kept


def bytes_per_value(config: ModelConfig, name: DeviceName) -> int:
    """Of what `cache_type` says, without torch."""
    return 2 if name == "cuda" and config.dtype in ("float16", "bfloat16") else 4
