"""The products of linear layers and of the output head: what packs a weight, and what a packed weight can do."""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor


class LinearWeight(Protocol):
    """A linear layer's weight in the layout and precision of its kernel."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias; [T, K] -> [T, N] in x's dtype. `bias`: [N]."""
        ...


@runtime_checkable
class LinearWithRows(LinearWeight, Protocol):
    """A `LinearWeight` that can look up its rows, so a tied embedding needs no table of its own."""

    def rows(self, ids: Tensor, scale: float | None = None) -> Tensor:
        """weight[ids] * scale, [T] int64 -> [T, K] in the serving dtype; ids must be in range, which is not checked."""
        ...


@runtime_checkable
class LinearToFloat32(LinearWeight, Protocol):
    """A `LinearWeight` with a kernel that accumulates in float32 and can return the sums without rounding."""

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The matmul without rounding: [T, K] -> [T, N] float32, the dtype of the sampler's logits."""
        ...


@runtime_checkable
class LinearInto(LinearWeight, Protocol):
    """A `LinearWeight` that can write its result into given memory."""

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The result of a call, into `out`: [T, N] in x's dtype, contiguous."""
        ...


@runtime_checkable
class GateableWeight(LinearWeight, Protocol):
    """A `LinearWeight` that may fuse the activation of a gated layer into its matmul."""

    def fuse_silu_and_mul(self) -> bool:
        """Try to fuse the activation; if True, later calls return silu(gate) * up: [T, K] -> [T, N / 2].

        Called once, by the only user of the weight. The gates are the first N / 2 outputs. The result is bit for bit
        that of the library's `silu_and_mul` on the unfused output.
        """
        ...


@runtime_checkable
class UngateableWeight(GateableWeight, Protocol):
    """A `GateableWeight` that can also be multiplied without the fused activation."""

    def ungated(self, x: Tensor) -> Tensor:
        """The product before the activation: [T, K] -> [T, N]; 16 gates, their 16 ups, the next 16 gates, ..."""
        ...


PackLinear = Callable[[Tensor], LinearWeight]
"""Makes a `LinearWeight` of [N, K], contiguous, in the serving dtype. May copy, so callers drop their reference."""

HeadMatmul = Callable[[Tensor, Tensor], None]
"""(x, out): out[:, h] = x[:, h] @ weight[h].T for each head h, rounded once.

x [T, Hq, K] and out [T, Hq, N] have one dtype; both may be parts of wider heads.
"""

PackHeads = Callable[[Tensor], HeadMatmul]
"""Makes a `HeadMatmul` of [Hq, N, K] in the serving dtype, which may be a view. Copies what it keeps."""
