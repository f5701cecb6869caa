"""Linear layers with the fastest weight format that changes no weight.

On CPUs with FBGEMM a matrix whose values are all fp16 numbers is packed once as fp16 (activations and sums stay fp32),
which halves the memory traffic that decoding is bound by. Every other matrix stays fp32 there. On GPUs a matrix stays
what it was saved as, and activations are rounded to that on their way in and out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def can_pack_fp16() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _is_fp16(weight: Tensor) -> bool:
    return weight.dtype == torch.float16 or torch.equal(weight.half().to(weight.dtype), weight)


class Linear:
    """``[rows, in_features]`` fp32 to ``[rows, out_features]`` fp32.

    Several matrices given together are stacked along their outputs and run as one (merged QKV, merged gate and up).
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
        self.out_features, self.in_features = weight.shape
        bias = torch.cat(list(biases)).float() if biases else None
        on_cpu = weight.device.type == "cpu"
        self.packed = on_cpu and can_pack_fp16() and _is_fp16(weight)
        if self.packed:
            self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        elif on_cpu:
            self._weight, self._bias = weight.float().contiguous(), bias
        else:
            self._weight = weight.contiguous()
            self._bias = bias if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.quantized.linear_dynamic_fp16(x, self._weight)  # type: ignore[no-any-return]
        return torch.nn.functional.linear(x.to(self._weight.dtype), self._weight, self._bias).float()
