"""Norms, activations, sums and look-ups: ops on rows that no matmul is part of."""

# Shapes: T tokens, K values of a row.

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

ActivationKind = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
"""`gelu` is the exact one, by the error function; `relu2` is the square of `relu`."""


class RMSNormOp(Protocol):
    """x / rms(x) * weight over the last axis, computed in float32; [..., K] -> [..., K]."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The weight may be float32 if x is not; the result has x's dtype and is rounded once."""
        ...


class AddRMSNormOp(Protocol):
    """Add x to the residual stream and normalize it: (normalized, new residual). [T, K] all."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Both `x` and `residual` may be overwritten; use the returned tensors."""
        ...


class LayerNormOp(Protocol):
    """(x - mean(x)) / std(x) * weight + bias over the last axis, computed in float32; [..., K] -> [..., K]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Weight and bias have x's dtype; the result is rounded once."""
        ...


class AddLayerNormOp(Protocol):
    """Add x to the residual stream and normalize it: (normalized, new residual). [T, K] all."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Both `x` and `residual` may be overwritten; use the returned tensors. The sum is rounded before the norm."""
        ...


class Activate(Protocol):
    """act(x), rounded once; any shape."""

    def __call__(self, x: Tensor, kind: ActivationKind) -> Tensor:
        """`x` may be overwritten; use the returned tensor."""
        ...


class GatedActivation(Protocol):
    """act(gate) * up; [T, 2N] with the gate in the first half -> [T, N]."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class SparseGatedActivation(Protocol):
    """gelu(max(gate - cutoff, 0)) * up; [T, 2N] with the gate in the first half -> [T, N], rounded once."""

    def __call__(self, gate_up: Tensor, multiplier: float) -> Tensor:
        """The cutoff of a token is the mean of its gates plus `multiplier` standard deviations."""
        ...


class GeluTimes(Protocol):
    """gelu(x) * y by the tanh approximation, rounded once; [T, N] both."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Rows of `y` may be apart. `x` may be overwritten; use the returned tensor."""
        ...


class Scale(Protocol):
    """x * factor, rounded once; any shape."""

    def __call__(self, x: Tensor, factor: float) -> Tensor:
        """`x` may be overwritten; use the returned tensor."""
        ...


class AddOp(Protocol):
    """x + y, rounded once; [T, K] all, of one dtype."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """`y` may be overwritten; use the returned tensor."""
        ...


class AddGatedOp(Protocol):
    """x + sigmoid(gate) * y, rounded once."""

    def __call__(self, y: Tensor, gate: Tensor, x: Tensor) -> Tensor:
        """`y`, `x`: [T, K] of one dtype; `gate`: [T, 1] float32. `x` may be overwritten; use the returned tensor."""
        ...


class MulSigmoidOp(Protocol):
    """x * sigmoid(gate), rounded once."""

    def __call__(self, gate: Tensor, x: Tensor) -> Tensor:
        """`gate`, `x`: [T, K] of one dtype. `x` may be overwritten; use the returned tensor."""
        ...


class SoftCap(Protocol):
    """cap * tanh(x / cap); any shape, contiguous, in float32."""

    def __call__(self, x: Tensor, cap: float) -> Tensor:
        """`x` may be overwritten; use the returned tensor."""
        ...


class TakeRows(Protocol):
    """Look up rows of a table [R, N], contiguous: [T] int64 indices, all of them in range -> [T, N]."""

    def __call__(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        """Look up the rows; `scale` is a factor of the result, which is rounded once."""
        ...


class IdsBelow(Protocol):
    """Ids of rows for a table with fewer rows: [T] int64, contiguous -> the same, with 0 for those it does not have."""

    def __call__(self, ids: Tensor, bound: int) -> Tensor: ...


class ToFloat32(Protocol):
    """The same values in float32, contiguous."""

    def __call__(self, x: Tensor) -> Tensor: ...
