"""The runs of a step in Triton, see `state_runs`: which of them a program computes.

A program computes one request's tokens: of the run that begins them, and of the runs that go on where the one before
has stored its state. So no program reads what another one writes, and the number of runs may stay on the device:
programs beyond it end at once.

    run, num_runs, slot = first_run(plan_ptr)
    if slot < 0:
        return
    goes_on = run < num_runs
    while goes_on:
        first, last, store = run_at(plan_ptr, run)
        ...
        run += 1
        slot = next_slot(plan_ptr, run, num_runs)
        goes_on = slot == store
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton kernels: arguments have no type annotations.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from ...states.state_runs import StateRuns

_WORDS: Final = 4  # of a run


def num_programs(runs: StateRuns) -> int:
    """At least one for each run; it depends on shapes only where the runs are not on the host."""
    return len(runs.runs) or (len(runs.plan) - 1) // _WORDS


@triton.jit
def first_run(plan_ptr):
    """A program's first run, the number of all runs, and the slot from which it starts.

    -1: there is no such run, or another program computes it.
    """
    run = tl.program_id(0).to(tl.int64)
    num_runs = tl.load(plan_ptr)
    exists = run < num_runs
    slot = tl.load(plan_ptr + 1 + 4 * run, mask=exists, other=-1)
    before = tl.load(plan_ptr + 4 * run, mask=exists & (run > 0), other=-1)  # where the run before stores
    return run, num_runs, tl.where(before == slot, -1, slot)


@triton.jit
def run_at(plan_ptr, run):
    """The first token of a run, the one after its last, and the slot to which its state goes."""
    place = plan_ptr + 2 + 4 * run
    return tl.load(place), tl.load(place + 1), tl.load(place + 2)


@triton.jit
def next_slot(plan_ptr, run, num_runs):
    """The slot from which a later run starts; -1: there is none."""
    return tl.load(plan_ptr + 1 + 4 * run, mask=run < num_runs, other=-1)
