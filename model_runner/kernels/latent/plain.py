"""The operations in plain torch, on any device."""

# Shapes: see `ops`; K size of a latent.

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.linear import HeadMatmul
from ...ops.rotation import LayerKV
from .. import plain


class PlainHeadMatmul:
    """One batched matmul, with the heads as batch."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.transpose(1, 2).contiguous()  # [Hq, K, N]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        out.copy_(torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1))


def pack_heads(weight: Tensor) -> HeadMatmul:
    return PlainHeadMatmul(weight)


def store_latent(
    q: Tensor,
    q_out: Tensor,
    row: Tensor,
    norm: tuple[Tensor, float],
    cos: Tensor,
    sin: Tensor,
    kv: LayerKV,
    out_cache_loc: Tensor,
    *,
    interleaved: bool,
) -> None:
    weight, eps = norm
    latent, key = row.split((len(weight), cos.shape[-1]), dim=-1)
    heads, cos, sin = torch.cat((q, key.unsqueeze(1)), dim=1), cos.to(q.dtype), sin.to(q.dtype)
    rotated = plain.rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1), interleaved=interleaved)
    q_out.copy_(rotated[:, :-1])
    whole = torch.cat((plain.rms_norm(latent.contiguous(), weight, eps), rotated[:, -1]), dim=-1)
    plain.store(kv.k, whole.unsqueeze(1), out_cache_loc)
