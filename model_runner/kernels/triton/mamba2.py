"""Mamba 2 in Triton, token by token; see `Mamba2Op`.

Three kernels: the convolution of x, B and C (`state_conv`); the scan of the heads' states, each program with some
columns of one head in registers; and the norm of the gated answers, a program for each token and group. See `runs` for
the programs of the first two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"
# Triton kernels: arguments have no type annotations, and branches on `tl.constexpr` values are taken at compile time.

# Shapes: see `Mamba2Op`.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel_variant import KernelVariant
from .runs import first_run, next_slot, num_programs, run_at
from .state_conv import convolve

if TYPE_CHECKING:
    from ...states.state_runs import LayerStates, StateRuns
    from ...states.state_weights import MambaWeights

_COLUMNS: Final = 16  # of a head's state, in registers of one program; with 32, sm_90 spills
_MANY: Final = 2048  # elements of a group from which on its norm takes more warps


@triton.jit
def _scan_kernel(
    mixed_ptr,
    zxbcdt_ptr,
    decay_ptr,
    dt_bias_ptr,
    skip_ptr,
    states_ptr,
    plan_ptr,
    num_heads,
    heads_per_group,
    size,
    row_size,
    inner,
    group_size,
    state_dim,
    head_dim,
    least_step,
    most_step,
    NUMBERS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    run, num_runs, slot = first_run(plan_ptr)
    if slot < 0:
        return
    head = tl.program_id(1)
    numbers = tl.arange(0, NUMBERS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    has_number, has_column = numbers < state_dim, columns < head_dim
    inside = has_number[:, None] & has_column[None, :]
    places = head * state_dim * head_dim + numbers[:, None] * head_dim + columns[None, :]
    slot_size = num_heads * state_dim * head_dim
    of_x = head * head_dim + columns
    of_b = inner + (head // heads_per_group) * state_dim + numbers
    rate = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    state = tl.load(states_ptr + slot * slot_size + places, mask=inside, other=0.0)
    goes_on = run < num_runs
    while goes_on:
        first, last, store = run_at(plan_ptr, run)
        for token in range(first, last):
            row_ptr = mixed_ptr + token * size
            x = tl.load(row_ptr + of_x, mask=has_column, other=0.0)
            b = tl.load(row_ptr + of_b, mask=has_number, other=0.0)
            c = tl.load(row_ptr + group_size + of_b, mask=has_number, other=0.0)
            dt = tl.load(zxbcdt_ptr + token * row_size + inner + size + head).to(tl.float32) + dt_bias
            step = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
            step = tl.minimum(tl.maximum(step, least_step), most_step)
            state = state * tl.exp(rate * step) + b[:, None] * (x * step)[None, :]
            answer = tl.sum(state * c[:, None], axis=0) + skip * x
            tl.store(row_ptr + of_x, answer, mask=has_column)
        tl.store(states_ptr + store * slot_size + places, state, mask=inside)
        run += 1
        slot = next_slot(plan_ptr, run, num_runs)
        goes_on = slot == store


@triton.jit
def _finish_kernel(
    mixed_ptr,
    zxbcdt_ptr,
    norm_ptr,
    out_ptr,
    size,
    row_size,
    inner,
    width,
    eps,
    HAS_NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    exists = columns < width
    place = group * width + columns
    y = tl.load(mixed_ptr + token * size + place, mask=exists, other=0.0)
    z = tl.load(zxbcdt_ptr + token * row_size + place, mask=exists, other=0.0).to(tl.float32)
    result = y * z * tl.sigmoid(z)
    if HAS_NORM:
        weight = tl.load(norm_ptr + place, mask=exists, other=0.0)
        result = result * tl.rsqrt(tl.sum(result * result) / width + eps) * weight
    tl.store(out_ptr + token * inner + place, result.to(out_ptr.dtype.element_ty), mask=exists)


def mamba2(zxbcdt: Tensor, weights: MambaWeights, states: LayerStates, runs: StateRuns) -> Tensor:
    """The grids depend on shapes only where the runs are not on the host."""
    recurrent, norm = states.recurrent, weights.norm
    assert recurrent is not None
    zxbcdt = zxbcdt.contiguous()
    _, num_heads, state_dim, head_dim = recurrent.shape
    (num_tokens, row_size), size, inner = zxbcdt.shape, weights.taps.shape[1], num_heads * head_dim
    out = torch.empty(
        (num_tokens, inner), dtype=torch.float32 if norm is None else zxbcdt.dtype, device=zxbcdt.device
    )
    num_runs = num_programs(runs)
    if not num_runs:
        return out
    mixed = convolve(zxbcdt, inner, weights.taps, weights.bias, states.conv, runs)
    _scan_kernel[(num_runs, num_heads, triton.cdiv(head_dim, _COLUMNS))](
        mixed,
        zxbcdt,
        weights.decay,
        weights.dt_bias,
        weights.skip,
        recurrent,
        runs.plan,
        num_heads,
        num_heads // weights.num_groups,
        size,
        row_size,
        inner,
        weights.num_groups * state_dim,
        state_dim,
        head_dim,
        weights.least_step,
        weights.most_step,
        NUMBERS=triton.next_power_of_2(state_dim),
        COLUMNS=_COLUMNS,
    )
    width = inner // weights.num_groups
    if num_tokens:
        _finish_kernel[(num_tokens, weights.num_groups)](
            mixed,
            zxbcdt,
            mixed if norm is None else norm,
            out,
            size,
            row_size,
            inner,
            width,
            weights.eps,
            HAS_NORM=norm is not None,
            COLUMNS=triton.next_power_of_2(width),
            num_warps=8 if width > _MANY else 4,
        )
    return out


def variants() -> list[KernelVariant]:
    sizes = ("size", "inner", "group_size", "state_dim", "head_dim", "num_heads")
    return [
        KernelVariant(
            "mamba2 scan bf16 128x64",
            _scan_kernel,
            {
                "mixed_ptr": "*fp32",
                "zxbcdt_ptr": "*bf16",
                **dict.fromkeys(("decay_ptr", "dt_bias_ptr", "skip_ptr", "states_ptr"), "*fp32"),
                "plan_ptr": "*i64",
                **dict.fromkeys((*sizes, "row_size", "heads_per_group"), "i32:16"),
                **dict.fromkeys(("least_step", "most_step"), "fp32"),
            },
            {"NUMBERS": 128, "COLUMNS": _COLUMNS},
        ),
        *(
            KernelVariant(
                f"mamba2 norm bf16 {width}",
                _finish_kernel,
                {
                    **dict.fromkeys(("mixed_ptr", "norm_ptr"), "*fp32"),
                    **dict.fromkeys(("zxbcdt_ptr", "out_ptr"), "*bf16"),
                    **dict.fromkeys(("size", "row_size", "inner", "width"), "i32:16"),
                    "eps": "fp32",
                },
                {"HAS_NORM": True, "COLUMNS": triton.next_power_of_2(width)},
                num_warps,
            )
            for width, num_warps in ((1024, 4), (8192, 8))
        ),
    ]
