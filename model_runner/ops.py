"""The one door to kernels: what a model's layers compute with, whoever computes it.

Layers call these functions and never ask for a device. Today there are two makers: oneDNN through torch, with weights
packed once for the CPU's caches, and plain torch everywhere else.

Packing pays: all linears of SmolLM2-135M together take 6.0 ms instead of 9.0 (bf16, 1 token) and 117 instead of 157
(512 tokens), in float32 7.8 instead of 24.8, on two Zen 5 cores.
"""

# Shapes: T tokens, N outputs, K inputs.

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_mkldnn: Final[Any] = torch.ops.mkldnn
_has_onednn: Final[bool] = torch.backends.mkldnn.is_available()


class LinearWeight:
    """The weight of a linear layer in whatever layout its kernel wants; only `linear` looks inside."""

    __slots__ = ("_packed", "_plain")

    def __init__(self, weight: Tensor) -> None:
        """Take over a weight.

        Args:
            weight: [N, K], contiguous. Packed weights are copies: the caller should drop his reference.
        """
        self._plain: Tensor | None = weight
        self._packed: Tensor | None = None
        if can_pack(weight):
            self._packed = _mkldnn._reorder_linear_weight(weight, None)
            self._plain = None


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has kernels for this weight on this machine."""
    if weight.device.type != "cpu" or not _has_onednn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(_mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; [T, K] -> [T, N] in x's dtype."""
    if weight._packed is not None:
        out: Tensor = _mkldnn._linear_pointwise(x, weight._packed, bias, "none", [], "")
        return out
    assert weight._plain is not None
    return F.linear(x, weight._plain, bias)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of `table`: [T] ids -> [T, K]."""
    return F.embedding(token_ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in float32; [..., K] -> [..., K].

    The weight may be float32 where x is not; the result has x's dtype, and is rounded to it once.
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise it: (normalised, new residual). `residual` may be overwritten."""
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; [T, 2N] with the gate in the first half -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation; [T, 2N] with the gate in the first half -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position (Su et al. 2021), halves paired as in Hugging Face's Llama.

    Args:
        x: [T, heads, D]; the first R numbers of each head rotate, the others stay as they are.
        cos: [T, 1, R] both halves alike.
        sin: [T, 1, R] the first half negated, so that x * cos + swapped(x) * sin is the rotation.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim != x.shape[-1]:
        return torch.cat((rotary(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), dim=-1)
    half = rotary_dim // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


class ExpertWeights:
    """The weights of a layer's experts in whatever layout their kernel wants; only `sparse_mlp` looks inside."""

    __slots__ = ("_packed", "_plain")

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """Take over the weights of E experts.

        Args:
            gate_up: [E, 2N, K], the gates in the first N rows. Packed weights are copies, as with `LinearWeight`.
            down: [E, K, N].
        """
        self._plain: tuple[Tensor, Tensor] | None = (gate_up, down)
        self._packed: list[tuple[LinearWeight, LinearWeight]] | None = None
        if gate_up.device.type == "cpu":
            self._packed = [(LinearWeight(g), LinearWeight(d)) for g, d in zip(gate_up, down, strict=True)]
            self._plain = None


def route(logits: Tensor, num_active: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Choose experts: [T, E] -> their shares [T, k] float32 and ids [T, k] int64, the largest first.

    Args:
        normalise: let the shares of a token add up to 1.
    """
    shares, expert_ids = logits.softmax(dim=-1, dtype=torch.float32).topk(num_active, dim=-1)
    if normalise:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares, expert_ids


def sparse_mlp(x: Tensor, experts: ExpertWeights, shares: Tensor, expert_ids: Tensor) -> Tensor:
    """Each token through its experts, weighted and added up in float32; [T, K] -> [T, K].

    Tokens are sorted by expert, so that an expert multiplies all of its tokens at once. On the CPU that is a loop over
    the experts that have some, elsewhere one grouped product whose group ends stay on the device.
    """
    num_active = expert_ids.shape[1]
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    rows = x.index_select(0, order // num_active)
    if experts._packed is not None:
        counts = torch.bincount(sorted_ids, minlength=len(experts._packed)).tolist()
        out = torch.empty_like(rows)
        start = 0
        for count, (gate_up, down) in zip(counts, experts._packed, strict=True):
            if count:
                mine = slice(start, start + count)
                out[mine] = linear(silu_and_mul(linear(rows[mine], gate_up)), down)
                start += count
    else:
        assert experts._plain is not None
        gate_up_weight, down_weight = experts._plain
        expert_range = torch.arange(gate_up_weight.shape[0], device=x.device)
        ends = torch.searchsorted(sorted_ids, expert_range, right=True).to(torch.int32)
        hidden = silu_and_mul(F.grouped_mm(rows, gate_up_weight.transpose(1, 2), offs=ends))
        out = F.grouped_mm(hidden, down_weight.transpose(1, 2), offs=ends)
    by_token = torch.empty_like(out).index_copy_(0, order, out).view(x.shape[0], num_active, -1)
    return (by_token.to(torch.float32) * shares.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def argmax(x: Tensor) -> Tensor:
    """Index of the largest of each row, the first of equals: [n, V] -> [n] int64."""
    if x.device.type == "cpu":  # numpy is 13 times as fast on one row of 49k, 6 times on 32
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.argmax(dim=-1)


def largest(x: Tensor, k: int) -> Tensor:
    """The k largest of each row, descending: [n, V] float32 -> [n, k]."""
    if x.device.type == "cpu":  # numpy's AVX-512 sort: 85 us for a row of 49k, torch takes 1,500
        rows = x.numpy()
        if k < rows.shape[1]:
            rows = np.partition(rows, rows.shape[1] - k, axis=-1)[:, -k:]
        return torch.from_numpy(np.sort(rows, axis=-1)[:, ::-1].copy())
    return x.topk(k, dim=-1).values if k < x.shape[1] else x.sort(dim=-1, descending=True).values


def store_kv(pool: Tensor, new: Tensor, loc: Tensor) -> None:
    """Write keys or values of new tokens into their slots.

    Args:
        pool: [slots, H, D].
        new: [T, H, D] in the pool's dtype.
        loc: [T] int64, no slot twice except slot 0, which nobody reads.
    """
    pool.index_copy_(0, loc, new)
