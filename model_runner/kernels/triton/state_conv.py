"""The convolutions of state layers in Triton, which move their states: `ShortConvOp`, and the one before a recurrence.

A program computes some channels of one request's tokens, see `runs`. The two differ in their inputs (B * x, or the
channels themselves) and in what becomes of the sums (times C, or silu).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, K channels, L taps, S slots.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_variant import KernelVariant
from .runs import first_run, next_slot, num_programs, run_at

if TYPE_CHECKING:
    from ...states.state_runs import StateRuns

_CHANNELS: Final = 64
_TOKENS: Final = 32  # of a tile, for prompts


@triton.jit
def _input(row_ptr, size, inside, GATED: tl.constexpr):
    """The channels of tokens as a state holds them; GATED: B * x, rounded."""
    x = tl.load(row_ptr + 2 * size if GATED else row_ptr, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(row_ptr, mask=inside, other=0.0).to(tl.float32)
        x = (gate * x.to(tl.float32)).to(row_ptr.dtype.element_ty)
    return x


@triton.jit
def _convolve_kernel(
    inputs_ptr,
    taps_ptr,
    bias_ptr,
    slots_ptr,
    plan_ptr,
    out_ptr,
    offset,
    size,
    row_size,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    run, num_runs, slot = first_run(plan_ptr)
    if slot < 0:
        return
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channels < size
    of_channels = inputs_ptr + offset + channels
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
                is_new = source >= first
                new = _input(of_channels[None, :] + source * row_size, size, inside & is_new, GATED)
                column = kept + source - first  # of the state, if the token is before the run
                old = tl.load(
                    state_ptr + column * size + channels[None, :], mask=inside & (source < first), other=0.0
                )
                weight = tl.load(taps_ptr + tap * size + channels, mask=exists, other=0.0).to(tl.float32)
                sums += weight[None, :] * tl.where(is_new, new, old).to(tl.float32)
            if GATED:
                gate_at = of_channels[None, :] + tokens * row_size + size
                out = sums * tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
            else:
                out = sums * tl.sigmoid(sums)
            out_at = out_ptr + tokens * size + channels[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # other threads may still read the state
        new_ptr = slots_ptr + store * kept * size
        for column in tl.static_range(TAPS - 1):
            # In ascending order: a column is written before only if it is not read any more.
            source = last - (TAPS - 1) + column
            is_new = source >= first
            new = _input(of_channels + source * row_size, size, exists & is_new, GATED)
            old = tl.load(
                state_ptr + (kept + source - first) * size + channels,
                mask=exists & (source < first),
                other=0.0,
            )
            tl.store(new_ptr + column * size + channels, tl.where(is_new, new, old), mask=exists)
        tl.debug_barrier()  # the next run reads what this one has stored
        run += 1
        slot = next_slot(plan_ptr, run, num_runs)
        goes_on = slot == store


def convolve(
    inputs: Tensor, offset: int, taps: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns
) -> Tensor:
    """silu of the convolution of [T, ...], of which the K channels are those from `offset` on -> [T, K] float32.

    Args:
        taps: [L, K], that of the newest token last.
        bias: [K].
        slots: [S, L - 1, K]; all in one dtype.
    """
    mixed = torch.empty((len(inputs), taps.shape[1]), dtype=torch.float32, device=inputs.device)
    return _launched(inputs, offset, taps, bias, slots, runs, mixed, is_gated=False)


def short_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns) -> Tensor:
    """The grid depends on shapes only where the runs are not on the host."""
    bcx = bcx.contiguous()
    out = torch.empty((len(bcx), weight.shape[1]), dtype=bcx.dtype, device=bcx.device)
    return _launched(bcx, 0, weight, bias, slots, runs, out, is_gated=True)


def _launched(
    inputs: Tensor,
    offset: int,
    taps: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    runs: StateRuns,
    out: Tensor,
    *,
    is_gated: bool,
) -> Tensor:
    num_taps, size = taps.shape
    num_runs = num_programs(runs)
    is_prompt = len(inputs) > num_runs
    if num_runs:
        _convolve_kernel[(num_runs, triton.cdiv(size, _CHANNELS))](
            inputs,
            taps,
            taps if bias is None else bias,
            slots,
            runs.plan,
            out,
            offset,
            size,
            inputs.shape[1],
            GATED=is_gated,
            HAS_BIAS=bias is not None,
            TAPS=num_taps,
            TOKENS=_TOKENS if is_prompt else 1,
            CHANNELS=_CHANNELS,
            num_warps=4 if is_prompt else 1,
        )
    return out


def variants() -> list[KernelVariant]:
    signature = {
        **dict.fromkeys(("inputs_ptr", "taps_ptr", "bias_ptr", "slots_ptr"), "*bf16"),
        "plan_ptr": "*i64",
        **dict.fromkeys(("offset", "size", "row_size"), "i32:16"),
    }
    return [
        KernelVariant(
            f"{name} bf16, tiles of {tokens}",
            _convolve_kernel,
            signature | {"out_ptr": "*bf16" if is_gated else "*fp32"},
            {
                "GATED": is_gated,
                "HAS_BIAS": not is_gated,
                "TAPS": num_taps,
                "TOKENS": tokens,
                "CHANNELS": _CHANNELS,
            },
            num_warps,
        )
        for name, is_gated, num_taps in (("state_conv", False, 4), ("short_conv", True, 3))
        for tokens, num_warps in ((1, 1), (_TOKENS, 4))
    ]
