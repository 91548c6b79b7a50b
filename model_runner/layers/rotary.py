"""Rotary position embedding: the table of angles, with the scaling variants of long-context models."""

# Shapes: T tokens, D head dim.

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ModelSpec, RopeScaling


class RotaryEmbedding:
    """cos and sin of every position's angles, in the form that `ops.rotary` takes."""

    def __init__(self, spec: ModelSpec, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compute the table in float32, as Hugging Face does, and keep it in `dtype`."""
        frequencies = rotary_frequencies(spec.rope_theta, spec.head_dim, spec.rope_scaling)
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at [T] int64 positions: [T, 1, D] each."""
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(
            0, positions
        ).unsqueeze(1)


def rotary_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> Tensor:
    """Angle per position of each pair of dimensions, [D / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch slow rotations by `factor`, keep fast ones, blend between (Llama 3.1)."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(
        0.0, 1.0
    )
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept
