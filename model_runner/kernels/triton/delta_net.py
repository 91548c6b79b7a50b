"""The gated delta net of state layers in Triton, token by token; see `GatedDeltaOp`.

Three kernels: the convolution of q, k and v (`state_conv`); the correction of the heads' states, each program with some
columns of one head in registers; and the gated norm of what heads return. See `runs` for the programs of the first two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: see `GatedDeltaOp`.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import first_run, next_slot, num_programs, run_at
from .state_conv import convolve

if TYPE_CHECKING:
    from ...states.state_runs import LayerStates, StateRuns
    from ...states.state_weights import DeltaWeights

_COLUMNS: Final = 32  # of a head's state, in registers of one program
_NORM_EPS: Final = tl.constexpr(1e-6)  # of the lengths of q and k


@triton.jit
def _correct_kernel(
    mixed_ptr,
    ba_ptr,
    decay_ptr,
    dt_bias_ptr,
    states_ptr,
    plan_ptr,
    num_heads,
    heads_per_key,
    size,
    key_size,
    key_dim,
    value_dim,
    scale,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    run, num_runs, slot = first_run(plan_ptr)
    if slot < 0:
        return
    head = tl.program_id(1)
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    has_key, has_column = keys < key_dim, columns < value_dim
    inside = has_key[:, None] & has_column[None, :]
    places = head * key_dim * value_dim + keys[:, None] * value_dim + columns[None, :]
    slot_size = num_heads * key_dim * value_dim
    of_query = (head // heads_per_key) * key_dim + keys
    of_value = 2 * key_size + head * value_dim + columns
    rate = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    state = tl.load(states_ptr + slot * slot_size + places, mask=inside, other=0.0)
    goes_on = run < num_runs
    while goes_on:
        first, last, store = run_at(plan_ptr, run)
        for token in range(first, last):
            row_ptr = mixed_ptr + token * size
            q = tl.load(row_ptr + of_query, mask=has_key, other=0.0)
            k = tl.load(row_ptr + key_size + of_query, mask=has_key, other=0.0)
            v = tl.load(row_ptr + of_value, mask=has_column, other=0.0)
            q = q * (scale * tl.rsqrt(tl.sum(q * q) + _NORM_EPS))
            k = k * tl.rsqrt(tl.sum(k * k) + _NORM_EPS)
            b = tl.load(ba_ptr + token * 2 * num_heads + head).to(tl.float32)
            a = tl.load(ba_ptr + token * 2 * num_heads + num_heads + head).to(tl.float32) + dt_bias
            grown = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            state = state * tl.exp(rate * grown)
            delta = tl.sigmoid(b) * (v - tl.sum(state * k[:, None], axis=0))
            state = state + k[:, None] * delta[None, :]
            tl.store(row_ptr + of_value, tl.sum(state * q[:, None], axis=0), mask=has_column)
        tl.store(states_ptr + store * slot_size + places, state, mask=inside)
        run += 1
        slot = next_slot(plan_ptr, run, num_runs)
        goes_on = slot == store


@triton.jit
def _finish_kernel(
    mixed_ptr,
    qkvz_ptr,
    norm_ptr,
    out_ptr,
    num_heads,
    size,
    row_size,
    before_values,
    value_dim,
    eps,
    COLUMNS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    exists = columns < value_dim
    place = head * value_dim + columns
    x = tl.load(mixed_ptr + token * size + before_values + place, mask=exists, other=0.0)
    z = tl.load(qkvz_ptr + token * row_size + size + place, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + columns, mask=exists, other=0.0)
    normalized = x * tl.rsqrt(tl.sum(x * x) / value_dim + eps) * weight
    result = (normalized * z * tl.sigmoid(z)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * num_heads * value_dim + place, result, mask=exists)


def gated_delta(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: LayerStates, runs: StateRuns
) -> Tensor:
    """The grids depend on shapes only where the runs are not on the host."""
    recurrent = states.recurrent
    assert recurrent is not None
    qkvz, ba = qkvz.contiguous(), ba.contiguous()
    size = weights.taps.shape[1]
    _, num_heads, key_dim, value_dim = recurrent.shape
    num_tokens, row_size = qkvz.shape
    key_size = weights.num_key_heads * key_dim
    out = torch.empty((num_tokens, num_heads * value_dim), dtype=qkvz.dtype, device=qkvz.device)
    num_runs = num_programs(runs)
    if not num_runs:
        return out
    mixed = convolve(qkvz, 0, weights.taps, None, states.conv, runs)
    _correct_kernel[(num_runs, num_heads, triton.cdiv(value_dim, _COLUMNS))](
        mixed,
        ba,
        weights.decay,
        weights.dt_bias,
        recurrent,
        runs.plan,
        num_heads,
        num_heads // weights.num_key_heads,
        size,
        key_size,
        key_dim,
        value_dim,
        key_dim**-0.5,
        KEYS=triton.next_power_of_2(key_dim),
        COLUMNS=_COLUMNS,
    )
    if num_tokens:
        _finish_kernel[(num_tokens, num_heads)](
            mixed,
            qkvz,
            weights.norm,
            out,
            num_heads,
            size,
            row_size,
            2 * key_size,
            value_dim,
            weights.eps,
            COLUMNS=triton.next_power_of_2(value_dim),
            num_warps=1,
        )
    return out
