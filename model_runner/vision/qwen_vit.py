"""`QwenTower`: images of any size to rows for a prompt, by the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Patches are in the order of rows: those that become one row follow each other. In Qwen2.5-VL most layers attend within
windows of the image, in whole rows; their patches are computed window by window.
Qwen3-VL adds a table of positions, stretched over the image, and makes rows after some layers besides the last
(`VisionSpec.deepstack_layers`). Names of tensors: `qwen_vision_tensors`.
"""

# Shapes: P patches of an image, n = P / f^2 rows, f patches of a row in each direction, S side of a patch in pixels, K
# width of the tower, D size of a head, H hidden size of the language model.

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from ...models.spec.vision_spec import FRAMES
from ...models.weight_files.qwen_vision_tensors import (
    QWEN_FORMS,
    QWEN_PATCHES,
    QWEN_POSITIONS,
    qwen_connectors,
    qwen_layer,
)
from ..layers.linear import Linear
from ..layers.norm import LayerNorm, Norm, RMSNorm
from .parts import layer_parts, shares_of
from .tower import tower_context

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ...models.spec.vision_spec import VisionSpec
    from ..model_context import ModelContext

_NORM_EPS = 1e-6
_ROPE_THETA = 10_000.0


class Places(NamedTuple):
    """The places of patches in an image.

    Attributes:
        cos, sin: [P, 1, 1, D] float32, of the angles by which heads are turned; of Gemma 4 [P, 1, 1, 2, D / 2].
        windows: the first patch of each window within which a layer attends, and P; empty: it attends to all.
    """

    cos: Tensor
    sin: Tensor
    windows: Sequence[int] = ()

    def turn(self, qkv: Tensor, num_heads: int, at: slice) -> Tensor:
        """[rows of `at`, 3 * K], whose queries and keys are overwritten with the turned ones; returns it."""
        heads = qkv.view(len(qkv), 3, num_heads, -1)
        heads[:, :2] = rotated(heads[:, :2], self.cos[at], self.sin[at])
        return qkv


class QwenTower:
    """See the module.

    Attributes:
        spec: the sizes.
        dtype: of the rows.
    """

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        """Take the weights from a checkpoint, in the form of `tower_context`."""
        ops, weights, size, side = context.ops, context.weights, spec.hidden_size, spec.patch_size
        context = tower_context(context)
        form = QWEN_FORMS[spec.family]
        self.spec, self.dtype = spec, context.dtype
        self._device, self._add = context.device, ops.add
        kernel = weights.tensor(f"{QWEN_PATCHES}.weight", (size, 3, FRAMES, side, side), dtype=torch.float32)
        # All frames of an image are the same, so their products are one with the sum of the weights.
        self._patches = ops.pack_linear(kernel.sum(dim=2).flatten(1).to(context.dtype))
        self._patches_bias = weights.tensor(f"{QWEN_PATCHES}.bias", (size,)) if form.patch_bias else None
        self._table: Tensor | None = None
        if spec.num_positions:
            self._table = weights.tensor(f"{QWEN_POSITIONS}.weight", (spec.num_positions, size))
        self._layers = [_Layer(context, spec, layer_id) for layer_id in range(spec.num_layers)]
        self._connectors = [
            _Connector(context, spec, name, joins_first=number > 0)
            for number, name in enumerate(qwen_connectors(spec))
        ]
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=context.device)
            for values in (spec.processing.mean, spec.processing.std)
        )

    def parts_of(self, tile: Tensor) -> Iterator[Tensor | None]:
        """[height, width, 3] uint8, in RGB, on any device -> [n, `VisionSpec.row_width`]."""
        height, width = tile.shape[0] // self.spec.patch_size, tile.shape[1] // self.spec.patch_size
        places = places_of(height, width, self.spec.scale_factor)
        x = self._patches(self._patches_of(tile), self._patches_bias)
        if self._table is not None:
            x = x + _stretched(self._table, places, height, width).to(x.dtype)
        order, windows = self._windows(height, width)
        num_rows, joins = len(order), self.spec.scale_factor**2
        residual = x.view(num_rows, joins, -1)[order.to(x.device)].flatten(0, 1)
        head_dim = self.spec.hidden_size // self.spec.num_heads
        angles = _angles(places.view(num_rows, joins, 2)[order].flatten(0, 1), head_dim)
        cos, sin = (each[:, None, None].to(x.device) for each in (angles.cos(), angles.sin()))
        whole, in_windows = Places(cos, sin), Places(cos, sin, windows)
        num_shares = self.spec.num_shares(*tile.shape[:2])
        by_window: list[slice] | None = None
        if windows:
            shares = shares_of(len(windows) - 1, num_shares)
            by_window = [slice(windows[each.start], windows[each.stop]) for each in shares]
        back = order.argsort().to(x.device)
        made: list[Tensor] = []
        for layer_id, layer in enumerate(self._layers):
            is_whole = not windows or layer_id in self.spec.whole_layers
            place, attended = (whole, None) if is_whole else (in_windows, by_window)
            residual = yield from layer_parts(layer, residual, place, num_shares, self._add, attended)
            if layer_id in self.spec.deepstack_layers:
                connector = self._connectors[1 + self.spec.deepstack_layers.index(layer_id)]
                made.append(connector(residual)[back])
        yield torch.cat([self._connectors[0](residual)[back], *made], dim=1)

    def _patches_of(self, tile: Tensor) -> Tensor:
        """[P, 3 * S * S] normalized values, by color, then by row; rounded as transformers' processors do."""
        side, factor = self.spec.patch_size, self.spec.scale_factor
        rescaled = (tile.to(self._device, torch.float64) * self.spec.processing.rescale_factor).to(
            torch.float32
        )
        values = rescaled.sub_(self._mean).div_(self._std).to(self.dtype)
        return patches_by_rows(values, side, factor)

    def _windows(self, height: int, width: int) -> tuple[Tensor, list[int]]:
        """The order of rows in which windows follow each other, [n], and `Places.windows`.

        Args:
            height, width: in patches.
        """
        factor = self.spec.scale_factor
        rows, columns = height // factor, width // factor
        if not self.spec.window_size:
            return torch.arange(rows * columns), []
        side = self.spec.window_size // factor // self.spec.patch_size
        numbers = torch.arange(rows * columns).view(rows, columns)
        windows = [part.flatten() for band in numbers.split(side) for part in band.split(side, dim=1)]
        firsts = itertools.accumulate((len(part) * factor**2 for part in windows), initial=0)
        return torch.cat(windows), list(firsts)


class _Layer:
    """Attention of the patches of an image, or of each window, to each other, then an MLP, with a norm before each."""

    def __init__(self, context: ModelContext, spec: VisionSpec, layer_id: int) -> None:
        name, size, inner = qwen_layer(layer_id), spec.hidden_size, spec.intermediate_size
        form = QWEN_FORMS[spec.family]
        self._attention_norm = _norm(context, f"{name}norm1", size, is_rms=form.rms_norms)
        self._mlp_norm = _norm(context, f"{name}norm2", size, is_rms=form.rms_norms)
        self._qkv = Linear(context, [f"{name}attn.qkv"], size, [3 * size], bias=True)
        self._out = Linear(context, [f"{name}attn.proj"], size, [size], bias=True)
        *ups, down = [f"{name}mlp.{each}" for each in form.mlp]
        self._up = Linear(context, ups, size, [inner] * len(ups), bias=True)
        self._down = Linear(context, [down], inner, [size], bias=True)
        self._num_heads, self._kind, self._is_gated = spec.num_heads, spec.activation, len(ups) == 2
        self._activate = context.ops.activate
        head_dim = size // spec.num_heads
        self._attention = context.ops.whole_attention(spec.num_heads, head_dim, head_dim**-0.5)

    def qkv(self, x: Tensor, place: Places, at: slice) -> Tensor:
        """See `TowerLayer`."""
        return self._attention.padded(place.turn(self._qkv(self._attention_norm(x)), self._num_heads, at))

    def attend(self, qkv: Tensor, place: Places, at: slice) -> Tensor:
        """See `TowerLayer`; a share has whole windows."""
        if not place.windows:
            return self._out(self._attention(qkv, at=at))
        ends = [each for each in place.windows if at.start <= each <= at.stop]
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        return self._out(self._attention(qkv[at], lengths))

    def mlp(self, x: Tensor) -> Tensor:
        """See `TowerLayer`."""
        up = self._up(self._mlp_norm(x))
        if self._is_gated:
            gate, up = up.chunk(2, dim=-1)
            return self._down(F.silu(gate) * up)
        up = up * torch.sigmoid(1.702 * up) if self._kind == "quick_gelu" else self._activate(up, self._kind)
        return self._down(up)


class _Connector:
    """A norm, and two products with the patches of a row side by side.

    `joins_first`: the norm is over the patches of a row together, else over each patch.
    """

    def __init__(self, context: ModelContext, spec: VisionSpec, name: str, *, joins_first: bool) -> None:
        form, joined = QWEN_FORMS[spec.family], spec.joined_size
        norm, first, second = (name + each for each in form.connector)
        size = joined if joins_first else spec.hidden_size
        self._size, self._joined = size, joined
        self._norm = _norm(context, norm, size, is_rms=form.rms_norms)
        self._first = Linear(context, [first], joined, [joined], bias=True)
        self._second = Linear(context, [second], joined, [context.spec.hidden_size], bias=True)
        self._activate = context.ops.activate

    def __call__(self, x: Tensor) -> Tensor:
        """[P, K] -> [n, H]."""
        joined = self._norm(x.reshape(-1, self._size)).view(-1, self._joined)
        return self._second(self._activate(self._first(joined), "gelu"))


def _norm(context: ModelContext, name: str, size: int, *, is_rms: bool) -> Norm:
    if is_rms:
        return RMSNorm(context, name, size, _NORM_EPS)
    return LayerNorm(context, name, size, _NORM_EPS, bias=True)


def patches_by_rows(values: Tensor, side: int, factor: int) -> Tensor:
    """[height, width, 3] -> [P, 3 * S * S], by color, then by row; those of one row follow each other."""
    height, width = (size // (side * factor) for size in values.shape[:2])
    patches = values.view(height, factor, side, width, factor, side, 3).permute(0, 3, 1, 4, 6, 2, 5)
    return patches.reshape(-1, 3 * side * side)


def places_of(height: int, width: int, factor: int) -> Tensor:
    """[P, 2] row and column of each patch, in the order of patches."""
    grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    blocks = grid.view(height // factor, factor, width // factor, factor, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def _angles(places: Tensor, head_dim: int) -> Tensor:
    """[P, D] float32: a quarter of the dimensions turns by the row, one by the column, and the same again."""
    size = head_dim // 2
    frequencies = 1.0 / (_ROPE_THETA ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    angles = (places[..., None].to(torch.float32) * frequencies).flatten(1)
    return torch.cat((angles, angles), dim=1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[P, 2, heads, D] -> the same, turned in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _stretched(table: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """[P, K] float32: a square table of positions over an image, between its rows bilinear, from corner to corner."""
    side = round(len(table) ** 0.5)
    result = torch.zeros((), dtype=torch.float32, device=table.device)
    taps = []
    for axis, size in enumerate((height, width)):
        at = places[:, axis].to(torch.float32) * (side - 1) / max(size - 1, 1)
        low = at.floor().long()
        share = at - low
        taps.append(((low, 1 - share), ((low + 1).clamp(max=side - 1), share)))
    for row, row_share in taps[0]:
        for column, column_share in taps[1]:
            rows = table[(row * side + column).to(table.device)].float()
            result = result + rows * (row_share * column_share)[:, None].to(table.device)
    return result
