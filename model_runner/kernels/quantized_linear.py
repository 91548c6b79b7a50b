"""The `LinearWeight`s of quantized weights: matmuls with 8-bit floats and with 4-bit integers.

`quantized` constructs them; it knows which device supports which. Triton is imported by the first call or construction.
"""

# Shapes: T tokens, K inputs, N outputs, G groups of inputs.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear import LinearWeight
from .quantized_weights import Fp8Weight, IntWeight

_DEQUANTISE_ABOVE_ROWS: Final = 256
"""With more tokens than this a 4-bit weight is dequantized once as a whole and takes an ordinary matmul. Not measured
yet."""

# ---------------------------------------------------------------- 8-bit floats

Fp8Product = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
"""x [T, K] with scales [T, G], weight [N, K] with scales [G, N], bias, dtype of the result -> [T, N]."""


class Fp8Linear:
    """Quantizes activations per token and multiplies 8-bit floats."""

    def __init__(self, weight: Fp8Weight, product: Fp8Product) -> None:
        self._weight = weight.numbers
        self._scales = weight.scales.t().contiguous()
        self._group_size, self._bound = weight.group_size, weight.activation_bound
        self._product = product

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from .triton.fp8_gemm import quantize_rows

        if x.shape[0] == 0:  # a launch with an empty grid is an error
            return x.new_empty((0, self._weight.shape[0]))
        numbers, scales = quantize_rows(x, self._group_size, self._bound)
        return self._product(numbers, scales, self._weight, self._scales, bias, x.dtype)


class SglMatmul:
    """sgl_kernel's matmul: a weight [K, N] with contiguous columns, scales [T, 1] and [N, 1]."""

    def __init__(self, operators: Any) -> None:
        """`operators`: torch.ops.sgl_kernel."""
        self._product = operators.fp8_scaled_mm.default

    def __call__(
        self,
        x: Tensor,
        x_scales: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        out: Tensor = self._product(x, weight.t(), x_scales, scales.view(-1, 1), dtype, bias)
        return out


def torch_matmul(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """torch's matmul: scales [T, 1] and [1, N], float32 accumulation. What reduced precision saves is not measured."""
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=scales, bias=bias, out_dtype=dtype, use_fast_accum=False
    )


class Fp8WeightLinear:
    """Converts the weight to the activations' dtype in registers, tile by tile."""

    def __init__(self, weight: Fp8Weight, num_sms: int) -> None:
        self._weight = weight.numbers
        self._scales = weight.scales.t().contiguous()
        self._group_size, self._num_sms = weight.group_size, num_sms

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from .triton.fp8_gemm import fp8_weight_gemm

        return fp8_weight_gemm(x, self._weight, self._scales, bias, self._group_size, self._num_sms)


# ---------------------------------------------------------------- 4 bits


class Int4Linear:
    """Dequantizes integers in registers; for many tokens it dequantizes the whole weight, once per call."""

    def __init__(self, weight: IntWeight, num_sms: int) -> None:
        from .triton.dequant_gemm import pack_int4

        self._words = pack_int4(weight.numbers)
        self._scales, self._zeros, self._order = (
            weight.scales.contiguous(),
            weight.zeros.contiguous(),
            weight.order,
        )
        self._num_inputs = weight.shape[1]
        self._group_size = 0 if weight.scales.shape[0] == 1 else weight.group_size
        self._num_sms = num_sms

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        from .triton.dequant_gemm import dequantize_int4, int4_gemm

        if self._order is not None:
            x = x.index_select(1, self._order)
        packed = (self._words, self._scales, self._zeros)
        if x.shape[0] <= _DEQUANTISE_ABOVE_ROWS:
            return int4_gemm(x, *packed, bias, group_size=self._group_size, num_sms=self._num_sms)
        whole = dequantize_int4(
            *packed, num_inputs=self._num_inputs, group_size=self._group_size, dtype=x.dtype
        )
        return F.linear(x, whole.t(), bias)


# ---------------------------------------------------------------- both


class SideBySide:
    """Several weights with the same inputs that no single kernel can hold: concatenates their outputs."""

    def __init__(self, weights: Sequence[LinearWeight], widths: Sequence[int]) -> None:
        self.weights, self._widths = list(weights), list(widths)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        biases = [None] * len(self.weights) if bias is None else bias.split(self._widths)
        return torch.cat([one(x, part) for one, part in zip(self.weights, biases, strict=True)], dim=1)
