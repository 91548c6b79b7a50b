"""The short convolution of each provider against the plain formula, token by token; states and all."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model_runner.states import plain as plain_short_conv
from engine.model_runner.states.state_runs import StateLayout, StateRuns, StateSave, plan_states
from tests.selection import examples

CPU = torch.device("cpu")
ROWS, CHECKPOINTS = 4, 3
LAYOUT = StateLayout(ROWS, CHECKPOINTS)
SOME = settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))


class Step(NamedTuple):
    """One step: [B] lengths before and of it, what begins at a checkpoint, and what is kept."""

    rows: list[int]
    prefix_lens: list[int]
    extend_lens: list[int]
    loads: dict[int, int]
    saves: list[StateSave]

    def runs(self) -> StateRuns:
        columns = (np.array(column, dtype=np.int64) for column in self[:3])
        plan = plan_states(*columns, loads=self.loads, saves=self.saves)
        return StateRuns.of(plan, torch.from_numpy(plan))


@st.composite
def steps(draw: Any) -> Step:
    rows = draw(st.permutations(range(ROWS)))[: draw(st.integers(1, ROWS))]
    prefix_lens = [draw(st.sampled_from([0, 0, 1, 5])) for _ in rows]
    extend_lens = [draw(st.sampled_from([1, 1, 2, 3, 9, 40])) for _ in rows]
    checkpoints = list(range(1, CHECKPOINTS + 1))
    loads, saves = {}, []
    for row, prefix, length in zip(rows, prefix_lens, extend_lens, strict=True):
        if prefix and len(checkpoints) > 2 and draw(st.booleans()):
            loads[row] = LAYOUT.of_checkpoint(checkpoints.pop())
        positions = sorted({draw(st.integers(1, length)) for _ in range(draw(st.integers(0, 2)))})
        saves += [
            StateSave(row, prefix + position, LAYOUT.of_checkpoint(checkpoints.pop()))
            for position in positions[: len(checkpoints)]
        ]
    return Step(rows, prefix_lens, extend_lens, loads, saves)


def reference(
    step: Step, bcx: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """Token by token, request by request, in float64 where nothing is rounded; moves the states."""
    out = torch.empty(len(bcx), weight.shape[1], dtype=torch.float64)
    at = 0
    for row, prefix, length in zip(step.rows, step.prefix_lens, step.extend_lens, strict=True):
        slot = row + 1 if prefix else 0
        if row in step.loads:
            slot = step.loads[row]
        columns = list(slots[slot].clone())
        for position in range(prefix + 1, prefix + length + 1):
            b, c, x = bcx[at].chunk(3)
            columns = [*columns, b * x]
            total = sum(w.double() * column.double() for w, column in zip(weight, columns, strict=True))
            out[at] = (total if bias is None else total + bias.double()) * c.double()
            columns, at = columns[1:], at + 1
            for save in step.saves:
                if (save.row, save.position) == (row, position):
                    slots[save.slot] = torch.stack(columns)
        slots[row + 1] = torch.stack(columns)
    return out


def check(
    op: Any,
    step: Step,
    *,
    size: int,
    taps: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    """The op's output and states are those of `reference`."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    bcx, weight = random(sum(step.extend_lens), 3 * size), random(taps, size)
    slots = random(LAYOUT.num_slots, taps - 1, size)
    slots[0] = 0
    added = random(size) if bias else None
    expected_slots = slots.clone()
    expected = reference(step, bcx, weight, added, expected_slots)

    runs, moved = step.runs(), slots.to(device)
    on_device = None if added is None else added.to(device)
    out = op(
        bcx.to(device), weight.to(device), on_device, moved, replace(runs, plan=runs.plan.to(device))
    ).cpu()
    slots = moved.cpu()

    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=rounding * taps)
    assert torch.equal(slots, expected_slots)
    assert not slots[0].any()


DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {
    "step": steps(),
    "size": st.sampled_from([1, 16, 48, 70, 160]),
    "taps": st.sampled_from([2, 3, 4, 7]),
    "bias": st.booleans(),
    "dtype": st.sampled_from(DTYPES),
}


@SOME
@given(**SHAPES)
def test_plain(step, size, taps, bias, dtype):
    check(plain_short_conv.short_conv, step, size=size, taps=taps, bias=bias, dtype=dtype)


@SOME
@given(**SHAPES)
def test_native(step, size, taps, bias, dtype):
    from engine.model_runner.kernels.cpu.library import load_library
    from engine.model_runner.kernels.native_states import NativeStateOps

    check(NativeStateOps(load_library()).short_conv, step, size=size, taps=taps, bias=bias, dtype=dtype)


def test_the_plan_of_plain_decodes_has_one_run_each():
    step = Step([2, 0], [7, 0], [1, 1], {}, [])
    assert step.runs().plan.tolist() == [2, 3, 0, 1, 3, 0, 1, 2, 1]


def test_a_checkpoint_at_the_end_is_a_copy():
    step = Step([1], [4], [4], {}, [StateSave(1, 8, 7)])
    assert [tuple(run) for run in step.runs().on_host()] == [(2, 0, 4, 7), (7, 4, 4, 2)]


def test_saves_of_other_rounds_are_not_of_this_step():
    saves = [StateSave(0, 9, 1), StateSave(3, 5, 2), StateSave(0, 7, 3)]
    step = Step([0], [7], [1], {}, saves)
    assert [tuple(run) for run in step.runs().on_host()] == [(1, 0, 1, 1)]
