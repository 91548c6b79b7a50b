"""The gated short convolution of state layers in Triton; see `ShortConvOp`.

A program computes some channels of one request's tokens, see `runs`.
"""

# Shapes: see `ShortConvOp`.

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compile_report import KernelVariant
from .runs import first_slot, next_slot, num_programs, run_at

if TYPE_CHECKING:
    from ...states.state_runs import StateRuns

_CHANNELS: Final = 64
_TOKENS: Final = 32  # of a tile, for prompts


@triton.jit
def _inputs(bcx_ptr, token, channel, size, inside):
    """B * x, rounded as in a state."""
    row = bcx_ptr + token * 3 * size + channel
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(row + 2 * size, mask=inside, other=0.0).to(tl.float32)
    return (gate * x).to(bcx_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _short_conv_kernel(
    bcx_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    plan_ptr,
    out_ptr,
    size,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64)
    num_runs = tl.load(plan_ptr)
    slot = first_slot(plan_ptr, run, num_runs)
    if slot < 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channels < size
    kept: tl.constexpr = TAPS - 1
    goes_on = run < num_runs
    while goes_on:
        first, last, store = run_at(plan_ptr, run)
        state_ptr = slots_ptr + slot * kept * size
        for start in range(first, last, TOKENS):
            tokens = (start + tl.arange(0, TOKENS))[:, None]
            inside = (tokens < last) & exists[None, :]
            sums = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
            if HAS_BIAS:
                sums += tl.load(bias_ptr + channels, mask=exists, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(TAPS):
                source = tokens - (TAPS - 1) + tap
                new = _inputs(bcx_ptr, source, channels[None, :], size, inside & (source >= first))
                column = kept + source - first  # of the state, if the token is before the run
                old = tl.load(
                    state_ptr + column * size + channels[None, :], mask=inside & (source < first), other=0.0
                ).to(tl.float32)
                weight = tl.load(weight_ptr + tap * size + channels, mask=exists, other=0.0).to(tl.float32)
                sums += weight[None, :] * tl.where(source >= first, new, old)
            gate = tl.load(bcx_ptr + tokens * 3 * size + size + channels[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
            out = (sums * gate).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + tokens * size + channels[None, :], out, mask=inside)
        tl.debug_barrier()  # other threads may still read the state
        new_ptr = slots_ptr + store * kept * size
        for column in tl.static_range(TAPS - 1):
            # In ascending order: a column is written before only if it is not read any more.
            source = last - (TAPS - 1) + column
            is_new = source >= first
            new = _inputs(bcx_ptr, source, channels, size, exists & is_new)
            old = tl.load(
                state_ptr + (kept + source - first) * size + channels,
                mask=exists & (source < first),
                other=0.0,
            ).to(tl.float32)
            value = tl.where(is_new, new, old).to(slots_ptr.dtype.element_ty)
            tl.store(new_ptr + column * size + channels, value, mask=exists)
        tl.debug_barrier()  # the next run reads what this one has stored
        run += 1
        slot = next_slot(plan_ptr, run, num_runs)
        goes_on = slot == store


def short_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns) -> Tensor:
    """The grid depends on shapes only where the runs are not on the host."""
    num_taps, size = weight.shape
    bcx = bcx.contiguous()
    out = torch.empty((bcx.shape[0], size), dtype=bcx.dtype, device=bcx.device)
    num_runs = num_programs(runs)
    if num_runs:
        _short_conv_kernel[(num_runs, triton.cdiv(size, _CHANNELS))](
            bcx,
            weight,
            weight if bias is None else bias,
            slots,
            runs.plan,
            out,
            size,
            HAS_BIAS=bias is not None,
            TAPS=num_taps,
            TOKENS=_TOKENS if bcx.shape[0] > num_runs else 1,
            CHANNELS=_CHANNELS,
            num_warps=4 if bcx.shape[0] > num_runs else 1,
        )
    return out


def variants() -> list[KernelVariant]:
    signature = {
        **dict.fromkeys(("bcx_ptr", "weight_ptr", "bias_ptr", "slots_ptr"), "*bf16"),
        "plan_ptr": "*i64",
        "out_ptr": "*bf16",
        "size": "i32:16",
    }
    return [
        KernelVariant(
            f"short_conv bf16, tiles of {tokens}",
            _short_conv_kernel,
            signature,
            {"HAS_BIAS": False, "TAPS": 3, "TOKENS": tokens, "CHANNELS": _CHANNELS},
            num_warps,
        )
        for tokens, num_warps in ((1, 1), (_TOKENS, 4))
    ]
