"""The operations in plain torch, on any device."""

# Shapes: see `ops`; K size of a latent.

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import HeadMatmul, LayerKV
from .. import plain


class PlainHeadMatmul:
    """One batched matmul, with the heads as batch."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.transpose(1, 2).contiguous()  # [Hq, K, N]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """See `HeadMatmul`."""
        out.copy_(torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1))


def pack_heads(weight: Tensor) -> HeadMatmul:
    """See `PackHeads`."""
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
    """See `StoreLatent`."""
    weight, eps = norm
    latent, key = row.split((len(weight), cos.shape[-1]), dim=-1)
    rotated = torch.cat((q, key.unsqueeze(1)), dim=1)
    if interleaved:
        rotated = _pairs_apart(rotated)
    rotated = plain.rotate(rotated, cos.unsqueeze(1).to(q.dtype), sin.unsqueeze(1).to(q.dtype))
    if interleaved:
        rotated = _pairs_together(rotated)
    q_out.copy_(rotated[:, :-1])
    whole = torch.cat((plain.rms_norm(latent.contiguous(), weight, eps), rotated[:, -1]), dim=-1)
    plain.store(kv.k, whole.unsqueeze(1), out_cache_loc)


def _pairs_apart(x: Tensor) -> Tensor:
    """[..., R]: the first elements of all pairs, then the second ones."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def _pairs_together(x: Tensor) -> Tensor:
    """The inverse of `_pairs_apart`."""
    return x.view(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
