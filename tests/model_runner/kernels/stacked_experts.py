"""Experts that lie in two tensors, for tests of whoever packs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.model_runner.kernels import plain


@dataclass(frozen=True)
class StackedExperts:
    """An `ExpertSource`: gate_up [E, 2N, K] and down [E, K, N]."""

    gate_up: Tensor
    down: Tensor
    pack: Callable[[Tensor], Any] = plain.pack_linear_onednn

    def stacked(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down

    def linears(self) -> tuple[list[Any], list[Any]]:
        return [self.pack(one) for one in self.gate_up], [self.pack(one) for one in self.down]
