"""Experts that lie in two tensors, for tests of whoever packs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.model_runner.kernels import plain
from engine.model_runner.ops.linear import LinearWeight
from engine.models.spec.experts_spec import ClampedSwiGLU, ExpertActivation


def pack_linear_here(weight: Tensor) -> LinearWeight:
    """By oneDNN where it can: a CPU with AVX2 alone gives it no bfloat16."""
    if plain.reasons_against_onednn(weight.device, weight.dtype):
        return plain.pack_linear(weight)
    return plain.pack_linear_onednn(weight)


@dataclass(frozen=True)
class StackedExperts:
    """An `ExpertSource`: gate_up [E, 2N, K] and down [E, K, N]."""

    gate_up: Tensor
    down: Tensor
    pack: Callable[[Tensor], Any] = pack_linear_here
    clamp: ClampedSwiGLU | None = None
    bias: tuple[Tensor, Tensor] | None = None
    scales_inputs: bool = False
    gated: bool = True
    activation: ExpertActivation = "silu"
    is_adapted: bool = False

    def stacked(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    def biases(self) -> tuple[Tensor, Tensor] | None:
        return self.bias

    def linears(self) -> tuple[list[Any], list[Any]]:
        return [self.pack(one) for one in self.gate_up], [self.pack(one) for one in self.down]
