"""Rotary position embedding: the table of angles, with the scaling variants of long-context models."""

# Shapes: T tokens, R rotated dimensions of a head, A axes of positions (M-RoPE).

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.spec.layer_form import RopeScaling

if TYPE_CHECKING:
    from ..model_context import ModelContext

logger = logging.getLogger(__name__)


class RotaryEmbedding:
    """cos and sin of the angles of every position, in the form that `RotateAndStore` takes."""

    def __init__(
        self, frequencies: Tensor, scale: float, context: ModelContext, *, in_one: bool | None = None
    ) -> None:
        """Compute the table in float32, as Hugging Face does, and store it in float32 on GPUs.

        On the CPU, where rotation is plain torch, the table is stored in the model's dtype, as in Hugging Face.

        Args:
            frequencies: [R / 2] float32, angle per position.
            scale: factor of cos and sin, see `RopeScaling.attention_factor`.
            in_one: cos and sin of a position are one row, so that one kernel gathers both; None: on GPUs.
        """
        angles = torch.outer(torch.arange(context.max_model_len, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        dtype = context.dtype if context.device.type == "cpu" else torch.float32
        self._cos = torch.cat((cos, cos), dim=-1).to(context.device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(context.device, dtype)
        self._both: Tensor | None = None
        if in_one or (in_one is None and context.device.type != "cpu"):
            self._both = torch.cat((self._cos, self._sin), dim=-1)
            self._cos, self._sin = self._both.chunk(2, dim=-1)
        self._take_rows = context.ops.take_rows
        vision = context.spec.vision
        self._axes: Tensor | None = None
        if vision is not None and vision.rope_sections:
            axes = axis_of_pairs(vision.rope_sections, len(frequencies), alternates=vision.rope_alternates)
            self._axes = torch.cat((axes, axes)).to(context.device)

    @classmethod
    def of(cls, context: ModelContext, head_dim: int | None = None) -> RotaryEmbedding:
        """The table of the model; if windowed layers have their own, the table of the other layers.

        `head_dim`: of these layers; None: of all.
        """
        spec, max_model_len = context.spec, context.max_model_len
        scaling = spec.rope_scaling
        if scaling.kind == "longrope":
            logger.info(
                "rope_factors=%s original_max_position=%d",
                "long" if max_model_len > scaling.original_max_position else "short",
                scaling.original_max_position,
            )
        rotary_dim = spec.rotary_dim or head_dim or spec.head_dim
        frequencies = rotary_frequencies(spec.rope_theta, rotary_dim, scaling, max_model_len)
        return cls(frequencies, scaling.attention_factor, context)

    @classmethod
    def local(cls, context: ModelContext) -> RotaryEmbedding:
        """The table of the windowed layers, for models where they have their own."""
        spec = context.spec
        assert spec.windows is not None and spec.windows.rope_theta is not None
        rotary_dim = spec.windows.rotary_dim or spec.rotary_dim or spec.head_dim
        frequencies = rotary_frequencies(
            spec.windows.rope_theta, rotary_dim, RopeScaling(), context.max_model_len
        )
        return cls(frequencies, 1.0, context)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at [T] int64 positions: [T, R] each; at [A, T] each pair turns by its axis' position."""
        if positions.dim() == 2:
            assert self._axes is not None, "positions with axes, and a model without them"
            index = self._axes.expand(1, positions.shape[1], -1)
            cos, sin = (each.view(*positions.shape, -1) for each in self.at(positions.flatten()))
            return cos.gather(0, index)[0], sin.gather(0, index)[0]
        if self._both is not None:
            cos, sin = self._take_rows(self._both, positions).chunk(2, dim=-1)
            return cos, sin
        return self._take_rows(self._cos, positions), self._take_rows(self._sin, positions)


def axis_of_pairs(sections: tuple[int, ...], num_pairs: int, *, alternates: bool) -> Tensor:
    """[R / 2] int64, the axis by whose positions each pair of dimensions turns; see `VisionSpec`."""
    if not alternates:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    axes = torch.zeros(num_pairs, dtype=torch.int64)
    for axis in range(1, len(sections)):
        axes[axis : sections[axis] * len(sections) : len(sections)] = axis
    return axes


def rotary_frequencies(theta: float, rotary_dim: int, scaling: RopeScaling, max_model_len: int) -> Tensor:
    """Angle per position of each pair of dimensions, [R / 2] float32; see `RopeScaling`.

    The frequencies are fixed at start, also with longrope. In transformers they depend on the lengths in a batch; then
    a request's output would depend on the other requests of its batches and on its cached prefix.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3_frequencies(frequencies, scaling)
        case "yarn":
            return _yarn_frequencies(frequencies, theta, rotary_dim, scaling)
        case "proportional":
            num_turning = int(scaling.turning_part * rotary_dim // 2)
            return F.pad(frequencies[:num_turning] / scaling.factor, (0, rotary_dim // 2 - num_turning))
        case "longrope":
            is_long = max_model_len > scaling.original_max_position
            return frequencies / torch.tensor(scaling.long_factor if is_long else scaling.short_factor)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch slow rotations by `factor`, keep fast ones, and blend in between (Llama 3.1)."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (turns >= low).to(torch.float32) if low == high else ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def _yarn_frequencies(frequencies: Tensor, theta: float, rotary_dim: int, scaling: RopeScaling) -> Tensor:
    """Keep fast rotations, stretch slow ones, and blend linearly by the index of the pair in between (YaRN)."""

    def pair_that_turns(
        times: float,
    ) -> float:  # index of the pair with `times` turns in the original context
        wavelength = scaling.original_max_position / (times * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies * (1 - stretched) + frequencies / scaling.factor * stretched
