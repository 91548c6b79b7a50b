"""The convolution before a recurrent state in Triton, with silu; it moves its states. See `runs` for the programs."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: T tokens, K channels, L taps, S slots.

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
def _convolve_kernel(
    inputs_ptr,
    taps_ptr,
    bias_ptr,
    slots_ptr,
    plan_ptr,
    mixed_ptr,
    offset,
    size,
    row_size,
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
                new = tl.load(of_channels[None, :] + source * row_size, mask=inside & is_new, other=0.0)
                column = kept + source - first  # of the state, if the token is before the run
                old = tl.load(
                    state_ptr + column * size + channels[None, :], mask=inside & (source < first), other=0.0
                )
                weight = tl.load(taps_ptr + tap * size + channels, mask=exists, other=0.0).to(tl.float32)
                sums += weight[None, :] * tl.where(is_new, new, old).to(tl.float32)
            tl.store(mixed_ptr + tokens * size + channels[None, :], sums * tl.sigmoid(sums), mask=inside)
        tl.debug_barrier()  # other threads may still read the state
        new_ptr = slots_ptr + store * kept * size
        for column in tl.static_range(TAPS - 1):
            # In ascending order: a column is written before only if it is not read any more.
            source = last - (TAPS - 1) + column
            is_new = source >= first
            new = tl.load(of_channels + source * row_size, mask=exists & is_new, other=0.0)
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
    """[T, ...], of which the K channels are those from `offset` on -> [T, K] float32.

    Args:
        taps: [L, K], that of the newest token last.
        bias: [K].
        slots: [S, L - 1, K]; all in one dtype.
    """
    num_taps, size = taps.shape
    num_tokens, row_size = inputs.shape
    num_runs = num_programs(runs)
    is_prompt = num_tokens > num_runs
    mixed = torch.empty((num_tokens, size), dtype=torch.float32, device=inputs.device)
    _convolve_kernel[(num_runs, triton.cdiv(size, _CHANNELS))](
        inputs,
        taps,
        taps if bias is None else bias,
        slots,
        runs.plan,
        mixed,
        offset,
        size,
        row_size,
        HAS_BIAS=bias is not None,
        TAPS=num_taps,
        TOKENS=_TOKENS if is_prompt else 1,
        CHANNELS=_CHANNELS,
        num_warps=4 if is_prompt else 1,
    )
    return mixed


def variants() -> list[KernelVariant]:
    signature = {
        **dict.fromkeys(("inputs_ptr", "taps_ptr", "bias_ptr", "slots_ptr"), "*bf16"),
        "plan_ptr": "*i64",
        "mixed_ptr": "*fp32",
        **dict.fromkeys(("offset", "size", "row_size"), "i32:16"),
    }
    return [
        KernelVariant(
            f"state_conv bf16, tiles of {tokens}",
            _convolve_kernel,
            signature,
            {"HAS_BIAS": True, "TAPS": 4, "TOKENS": tokens, "CHANNELS": _CHANNELS},
            num_warps,
        )
        for tokens, num_warps in ((1, 1), (_TOKENS, 4))
    ]
