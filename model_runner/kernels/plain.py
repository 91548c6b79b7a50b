"""The operations of `ops` in plain torch, on any device. On the CPU, oneDNN packs the weights for its caches.

Packing pays: all linears of SmolLM2-135M together take 6.0 ms instead of 9.0 (bf16, 1 token) and 117 instead of 157
(512 tokens), in float32 7.8 instead of 24.8, on two Zen 5 cores.
"""

# Shapes: see `ops`; E experts, k active experts of a token.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.elementwise import ActivationKind
from ..ops.experts import ExpertSource, ExpertWeights
from ..ops.linear import LinearWeight
from ..ops.rotation import HeadNorms, LayerKV, RotaryStore

if TYPE_CHECKING:
    from ...models.spec.experts_spec import ClampedSwiGLU, ExpertActivation, Routing
    from ..ops.deltas import ExpertChanges

_mkldnn: Final[Any] = torch.ops.mkldnn
_MOST_INT8: Final = 127.0
_LEAST_TOP: Final = 1e-35
"""Smaller values are stored as 0."""
_LEAST_SUM: Final = 1e-20
"""Added to the sum of shares, which may be zero if they are sigmoids."""
_has_onednn: Final[bool] = torch.backends.mkldnn.is_available()


# ---------------------------------------------------------------- linear


class PlainLinear:
    """torch's own matmul; the weight is not packed."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(bias, x, self.weight.t(), out=out)


class OneDNNLinear:
    """A weight in oneDNN's packed layout; a copy."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = _mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = _mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return out


def reasons_against_onednn(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Reason why oneDNN cannot pack weights here."""
    if device.type != "cpu":
        return [f"packs weights for CPUs only, not for {device.type}"]
    if not _has_onednn:
        return ["this torch was built without oneDNN"]
    if dtype == torch.bfloat16 and not _mkldnn._is_mkldnn_bf16_supported():
        return ["oneDNN has no bfloat16 kernels for this CPU"]
    if dtype not in (torch.bfloat16, torch.float32):
        return [f"oneDNN packs bfloat16 and float32 only, not {dtype}"]
    return []


def pack_linear(weight: Tensor) -> LinearWeight:
    return PlainLinear(weight)


def pack_linear_onednn(weight: Tensor) -> LinearWeight:
    return OneDNNLinear(weight)


# ---------------------------------------------------------------- norms and activations


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype != x.dtype:
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Gelu by the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_erf_and_mul(gate_up: Tensor) -> Tensor:
    """Gelu by the error function."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def clamped_swiglu(gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
    """Computed in float32. [T, 2N], the gates in the first half -> [T, N]."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.gate_limit), up.clamp(-clamp.limit, clamp.limit)
    return ((up + clamp.offset) * gate * (clamp.alpha * gate).sigmoid()).to(gate_up.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    residual = residual.add_(x)
    return layer_norm(residual, weight, bias, eps), residual


_ACTIVATIONS: Final[dict[ActivationKind, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def activate(x: Tensor, kind: ActivationKind) -> Tensor:
    return _ACTIVATIONS[kind](x)


# ---------------------------------------------------------------- rotary and KV


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [T, heads, D] rotated; cos, sin [T, 1, R] as in `RotateAndStore`."""
    rotary_dim = cos.shape[-1]
    if rotary_dim == 0:
        return x
    if rotary_dim != x.shape[-1]:
        rotated = rotate(x[..., :rotary_dim], cos, sin, interleaved=interleaved)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    if interleaved:
        first, second = rotate(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), cos, sin).chunk(2, dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)
    half = rotary_dim // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def rotate_and_store(qkv: Tensor, norms: HeadNorms | None, store: RotaryStore) -> Tensor:
    cos, sin, kv, out_cache_loc, interleaved, query_factors, keys_are_values = store
    num_kv_heads = 0 if kv is None else kv.k.shape[1]
    num_heads = qkv.shape[1] - (1 if keys_are_values else 2) * num_kv_heads
    values = qkv[:, qkv.shape[1] - num_kv_heads :]
    if norms is not None and norms.values:
        squares = values.to(torch.float32).square().mean(dim=-1, keepdim=True)
        values = (values * (squares + norms.eps).rsqrt()).to(values.dtype)
    qk = qkv[:, : num_heads + num_kv_heads]
    if norms is not None:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        qk = torch.cat(
            (norm_heads(q, norms.q_weight, norms.eps), norm_heads(k, norms.k_weight, norms.eps)), dim=1
        )
    cos, sin = cos.unsqueeze(1).to(qk.dtype), sin.unsqueeze(1).to(qk.dtype)
    qk = rotate(qk, cos, sin, interleaved=interleaved)  # q and k in one call
    if kv is not None:
        store_kv(kv, qk[:, num_heads:], values, out_cache_loc)
    q = qk[:, :num_heads]
    return q if query_factors is None else (q * query_factors.view(-1, 1, 1)).to(q.dtype)


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, heads, D] normalized as in `HeadNorms`: each head, or all heads of a token together."""
    if len(weight) == x.shape[-1]:
        return rms_norm(x, weight, eps)
    return rms_norm(x.flatten(1), weight, eps).view(x.shape)


def store_kv(kv: LayerKV, k: Tensor, v: Tensor, loc: Tensor) -> None:
    """Write [T, H, D] each into the slots `loc` of a layer."""
    for pool, scales, new in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
        if scales is None:
            store(pool, new, loc)
        else:
            numbers, new_scales = quantize_heads(new)
            pool.index_copy_(0, loc, numbers)
            scales.index_copy_(0, loc, new_scales)


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H, D] as int8, and [T, H] scales in float32: NaN where a value is not finite, so that NaN propagates."""
    x = x.to(torch.float32)
    top = x.abs().amax(dim=-1)
    factor = torch.where(
        top >= _LEAST_TOP, _MOST_INT8 / top, 0.0
    )  # 127 / top would overflow below `_LEAST_TOP`
    numbers = (x * factor.unsqueeze(-1)).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    scales = torch.where(top >= _LEAST_TOP, top * (1.0 / _MOST_INT8), 0.0)
    return numbers, torch.where(top.isfinite(), scales, torch.nan)


def store(pool: Tensor, new: Tensor, loc: Tensor) -> None:
    """Write [T, H, D] into the slots `loc` of a floating-point pool [slots, H, D]."""
    if new.dtype == pool.dtype:
        pool.index_copy_(0, loc, new)
        return
    most = torch.finfo(pool.dtype).max
    # torch cannot index 8-bit floats on every device; it can index their bytes.
    # In float32, because `most` need not be representable in the narrower of the two types.
    rounded = new.to(torch.float32).clamp(-most, most).to(pool.dtype).view(torch.uint8)
    pool.view(torch.uint8).index_copy_(0, loc, rounded)


# ---------------------------------------------------------------- mixture of experts


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logits = logits.to(torch.float32)
    if routing.scores == "mixer":
        return _mix(logits, routing.mixer_tolerance)
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(dim=-1)
    choice = logits if bias is None and routing.group_best == 1 else scores  # of the same order, without ties
    if bias is not None:
        choice = scores + bias
    if routing.num_active_groups < routing.num_groups:
        by_group = choice.unflatten(-1, (routing.num_groups, choice.shape[1] // routing.num_groups))
        best = by_group.topk(routing.group_best, dim=-1).values.sum(dim=-1)
        groups = best.topk(routing.num_active_groups, dim=-1).indices
        is_active = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        choice = by_group.masked_fill(~is_active.unsqueeze(-1), -torch.inf).flatten(1)
    expert_ids = choice.topk(routing.num_active, dim=-1).indices
    shares = scores.gather(1, expert_ids)
    if routing.normalize:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return shares * routing.scale, expert_ids


def _mix(logits: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """`Routing.scores` "mixer": two experts."""
    ids, shares = [], []
    left = logits
    for _ in range(2):
        most, best = left.max(dim=-1, keepdim=True)
        is_far = (most - logits) / logits.abs().clamp(min=most) > tolerance
        ids.append(best)
        shares.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(shares, dim=1), torch.cat(ids, dim=1)


class ExpertForm:
    """The activation of experts, their biases, and the place of their shares; see `ExpertSource`."""

    def __init__(
        self,
        clamp: ClampedSwiGLU | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
        scales_inputs: bool = False,
        gated: bool = True,
        activation: ExpertActivation = "silu",
    ) -> None:
        self._gated = gated
        self._activate = silu_and_mul if activation == "silu" else gelu_and_mul
        self._clamp = clamp
        self._scales_inputs = scales_inputs
        self._gate_up_bias: Tensor | None = None
        self._down_bias: Tensor | None = None
        if biases is not None:
            self._gate_up_bias, self._down_bias = biases

    @classmethod
    def of(cls, experts: ExpertSource) -> ExpertForm:
        """Take the biases from the source."""
        return cls(experts.clamp, experts.biases(), experts.scales_inputs, experts.gated, experts.activation)

    def rows(self, x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
        """The experts' inputs in the order of experts: x [T, K], shares [T, k], order [R] -> [R, K]."""
        rows = x.index_select(0, order // shares.shape[1])
        return (rows * shares.flatten()[order].unsqueeze(1)).to(x.dtype) if self._scales_inputs else rows

    def activate(self, hidden: Tensor, expert_ids: Tensor) -> Tensor:
        """[R, 2N] (or [R, N] without gates), the expert of each row [R] -> [R, N]."""
        if self._gate_up_bias is not None:
            hidden = hidden + self._gate_up_bias[expert_ids]
        if not self._gated:
            return activate(hidden, "relu2")
        return self._activate(hidden) if self._clamp is None else clamped_swiglu(hidden, self._clamp)

    def add_bias(self, out: Tensor, expert_ids: Tensor) -> Tensor:
        """The bias of down: [R, K], [R] -> [R, K]."""
        return out if self._down_bias is None else out.add_(self._down_bias[expert_ids])

    def combine(self, out: Tensor, order: Tensor, shares: Tensor, x: Tensor) -> Tensor:
        """Scatter the rows sorted by expert back and add up each token's rows, weighted."""
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(x.shape[0], shares.shape[1], -1)
        sums = by_token.to(torch.float32)
        return (sums if self._scales_inputs else sums * shares.unsqueeze(-1)).sum(dim=1).to(x.dtype)


def groups_need_host(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's product of groups on a GPU reads their ends on the host; bfloat16 has a kernel on sm_90."""
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10)


@dataclass(slots=True, eq=False)
class GroupedExperts:
    """One grouped matmul for all experts; the group ends stay on the device."""

    gate_up: Tensor
    down: Tensor
    form: ExpertForm

    def __call__(
        self, x: Tensor, shares: Tensor, expert_ids: Tensor, changes: ExpertChanges | None = None
    ) -> Tensor:
        """Tokens are sorted by expert: each expert multiplies all of its tokens at once."""
        sorted_ids, order = expert_ids.flatten().sort(stable=True)
        rows = self.form.rows(x, shares, order)
        expert_range = torch.arange(self.gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(sorted_ids, expert_range, right=True).to(torch.int32)
        hidden = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        if changes is not None:
            hidden = changes.gate_up.add(rows, hidden, changes.runs)
        hidden = self.form.activate(hidden, sorted_ids)
        out = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        if changes is not None:
            out = changes.down.add(hidden, out, changes.runs)
        return self.form.combine(self.form.add_bias(out, sorted_ids), order, shares, x)


class LoopedExperts:
    """One packed matmul per expert that has tokens. The host must know the counts, so only for the CPU."""

    def __init__(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        form: ExpertForm | None = None,
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._form = form or ExpertForm()

    def __call__(
        self, x: Tensor, shares: Tensor, expert_ids: Tensor, changes: ExpertChanges | None = None
    ) -> Tensor:
        sorted_ids, order = expert_ids.flatten().sort(stable=True)
        rows = self._form.rows(x, shares, order)
        counts = torch.bincount(sorted_ids, minlength=len(self._down)).tolist()
        hidden = _multiplied(self._gate_up, rows, counts)
        if changes is not None:
            hidden = changes.gate_up.add(rows, hidden, changes.runs)
        hidden = self._form.activate(hidden, sorted_ids)
        out = _multiplied(self._down, hidden, counts)
        if changes is not None:
            out = changes.down.add(hidden, out, changes.runs)
        return self._form.combine(self._form.add_bias(out, sorted_ids), order, shares, x)


def _multiplied(weights: Sequence[LinearWeight], rows: Tensor, counts: list[int]) -> Tensor:
    """Each expert's rows times its weight, [R, K] -> [R, N]; `counts`: rows of each."""
    parts = zip(weights, rows.split(counts), counts, strict=True)
    found = [weight(part) for weight, part, count in parts if count] or [weights[0](rows)]
    return torch.cat(found)


def pack_experts(experts: ExpertSource) -> ExpertWeights:
    return GroupedExperts(*experts.stacked(), ExpertForm.of(experts))


def loop_experts(experts: ExpertSource) -> ExpertWeights:
    return LoopedExperts(*experts.linears(), ExpertForm.of(experts))


# ---------------------------------------------------------------- sampling


def argmax(x: Tensor) -> Tensor:
    """Index of the largest value of each row, the first one among equals: [n, V] -> [n] int64."""
    if x.device.type == "cpu":  # numpy is 13 times as fast on one row of 49k, 6 times on 32
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.argmax(dim=-1)


def largest(x: Tensor, k: int) -> Tensor:
    """The k largest values of each row, descending: [n, V] float32 -> [n, k]."""
    if x.device.type == "cpu":  # numpy's AVX-512 sort: 85 us for a row of 49k, torch takes 1,500
        rows = x.numpy()
        if k < rows.shape[1]:
            rows = np.partition(rows, rows.shape[1] - k, axis=-1)[:, -k:]
        return torch.from_numpy(np.sort(rows, axis=-1)[:, ::-1].copy())
    return x.topk(k, dim=-1).values if k < x.shape[1] else x.sort(dim=-1, descending=True).values


def argsort(x: Tensor) -> Tensor:
    """The order of each row, ascending: [n, V] float32 -> [n, V] int64."""
    if x.device.type == "cpu":  # as in `largest`
        return torch.from_numpy(np.argsort(x.numpy(), axis=-1))
    return x.argsort(dim=-1)


def scale(x: Tensor, factor: float) -> Tensor:
    return x.mul_(factor)


def add(x: Tensor, y: Tensor) -> Tensor:
    return y.add_(x)


def add_gated(y: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    return x.copy_(x.to(torch.float32) + gate.sigmoid() * y.to(torch.float32))


def mul_sigmoid(gate: Tensor, x: Tensor) -> Tensor:
    by_gate = x.view(*gate.shape, x.shape[1] // gate.shape[1])
    by_gate.copy_(by_gate.to(torch.float32) * gate.to(torch.float32).sigmoid().unsqueeze(-1))
    return x


def take_rows(table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
    rows = table.index_select(0, indices)
    return rows if scale is None else rows.mul_(scale)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return x.div_(cap).tanh_().mul_(cap)


def to_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()
