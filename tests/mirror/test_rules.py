"""The rules of the mirror that no planted fault of the product shows."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from .device_tensor import host_of
from .memory import RED_ZONE
from .mirror import Mirror, mirror_device

CUDA = torch.device("cuda")


def kinds(mirror: Mirror) -> list[str]:
    return [fault.kind for fault in mirror.faults.take()]


@pytest.fixture
def mirror():
    with mirror_device(triton=False) as mirror:
        mirror.faults.serving = True
        yield mirror


def test_new_memory_is_poison_until_the_host_waits(mirror):
    zeros = torch.zeros(3, device=CUDA)
    empty = torch.empty((2, 2), dtype=torch.bfloat16, device=CUDA)
    assert torch.isnan(host_of(zeros)).all() and torch.isnan(host_of(empty)).all()
    torch.cuda.synchronize()
    assert host_of(zeros).tolist() == [0, 0, 0] and torch.isnan(host_of(empty)).all()
    assert kinds(mirror) == ["wait"]


@pytest.mark.parametrize(("offset", "side"), [(-1, "before"), (0, "after"), (RED_ZONE // 8 - 1, "after")])
def test_a_write_outside_an_allocation_is_noticed(mirror, offset, side):
    tensor = torch.zeros(5, dtype=torch.int64, device=CUDA)
    start = offset if offset < 0 else 5 + offset
    memory = (ctypes.c_int64 * 1).from_address(tensor.data_ptr() + 8 * start)
    memory[0] = 7
    mirror.memory.check()
    (fault,) = mirror.faults.take()
    assert fault.kind == "red zone" and side in fault.detail


def test_a_red_zone_is_looked_at_when_the_memory_is_freed(mirror):
    tensor = torch.zeros(5, dtype=torch.uint8, device=CUDA)
    (ctypes.c_uint8 * 1).from_address(tensor.data_ptr() + 5)[0] = 7
    mirror.streams.run_all()
    del tensor
    assert kinds(mirror) == ["red zone"]


def test_a_planted_failure_is_the_n_th_allocation(mirror):
    with mirror.memory.failing_at(1) as failed:
        kept = torch.empty(3, device=CUDA)
        assert not failed
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            torch.zeros(3, device=CUDA)
    assert failed and len(torch.empty(3, device=CUDA)) == len(kept)


def test_memory_runs_out(mirror):
    before = torch.cuda.mem_get_info()[0]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(before + 1, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.mem_get_info()[0] == before
    tensor = torch.empty(before, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.mem_get_info()[0] == 0
    del tensor
    assert torch.cuda.mem_get_info()[0] == before


def test_a_result_of_another_form_than_promised_is_noticed(mirror):
    with torch.library._scoped_library("mirror_rules", "DEF") as library:
        library.define("halves(Tensor x) -> Tensor")
        library.impl("halves", lambda x: (x / 2).double(), "CPU")
        library.impl("halves", torch.empty_like, "Meta")
        halves = torch.ops.mirror_rules.halves(torch.ones(2, device=CUDA))
        mirror.streams.run_all()
    (fault,) = mirror.faults.take()
    assert fault.kind == "form" and "float32, not torch.Size([2]) torch.float64" in fault.detail
    assert host_of(halves).tolist() == [0.5, 0.5]


def test_a_replay_computes_again_from_poison(mirror):
    source, result = torch.zeros(2, device=CUDA), torch.zeros(2, device=CUDA)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = source + 1
        result.copy_(between)
    source.fill_(4)
    graph.replay()
    mirror.streams.run_all()
    assert host_of(result).tolist() == [5, 5]
    graph.replay()
    graph.work.clear()
    graph.replay()  # without its calls only the poison is left
    mirror.streams.run_all()
    assert torch.isnan(host_of(between)).all()


def test_what_a_capture_forbids(mirror):
    value, event = torch.zeros(2, device=CUDA), torch.cuda.Event()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        event.record()
        for wait in (torch.cuda.synchronize, torch.cuda.empty_cache, event.synchronize, value.tolist):
            with pytest.raises(RuntimeError, match="capturing"):
                wait()
    assert kinds(mirror) == ["event in a capture", *["wait in a capture"] * 4]


def test_copies_that_wait(mirror):
    device, pinned = torch.zeros(4, device=CUDA), torch.zeros(4, pin_memory=True)
    device.copy_(pinned, non_blocking=True)
    other = torch.zeros(4, pin_memory=True)
    other.copy_(device, non_blocking=True)
    pinned.copy_(device, non_blocking=True)
    assert torch.isnan(other).all(), "not copied yet"
    assert pinned.tolist() == [0.0] * 4, "the upload before it has not read it yet"
    assert kinds(mirror) == []
    device.copy_(pinned)
    assert kinds(mirror) == ["wait"]
    device.copy_(pinned.double().pin_memory(), non_blocking=True)
    assert kinds(mirror) == ["staged copy", "wait"]
    for wait in (device.cpu, device.tolist, device.sum().item, lambda: bool(device.any()), device.nonzero):
        wait()
        assert kinds(mirror) == ["wait"]
    lengths, mask = torch.full((2,), 2, device=CUDA), device == 0
    assert device[mask].shape == (4,) and kinds(mirror) == ["wait"]
    for unsafe in (False, True):
        torch.segment_reduce(device, "sum", lengths=lengths, unsafe=unsafe)
        assert kinds(mirror) == ([] if unsafe else ["wait"])
    with pytest.raises(TypeError, match="numpy"):
        device.numpy()


def test_a_stream_waits_only_where_it_is_told(mirror):
    other = torch.cuda.Stream()
    source = torch.zeros(2, device=CUDA)
    mirror.streams.run_all()
    with torch.cuda.stream(other):
        source.fill_(3)
    early = source + 1
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert host_of(early).tolist() == [1, 1], "the other stream has not run"
    torch.cuda.current_stream().wait_stream(other)
    late = source + 1
    done.record()
    done.synchronize()
    assert host_of(late).tolist() == [4, 4]


def test_what_triton_forbids():
    with mirror_device() as mirror:
        import triton
        import triton.language as tl

        @triton.jit(do_not_specialize=["num"])  # type: ignore[untyped-decorator]
        def fill(x_ptr, num, step, BLOCK: tl.constexpr):
            at = tl.arange(0, BLOCK)
            tl.store(x_ptr + at, step, mask=at < num)

        x = torch.zeros(20, device=CUDA)
        fill[(1,)](x, 16, 2, BLOCK=32)
        fill[(1,)](x, 17, 3, BLOCK=32)
        assert len(mirror.launches.variants) == 1
        mirror.faults.serving = True
        fill[(1,)](x, 17, 1, BLOCK=32)  # 1 is compiled in
        fill[(1,)](x[1:], 17, 2, BLOCK=32)  # not divisible by 16
        assert kinds(mirror) == ["compiled while serving"] * 2
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            fill[(1,)](x, 17, 2, BLOCK=8)
        assert kinds(mirror) == ["compiled in a capture", "compiled while serving"]
        fill[(1, 70_000)](x, 0, 2, BLOCK=32)
        mirror.streams.drop_all()
        assert kinds(mirror) == ["grid"]
        with pytest.raises(ValueError, match="cannot be accessed"):
            fill[(1,)](torch.zeros(20), x, 2, BLOCK=32)
        assert kinds(mirror) == ["host tensor"]
        fill[(1,)](x[16:], 16, 2, BLOCK=16)  # four numbers, and twelve behind them
        mirror.streams.run_all()
        mirror.memory.check()
        assert kinds(mirror)[-1] == "red zone"
