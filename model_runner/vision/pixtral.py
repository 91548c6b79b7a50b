"""`PixtralTower`: images of any size to rows for a prompt, by Pixtral's tower (Agrawal et al. 2024); also in Mistral 3.

Patches are in the order of rows, as in `QwenTower`. Names of tensors: `pixtral_tensors`.
"""

# Shapes: P patches of an image, n = P / f^2 rows, f patches of a row in each direction, S side of a patch in pixels, K
# width of the tower, D size of a head, H hidden size of the language model.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ...models.weight_files.pixtral_tensors import (
    MERGER,
    MERGER_NORM,
    PIXTRAL_DOWN,
    PIXTRAL_NORM,
    PIXTRAL_OUT,
    PIXTRAL_PATCHES,
    PIXTRAL_QKV,
    PIXTRAL_UPS,
    pixtral_layer,
)
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from .connectors import MLPConnector
from .parts import layer_parts
from .qwen_vit import Places, patches_by_rows, places_of
from .tower import tower_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ...models.spec.vision_spec import VisionSpec
    from ..model_context import ModelContext

_ROPE_THETA: Final = 10_000.0


class PixtralTower:
    """See the module.

    Attributes:
        spec: the sizes.
        dtype: of the rows.
    """

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        """Take the weights from a checkpoint, in the form of `tower_context`."""
        ops, size, side = context.ops, spec.hidden_size, spec.patch_size
        context = tower_context(context)
        self.spec, self.dtype = spec, context.dtype
        self._device, self._add = context.device, ops.add
        kernel = context.weights.tensor(f"{PIXTRAL_PATCHES}.weight", (size, 3, side, side))
        self._patches = ops.pack_linear(kernel.flatten(1))
        self._first_norm = RMSNorm(context, PIXTRAL_NORM, size, spec.norm_eps)
        self._layers = [_Layer(context, spec, layer_id) for layer_id in range(spec.num_layers)]
        self._merge = _Merger(context, spec) if spec.scale_factor > 1 else None
        self._mlp = MLPConnector(context, spec)
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=context.device)
            for values in (spec.processing.mean, spec.processing.std)
        )

    def parts_of(self, tile: Tensor) -> Iterator[Tensor | None]:
        """[height, width, 3] uint8, in RGB, on any device -> [n, H]."""
        side, factor = self.spec.patch_size, self.spec.scale_factor
        places = places_of(tile.shape[0] // side, tile.shape[1] // side, factor)
        rescaled = (tile.to(self._device, torch.float64) * self.spec.processing.rescale_factor).to(
            torch.float32
        )
        values = rescaled.sub_(self._mean).div_(self._std).to(self.dtype)
        residual = self._first_norm(self._patches(patches_by_rows(values, side, factor), None))
        angles = _angles(places, self.spec.hidden_size // self.spec.num_heads)
        cos, sin = (each[:, None, None].to(residual.device) for each in (angles.cos(), angles.sin()))
        place = Places(cos, sin)
        num_shares = self.spec.num_shares(*tile.shape[:2])
        for layer in self._layers:
            residual = yield from layer_parts(layer, residual, place, num_shares, self._add)
        yield self._mlp(residual if self._merge is None else self._merge(residual))


class _Layer:
    """Attention of all patches of an image to all, then a gated MLP, with a norm before each."""

    def __init__(self, context: ModelContext, spec: VisionSpec, layer_id: int) -> None:
        name, size, inner = pixtral_layer(layer_id), spec.hidden_size, spec.intermediate_size
        self._attention_norm = RMSNorm(context, f"{name}attention_norm", size, spec.norm_eps)
        self._mlp_norm = RMSNorm(context, f"{name}ffn_norm", size, spec.norm_eps)
        self._qkv = Linear(context, [name + one for one in PIXTRAL_QKV], size, [size] * 3, bias=False)
        self._out = Linear(context, [name + PIXTRAL_OUT], size, [size], bias=False)
        self._up = Linear(context, [name + one for one in PIXTRAL_UPS], size, [inner] * 2, bias=False)
        self._down = Linear(context, [name + PIXTRAL_DOWN], inner, [size], bias=False)
        self._num_heads, self._activate, self._kind = spec.num_heads, context.ops.activate, spec.activation
        head_dim = size // spec.num_heads
        self._attention = context.ops.whole_attention(spec.num_heads, head_dim, head_dim**-0.5)

    def qkv(self, x: Tensor, place: Places, at: slice) -> Tensor:
        """See `TowerLayer`."""
        return self._attention.padded(place.turn(self._qkv(self._attention_norm(x)), self._num_heads, at))

    def attend(self, qkv: Tensor, place: Places, at: slice) -> Tensor:
        """See `TowerLayer`."""
        return self._out(self._attention(qkv, at=at))

    def mlp(self, x: Tensor) -> Tensor:
        """See `TowerLayer`."""
        gate, up = self._up(self._mlp_norm(x)).chunk(2, dim=-1)
        kind = self._kind
        assert kind != "quick_gelu", "read_vision refuses it"
        return self._down(self._activate(gate.contiguous(), kind) * up)


class _Merger:
    """A norm, and one product with the patches of a row together (Mistral 3)."""

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        size = spec.hidden_size
        self._joins = spec.scale_factor**2
        self._norm = RMSNorm(context, MERGER_NORM, size, context.spec.rms_norm_eps)
        self._product = Linear(context, [MERGER], spec.joined_size, [size], bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        """[P, K] -> [n, K]."""
        normed = self._norm(x)
        # Each number of the width for all patches of a row, then the next one.
        joined = normed.view(-1, self._joins, normed.shape[-1]).transpose(1, 2).flatten(1)
        return self._product(joined.contiguous())


def _angles(places: Tensor, head_dim: int) -> Tensor:
    """[P, D] float32: the frequencies in turn belong to the row and to the column; then the same again."""
    frequencies = 1.0 / (_ROPE_THETA ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    by_axis = torch.stack((frequencies[0::2], frequencies[1::2]))
    angles = (places[..., None].to(torch.float32) * by_axis).flatten(1)
    return torch.cat((angles, angles), dim=1)
