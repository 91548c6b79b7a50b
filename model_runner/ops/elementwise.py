"""Norms, activations, sums and look-ups: ops on rows that no matmul is part of.

Where an argument may be overwritten, the caller uses only the returned tensors.
"""

# Shapes: T tokens, K values of a row.

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

from ...models.spec.experts_spec import ClampedSwiGLU

ActivationKind = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
"""`gelu` is the exact one, by the error function; `relu2` is the square of `relu`."""

RMSNormOp = Callable[[Tensor, Tensor, float], Tensor]
"""(x, weight, eps) -> x / rms(x) * weight over the last axis, computed in float32; [..., K] -> [..., K].

The weight may be float32 if x is not; the result has x's dtype and is rounded once.
"""

AddRMSNormOp = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(x, residual, weight, eps) -> (normalized, new residual): x is added to the residual stream, [T, K] all.

Both `x` and `residual` may be overwritten.
"""

LayerNormOp = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""(x, weight, bias, eps) -> (x - mean(x)) / std(x) * weight + bias over the last axis, [..., K], computed in float32.

Weight and bias have x's dtype; the result is rounded once.
"""

AddLayerNormOp = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
"""(x, residual, weight, bias, eps), as `AddRMSNormOp`. The sum is rounded before the norm."""

Activate = Callable[[Tensor, ActivationKind], Tensor]
"""act(x), rounded once; any shape. `x` may be overwritten."""

GatedActivation = Callable[[Tensor], Tensor]
"""act(gate) * up; [T, 2N] with the gate in the first half -> [T, N]."""

SparseGatedActivation = Callable[[Tensor, float], Tensor]
"""(gate_up, multiplier) -> gelu(max(gate - cutoff, 0)) * up; [T, 2N] -> [T, N], rounded once.

The cutoff of a token is the mean of its gates plus `multiplier` standard deviations.
"""

GeluTimes = Callable[[Tensor, Tensor], Tensor]
"""(x, y) -> gelu(x) * y by the tanh approximation, rounded once; [T, N] both.

Rows of `y` may be apart. `x` may be overwritten.
"""

Scale = Callable[[Tensor, float], Tensor]
"""(x, factor) -> x * factor, rounded once; any shape. `x` may be overwritten."""

AddOp = Callable[[Tensor, Tensor], Tensor]
"""(x, y) -> x + y, rounded once; [T, K] all, of one dtype. `y` may be overwritten."""

AddGatedOp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(y, gate, x) -> x + sigmoid(gate) * y, rounded once.

`y`, `x`: [T, K] of one dtype; `gate`: [T, 1] float32. `x` may be overwritten.
"""

MulSigmoidOp = Callable[[Tensor, Tensor], Tensor]
"""(gate, x) -> x * sigmoid(gate), rounded once; [T, G] and [T, K] of one dtype. `x` may be overwritten.

Each gate is that of K / G neighboring numbers.
"""

SoftCap = Callable[[Tensor, float], Tensor]
"""(x, cap) -> cap * tanh(x / cap); any shape, contiguous, in float32. `x` may be overwritten."""

IdsBelow = Callable[[Tensor, int], Tensor]
"""(ids, bound) -> ids of rows for a table of `bound` rows: [T] int64, contiguous, with 0 for those beyond it."""

ToFloat32 = Callable[[Tensor], Tensor]
"""The same values in float32, contiguous."""


class ClampedActivation(Protocol):
    """The activation of `ClampedSwiGLU`."""

    def __call__(self, gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
        """[T, 2N] with the gate in the first half -> [T, N], rounded once."""
        ...


class TakeRows(Protocol):
    """Look up rows of a table [R, N], contiguous: [T] int64 indices, all of them in range -> [T, N]."""

    def __call__(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        """Look up the rows; `scale` is a factor of the result, which is rounded once."""
        ...
