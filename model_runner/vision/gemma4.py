"""`Gemma4Tower`, `Gemma4Embedder`: images of any size to rows for a prompt, by Gemma 4's tower (Google 2026), or by the
one product that Gemma 4 12B has instead.

Patches are in the order of rows, as in `QwenTower`: a row is the mean of its patches. A layer has a norm before and
after attention and MLP; half of each head turns by the column of a patch, half by its row. Names of tensors:
`gemma4_vision_tensors`.
"""

# Shapes: P patches of an image, n = P / f^2 rows, f patches of a row in each direction, S side of a patch in pixels, K
# width of the tower, D size of a head, H hidden size of the language model.

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from ...models.weight_files.gemma4_vision_tensors import (
    GEMMA4_BOUNDS,
    GEMMA4_DOWN,
    GEMMA4_HEAD_NORMS,
    GEMMA4_LINEAR,
    GEMMA4_NORMS,
    GEMMA4_OUT,
    GEMMA4_PATCHES,
    GEMMA4_POSITIONS,
    GEMMA4_PROJECTION,
    GEMMA4_QKV,
    GEMMA4_SCALES,
    GEMMA4_TABLES,
    GEMMA4_TOWER,
    GEMMA4_UPS,
    UNIFIED_NORMS,
    UNIFIED_POSITIONS,
    UNIFIED_PRODUCT,
    UNIFIED_TABLES,
    gemma4_layer,
)
from ..layers.linear import Linear
from ..layers.norm import LayerNorm, RMSNorm
from .parts import in_parts, layer_parts, shares_of
from .qwen_vit import Places, places_of, rotated
from .tower import tower_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from ...models.spec.vision_spec import VisionSpec
    from ..model_context import ModelContext

_ROPE_THETA: Final = 100.0
_NORM_EPS: Final = 1e-5  # torch's default


class Gemma4Tower:
    """See the module.

    Attributes:
        spec: the sizes.
        dtype: of the rows.
    """

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        """Take the weights from a checkpoint, in the form of `tower_context`."""
        ops, weights, size, side = context.ops, context.weights, spec.hidden_size, spec.patch_size
        context = tower_context(context)
        self.spec, self.dtype = spec, context.dtype
        self._device, self._add = context.device, ops.add
        kernel = weights.tensor(f"{GEMMA4_PATCHES}.weight", (size, spec.patch_values))
        self._patches = ops.pack_linear(kernel)
        tables = weights.tensor(f"{GEMMA4_POSITIONS}.{GEMMA4_TABLES}", (2, spec.num_positions, size))
        longest = spec.processing.max_pixels // (side * side * spec.scale_factor)
        self._by_column, self._by_row = tables[:, :longest].clone()
        self._layers = [_Layer(context, spec, layer_id) for layer_id in range(spec.num_layers)]
        self._scales: list[Tensor] | None = None
        if spec.standardizes:
            self._scales = [
                weights.tensor(f"{GEMMA4_TOWER}.{part}", (size,), torch.float32) for part in GEMMA4_SCALES
            ]
        self._project = _projection(context, spec)

    def parts_of(self, tile: Tensor) -> Iterator[Tensor | None]:
        """[height, width, 3] uint8, in RGB, on any device -> [n, H]."""
        side, factor = self.spec.patch_size, self.spec.scale_factor
        places = places_of(tile.shape[0] // side, tile.shape[1] // side, factor)
        values = _patch_values(tile, self.spec, self._device).sub_(0.5).mul_(2.0).to(self.dtype)
        rows, columns = places.to(self._device).unbind(1)
        positions = self._by_column[columns] + self._by_row[rows]
        residual = self._add(self._patches(values, None), positions)
        angles = _angles(places, self.spec.hidden_size // self.spec.num_heads)
        cos, sin = (each[:, None, None].to(residual.device) for each in (angles.cos(), angles.sin()))
        place = Places(cos, sin)
        num_shares = self.spec.num_shares(*tile.shape[:2])
        for layer in self._layers:
            residual = yield from layer_parts(layer, residual, place, num_shares, self._add)
        yield self._project(self._pooled(residual))

    def _pooled(self, x: Tensor) -> Tensor:
        """[P, K] -> [n, K]: means, which are scaled in float32 because they may be beyond float16."""
        means = x.view(-1, self.spec.scale_factor**2, x.shape[1]).float().mean(dim=1).to(x.dtype)
        scaled = means.float() * math.sqrt(self.spec.hidden_size)
        if self._scales is not None:
            offset, factor = self._scales
            scaled = (scaled - offset) * factor
        return scaled.to(x.dtype)


class Gemma4Embedder:
    """The rows of Gemma 4 12B: a norm of the values of a patch, a product, a norm, the positions, a norm.

    Attributes:
        spec: the sizes; a row is a patch.
        dtype: of the rows.
    """

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        """Take the weights from a checkpoint, in the form of `tower_context`."""
        size, values = spec.hidden_size, spec.patch_values
        context = tower_context(context)
        self.spec, self.dtype = spec, context.dtype
        self._norms = [
            LayerNorm(context, name, width, _NORM_EPS, bias=True)
            for name, width in zip(UNIFIED_NORMS, (values, size, size), strict=True)
        ]
        self._product = Linear(context, [UNIFIED_PRODUCT], values, [size], bias=True)
        tables = context.weights.tensor(
            f"{UNIFIED_POSITIONS}.{UNIFIED_TABLES}", (spec.num_positions, 2, size)
        )
        self._by_column, self._by_row = tables.unbind(1)
        self._project = _projection(context, spec)

    def parts_of(self, tile: Tensor) -> Iterator[Tensor | None]:
        """[height, width, 3] uint8, in RGB, on any device -> [n, H]."""
        side = self.spec.patch_size
        places = places_of(tile.shape[0] // side, tile.shape[1] // side, 1).to(self._by_row.device)
        first, second, last = self._norms
        values = _patch_values(tile, self.spec, self._by_row.device).to(self.dtype)

        def rows_of(at: slice) -> Tensor:
            x = second(self._product(first(values[at])))
            return self._project(last(x + self._by_column[places[at, 1]] + self._by_row[places[at, 0]]))

        shares = shares_of(len(values), self.spec.num_shares(*tile.shape[:2]))
        yield (yield from in_parts(rows_of, shares))


def _patch_values(tile: Tensor, spec: VisionSpec, device: torch.device) -> Tensor:
    """[height, width, 3] uint8 -> [P, S * S * 3] float32 by row, by column, then by color.

    The values are rounded as in transformers' processors; the patches of a row of the result follow each other.
    """
    side, factor, how = spec.patch_size, spec.scale_factor, spec.processing
    rescaled = (tile.to(device, torch.float64) * how.rescale_factor).float()
    values = rescaled.sub_(rescaled.new_tensor(how.mean)).div_(rescaled.new_tensor(how.std))
    height, width = (size // (side * factor) for size in tile.shape[:2])
    patches = values.view(height, factor, side, width, factor, side, 3).permute(0, 3, 1, 4, 2, 5, 6)
    return patches.reshape(-1, spec.patch_values)


def _projection(context: ModelContext, spec: VisionSpec) -> Callable[[Tensor], Tensor]:
    """A norm without weights, and a product: [n, K] -> [n, H]."""
    size, rms_norm = spec.hidden_size, context.ops.rms_norm
    ones = torch.ones(size, dtype=context.dtype, device=context.device)
    product = Linear(context, [GEMMA4_PROJECTION], size, [context.spec.hidden_size], bias=False)
    return lambda x: product(rms_norm(x, ones, spec.norm_eps))


class _Layer:
    """Attention of all patches of an image to all, then a gated MLP, with a norm before and after each."""

    def __init__(self, context: ModelContext, spec: VisionSpec, layer_id: int) -> None:
        name, size, inner, eps = (
            gemma4_layer(layer_id),
            spec.hidden_size,
            spec.intermediate_size,
            spec.norm_eps,
        )
        self._attention_norm, self._after_attention, self._mlp_norm, self._after_mlp = (
            RMSNorm(context, name + norm, size, eps) for norm in GEMMA4_NORMS
        )
        head_dim = size // spec.num_heads
        self._q_norm, self._k_norm = (
            RMSNorm(context, name + norm, head_dim, eps) for norm in GEMMA4_HEAD_NORMS
        )
        self._ones = torch.ones(head_dim, dtype=context.dtype, device=context.device)
        self._rms_norm = context.ops.rms_norm

        def linear(names: Sequence[str], inputs: int, outputs: int) -> _BoundedLinear:
            return _BoundedLinear(context, [name + one for one in names], inputs, outputs, clips=spec.clips)

        self._qkv, self._out = linear(GEMMA4_QKV, size, size), linear([GEMMA4_OUT], size, size)
        self._up, self._down = linear(GEMMA4_UPS, size, inner), linear([GEMMA4_DOWN], inner, size)
        self._num_heads, self._gelu_times = spec.num_heads, context.ops.gelu_times
        self._attention = context.ops.whole_attention(spec.num_heads, head_dim, 1.0)

    def qkv(self, x: Tensor, place: Places, at: slice) -> Tensor:
        """See `TowerLayer`."""
        qkv = self._qkv(self._attention_norm(x)).view(len(x), 3, self._num_heads, -1)
        q, k, v = (each.contiguous() for each in qkv.unbind(1))
        qkv[:, 2] = self._rms_norm(v, self._ones, self._q_norm.eps)
        qk = torch.stack((self._q_norm(q), self._k_norm(k)), dim=1)
        cos, sin = place.cos[at], place.sin[at]
        for half, axis in zip(qk.chunk(2, dim=-1), (0, 1), strict=True):
            half.copy_(rotated(half, cos[..., axis, :], sin[..., axis, :]))
        qkv[:, :2] = qk
        return self._attention.padded(qkv.flatten(1))

    def attend(self, qkv: Tensor, place: Places, at: slice) -> Tensor:
        """See `TowerLayer`."""
        return self._after_attention(self._out(self._attention(qkv, at=at)))

    def mlp(self, x: Tensor) -> Tensor:
        """See `TowerLayer`."""
        gate, up = self._up(self._mlp_norm(x)).chunk(2, dim=-1)
        return self._after_mlp(self._down(self._gelu_times(gate.contiguous(), up)))


class _BoundedLinear:
    """Linear layers without biases, side by side; one that bounds its inputs and outputs is a product of its own."""

    def __init__(
        self, context: ModelContext, names: Sequence[str], inputs: int, outputs: int, *, clips: bool
    ) -> None:
        groups = [[name] for name in names] if clips else [list(names)]
        self._products = [
            Linear(
                context, [name + GEMMA4_LINEAR for name in group], inputs, [outputs] * len(group), bias=False
            )
            for group in groups
        ]
        self._bounds = [
            [context.weights.tensor(f"{name}.{part}", (), torch.float32).item() for part in GEMMA4_BOUNDS]
            for name in (names if clips else ())
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """[P, inputs] -> [P, outputs of all]."""
        if not self._bounds:
            return self._products[0](x)
        made = [
            product(x.clamp(least, most)).clamp(least_made, most_made)
            for product, (least, most, least_made, most_made) in zip(
                self._products, self._bounds, strict=True
            )
        ]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)


def _angles(places: Tensor, head_dim: int) -> Tensor:
    """[P, 2, D / 2] float32: by the column, for the first half of a head, and by the row, each frequency twice."""
    size = head_dim // 2
    frequencies = 1.0 / (_ROPE_THETA ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    angles = places.flip(1)[..., None].to(torch.float32) * frequencies
    return torch.cat((angles, angles), dim=-1)
