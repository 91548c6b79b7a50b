"""`Tower`: tiles of images to rows for a prompt: SigLIP (Zhai et al. 2023), CLIP (Radford et al. 2021),
InternViT (Chen et al. 2024) or the tower of Llama 4, with the connector of a family.

A tile is computed alone, always in the same shapes, so its rows have the same bits in every batch. With several ranks
each one has the whole tower and computes all tiles. Names of tensors: `vision_tensors`.
"""

# Shapes: P patches of a tile, G = sqrt(P) in each direction, S side of a patch in pixels, K width of the tower, D size
# of a head.

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import torch

from ...models.weight_files.vision_tensors import (
    CLASS,
    CLASS_PART,
    FINAL_NORM,
    FIRST_NORM,
    PATCHES,
    POSITIONS,
    QKV,
    SCALES,
    class_shape,
    patches_shape,
    positions_shape,
    tower_layer,
)
from ..layers.linear import Linear
from ..layers.norm import LayerNorm
from ..weights.linear_format import PlainFormat
from .connectors import CONNECTORS
from .parts import layer_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ...models.spec.vision_spec import VisionSpec
    from ..model_context import ModelContext


_ROPE_THETA: Final = 10_000.0


def tower_context(context: ModelContext) -> ModelContext:
    """The context of a tower: weights that `--quantization int8` makes, else plain ones, and no adapters.

    In 4 bits the rows of images differ too much; a quantized checkpoint has its tower in the serving dtype.
    """
    quantization = context.spec.quantization
    linear_format = context.linear_format
    if quantization is None or quantization.method != "int8" or quantization.stored:
        linear_format = PlainFormat(context.ops.pack_linear)
    return dataclasses.replace(context, linear_format=linear_format, adapters=None)


class Tower:
    """See the module.

    Attributes:
        spec: the sizes.
        dtype: of the rows.
    """

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        """Take the weights from a checkpoint, in the form of `tower_context`."""
        ops, weights, size = context.ops, context.weights, spec.hidden_size
        context = tower_context(context)
        self.spec, self.dtype = spec, context.dtype
        self._device, self._add = context.device, ops.add
        kernel = weights.tensor(f"{PATCHES}.weight", patches_shape(spec))
        self._patches = ops.pack_linear(kernel.flatten(1))
        self._patches_bias = None
        if spec.body in ("siglip", "internvit"):
            self._patches_bias = weights.tensor(f"{PATCHES}.bias", (size,))
        table = weights.tensor(f"{POSITIONS}.weight", positions_shape(spec)).view(-1, size)
        self._positions = (
            table[_table_rows(spec.grid).to(table.device)] if spec.family == "idefics3" else table
        )
        self._layers = [_TowerLayer(context, spec, layer_id) for layer_id in range(spec.num_layers)]
        self._class = self._first_norm = self._final_norm = None
        if spec.body != "siglip":
            self._class = weights.tensor(f"{CLASS}.{CLASS_PART}", class_shape(spec)).view(1, size)
        if spec.body in ("clip", "llama4"):
            self._first_norm = LayerNorm(context, FIRST_NORM, size, spec.norm_eps, bias=True)
        if spec.ends_normed:
            self._final_norm = LayerNorm(context, FINAL_NORM, size, spec.norm_eps, bias=True)
        self._connector = CONNECTORS[spec.family](context, spec)
        self._turns = None
        pixels = torch.float32
        if spec.body == "llama4":
            pixels = torch.bfloat16  # in which its processor computes
            self._positions = self._positions.roll(1, 0)  # in files the class is the last row
            self._turns = _turns(spec.grid, size // spec.num_heads).to(context.device)
        self._mean, self._std = (
            torch.tensor(values, dtype=pixels, device=context.device)
            for values in (spec.processing.mean, spec.processing.std)
        )

    def parts_of(self, tile: Tensor) -> Iterator[Tensor | None]:
        """[side, side, 3] uint8, in RGB, on any device -> [rows per tile, hidden of the language model]."""
        x = self._patches(self._patches_of(tile), self._patches_bias)
        if self._class is not None:
            x = torch.cat((self._class, x))
        residual = self._add(x, self._positions.clone())
        if self._first_norm is not None:
            residual = self._first_norm(residual)
        num_shares = self.spec.num_shares(*tile.shape[:2])
        for layer in self._layers:
            residual = yield from layer_parts(layer, residual, self._turns, num_shares, self._add)
        x = residual if self._final_norm is None else self._final_norm(residual)
        yield self._connector(x if self._class is None or self.spec.keeps_class else x[1:])

    def _patches_of(self, tile: Tensor) -> Tensor:
        """[P, 3 * S * S] normalized values, by color, then by row; rounded as transformers' processors do."""
        grid, side = self.spec.grid, self.spec.patch_size
        seen = tile[: grid * side, : grid * side].to(self._device)
        rescaled = (seen.to(torch.float64) * self.spec.processing.rescale_factor).to(self._mean.dtype)
        values = rescaled.sub_(self._mean).div_(self._std).to(self.dtype)
        patches = values.view(grid, side, grid, side, 3).permute(0, 2, 4, 1, 3)
        return patches.reshape(grid * grid, 3 * side * side)


class _TowerLayer:
    """Attention of all patches to all, then an MLP, with a norm before each."""

    def __init__(self, context: ModelContext, spec: VisionSpec, layer_id: int) -> None:
        name, size, inner = tower_layer(layer_id), spec.hidden_size, spec.intermediate_size
        self._attention_norm = LayerNorm(context, f"{name}layer_norm1", size, spec.norm_eps, bias=True)
        self._mlp_norm = LayerNorm(context, f"{name}layer_norm2", size, spec.norm_eps, bias=True)
        self._qkv = Linear(context, [name + one for one in QKV], size, [size] * 3, bias=spec.has_qkv_bias)
        self._out = Linear(context, [f"{name}self_attn.out_proj"], size, [size], bias=True)
        self._up = Linear(context, [f"{name}mlp.fc1"], size, [inner], bias=True)
        self._down = Linear(context, [f"{name}mlp.fc2"], inner, [size], bias=True)
        self._num_heads, self._activate, self._kind = spec.num_heads, context.ops.activate, spec.activation
        head_dim = size // spec.num_heads
        self._attention = context.ops.whole_attention(spec.num_heads, head_dim, head_dim**-0.5)
        self._scales = None
        if spec.body == "internvit":
            self._scales = [context.weights.tensor(name + part, (size,)) for part in SCALES]

    def qkv(self, x: Tensor, place: Tensor | None, at: slice) -> Tensor:
        """See `TowerLayer`; `place`: what `_turns` gives, where heads are turned."""
        qkv = self._qkv(self._attention_norm(x))
        if place is not None:
            heads = qkv.view(len(qkv), 3, self._num_heads, -1)
            pairs = torch.view_as_complex(heads[:, :2].float().unflatten(-1, (-1, 2)))
            heads[:, :2] = torch.view_as_real(pairs * place[at, None, None]).flatten(-2)
        return self._attention.padded(qkv)

    def attend(self, qkv: Tensor, place: Tensor | None, at: slice) -> Tensor:
        """See `TowerLayer`."""
        x = self._out(self._attention(qkv, at=at))
        return x if self._scales is None else x * self._scales[0]

    def mlp(self, x: Tensor) -> Tensor:
        """See `TowerLayer`."""
        x = self._up(self._mlp_norm(x))
        x = x * torch.sigmoid(1.702 * x) if self._kind == "quick_gelu" else self._activate(x, self._kind)
        x = self._down(x)
        return x if self._scales is None else x * self._scales[1]


def _turns(grid: int, head_dim: int) -> Tensor:
    """[1 + P, D / 2] complex64, by which pairs of dimensions are multiplied: the class is not turned.

    The first half of the pairs turns by the column of a patch, the other by its row; both count from 1.
    """
    size = head_dim // 2
    frequencies = 1.0 / (_ROPE_THETA ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    by_place = torch.arange(1, grid + 1, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((by_place.repeat(grid, 1), by_place.repeat_interleave(grid, dim=0)), dim=1)
    angles = torch.cat((torch.zeros(1, size), angles))
    return torch.polar(torch.ones_like(angles), angles)


def _table_rows(grid: int) -> Tensor:
    """[P] the row of the table of positions of each patch.

    As Idefics3, which compares fractions in float32 with boundaries in float32: in some grids a fraction is rounded to
    below its boundary, and the patch gets the row before.
    """
    fractions = torch.arange(grid, dtype=torch.float32) * (1.0 / torch.tensor(grid))
    boundaries = torch.arange(1 / grid, 1.0, 1 / grid)
    buckets = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
    return (buckets[:, None] * grid + buckets[None, :]).flatten()
