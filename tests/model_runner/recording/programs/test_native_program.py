"""Programs against the calls that they were recorded from, on any number of threads; and what cannot be recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels.cpu.library import load_library, reasons_against_library
from engine.model_runner.kernels.native import NativeOps
from engine.model_runner.kernels.native_linear import NativeLinear
from engine.model_runner.recording.programs.arena import Arena
from engine.model_runner.recording.programs.native_program import NativeProgram, record

BF16 = torch.bfloat16
ROWS, SIZE = 40, 576


@pytest.fixture
def ops() -> NativeOps:
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    return NativeOps(load_library())


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def recorded(
    library: ctypes.CDLL, arena: Arena, compute: Callable[[], Tensor]
) -> tuple[Tensor, NativeProgram]:
    result, program, reason = record(library, arena, compute)
    assert program is not None, reason
    return result, program


def chain(ops: NativeOps, x: Tensor, num: int) -> Callable[[], Tensor]:
    """Many calls of all kinds, each on what the one before has made, in memory that is used again and again."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        NativeLinear(load_library(), torch.randn(2 * SIZE, SIZE, generator=generator).to(BF16) / SIZE**0.5)
        for _ in range(3)
    ]
    norm = torch.ones(SIZE, dtype=BF16)

    def compute() -> Tensor:
        y = ops.rms_norm(x, norm, 1e-5)
        for n in range(num):
            out = ops.silu_and_mul(weights[n % 3](y))
            y, _ = ops.add_rms_norm(out, y, norm, 1e-5)
        return ops.to_float32(y)

    return compute


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_a_program_does_what_was_recorded(ops, threads, num_threads):
    """More threads than cores, too: some are late then, and the others do their work."""
    threads(num_threads)
    x = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1)).to(BF16)
    compute, arena = chain(ops, x, 12), Arena()
    with torch.inference_mode():
        out, program = recorded(load_library(), arena, compute)
        first = out.clone()
        assert torch.equal(first, compute())
        for seed in range(10):
            x.copy_(torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(seed)))
            arena.fill(0xFF)  # NaN for whoever reads what an earlier run has left
            program.run()
            assert torch.equal(out, compute()), seed
        assert not torch.equal(out, first)
    assert program.num_calls == 2 + 3 * 12


def test_programs_of_one_arena_take_turns(ops):
    arena, library = Arena(), load_library()
    xs = [torch.randn(rows, SIZE).to(BF16) for rows in (1, 7)]
    norm = torch.ones(SIZE, dtype=BF16)

    def normed(x: Tensor) -> Tensor:
        wide: Tensor = ops.to_float32(ops.rms_norm(x, norm, 1e-5))
        return wide

    with torch.inference_mode():
        made = [recorded(library, arena, partial(normed, x)) for x in xs]
        for n in (0, 1, 1, 0, 1, 0):
            out, program = made[n]
            program.run()
            assert torch.equal(out, ops.rms_norm(xs[n], norm, 1e-5).float())
    assert arena.num_bytes == 1 << 20


def test_views_are_no_part_of_a_program(ops):
    table = torch.randn(30, 4, 16)
    with torch.inference_mode():
        indices = torch.tensor([3, 1, 0])
        out, program = recorded(
            load_library(), Arena(), lambda: ops.take_rows(table.view(-1, 64)[2:], indices[:2])[1:].view(-1)
        )
    assert program.num_calls == 1
    assert torch.equal(out, table.view(-1, 64)[3])


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: x + 1, "aten.add.Tensor"),
        (lambda x: x.mul_(2), "aten.mul_.Tensor"),
        (lambda x: x.t().contiguous(), "aten.contiguous.default"),
        (lambda x: x.t().reshape(-1), "aten.reshape.default"),
        (lambda x: x.to(BF16), "aten.to.dtype"),
        (lambda x: torch.tensor([3.0]), "aten.lift_fresh.default"),
        (lambda x: torch.from_numpy(x.numpy()), "aten.lift_fresh.default"),
        (lambda x: x.new_zeros(3), "aten.new_zeros.default"),
        (lambda x: x.new_empty(3).fill_(x[0, 0].item()), "aten.item.default"),
    ],
)
def test_an_operation_of_torch_cannot_be_recorded(ops, operation, name):
    x = torch.randn(4, 6)
    with torch.inference_mode():
        result, program, reason = record(load_library(), Arena(), lambda: operation(x))
    assert program is None and name in reason
    assert result.numel(), "it has been computed all the same"


def test_a_function_that_is_not_made_for_teams_cannot_be_recorded(ops):
    weight = torch.ones(16, 16, dtype=BF16)
    with torch.inference_mode():
        _, program, reason = record(
            load_library(), Arena(), lambda: NativeLinear(load_library(), weight)._packed
        )
    assert (program, reason) == (None, "pack_linear of the library")


def test_after_a_recording_nobody_is_told_and_memory_is_torch_s_again(ops):
    x, arena = torch.randn(2, 64), Arena()
    norm = torch.ones(64)

    def failing() -> Tensor:
        raise ZeroDivisionError

    with torch.inference_mode():
        _, program = recorded(load_library(), arena, lambda: ops.rms_norm(x, norm, 1e-5))
        with pytest.raises(ZeroDivisionError):
            record(load_library(), arena, failing)
        eager = ops.rms_norm(x, norm, 1e-5)
        with pytest.raises(AssertionError, match="not of this arena"):
            arena.borrowed(eager)
    assert program.num_calls == 1
