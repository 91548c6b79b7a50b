"""A decode step's numbers on their way to the device: one copy, padding behind them, nothing overwritten too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_runner.input_batch import RELAYED
from engine.model_runner.recording.graphs.decode_inputs import DecodeInputMemory

CPU = torch.device("cpu")
DUMMY_ROW, WIDTH = 9, 100


class SlowCopies:
    """A device that copies when it must: the host's memory is read then, and not before.

    Attributes:
        waits: how often the host had to wait for a copy that was not done.
    """

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.num_done = self.num_queued = self.waits = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("nothing is recorded here")

    def capture_pieces(self, run: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
        raise AssertionError("nothing is recorded here")

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def upload(self, target: torch.Tensor, staged: torch.Tensor) -> Callable[[], None]:
        self.queue.append(partial(target.copy_, staged))
        self.num_queued += 1
        return partial(self.run_until, self.num_queued)

    def run_until(self, num: int) -> None:
        self.waits += self.num_done < num
        while self.num_done < num:
            self.queue.popleft()()
            self.num_done += 1

    def free_bytes(self) -> int:
        return 0


def memory_for(device: SlowCopies, sizes: list[int]) -> DecodeInputMemory:
    return DecodeInputMemory(sizes, dummy_row=DUMMY_ROW, table_width=WIDTH, device=CPU, graph_device=device)


def int64(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_numbers_arrive_with_padding_behind_them_in_one_copy():
    device = SlowCopies()
    inputs = memory_for(device, [1, 2, 4]).upload(
        4, int64(3, 0, 5), int64(7, 11, 0), int64(40, 41, 8), int64(RELAYED, 17, 18)
    )
    assert device.num_queued == 1
    device.run_until(1)

    assert inputs.rows.tolist() == [3, 0, 5, DUMMY_ROW]
    assert inputs.positions.tolist() == [7, 11, 0, 0]
    assert inputs.out_cache_loc.tolist() == [40, 41, 8, 0]
    assert inputs.known_ids.tolist() == [RELAYED, 17, 18, 0]
    assert inputs.table_indices.tolist() == [307, 11, 500, DUMMY_ROW * WIDTH]
    assert inputs.slots.tolist() == [40, 41, 8, 0]
    assert inputs.seq_lens.tolist() == [8, 12, 1, 1]
    assert [tensor.dtype for tensor in inputs] == [torch.int64] * 5 + [torch.int32] * 2 + [torch.int64] * 2
    assert not len(inputs.adapter_plan)
    assert not len(inputs.state_plan)


def test_heads_turn_by_other_positions_than_those_of_slots_after_images():
    device, three = SlowCopies(), int64(1, 2, 3)
    inputs = memory_for(device, [4]).upload(
        4, three, int64(7, 11, 5), three, three, rope_positions=int64(3, 11, 5)
    )
    device.run_until(1)
    assert inputs.positions.tolist() == [3, 11, 5, 0]
    assert inputs.table_indices.tolist() == [107, 211, 305, DUMMY_ROW * WIDTH]
    assert inputs.seq_lens.tolist() == [8, 12, 6, 1]


def test_padding_behind_adapters_uses_the_base_model():
    device = SlowCopies()
    memory = DecodeInputMemory(
        [2, 4], dummy_row=DUMMY_ROW, table_width=WIDTH, device=CPU, graph_device=device, has_adapters=True
    )
    three = int64(1, 2, 3)
    inputs = memory.upload(4, three, three, three, three, int64(2, 2, 1))
    device.run_until(1)
    assert inputs.adapter_plan.tolist()[:10] == [3, 2, 0, 2, 1, 2, 3, 0, 3, 4]
    assert len(inputs.adapter_plan) == 13


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=DUMMY_ROW))
def test_a_plan_has_room_for_the_runs_of_all_requests(requests):
    """Not for one run a token: kernels start a program for each run that there is room for."""
    memory = DecodeInputMemory(
        [2048],
        dummy_row=DUMMY_ROW,
        table_width=WIDTH,
        device=CPU,
        graph_device=SlowCopies(),
        has_adapters=True,
    )
    assert len(memory.on_device[2048].adapter_plan) == 1 + 3 * (DUMMY_ROW + 1 + 2048 // 32)
    slots = np.repeat(*np.array(requests, dtype=np.int64).T)
    zeros = np.zeros_like(slots)
    memory.upload(2048, zeros, zeros, zeros, zeros, slots)


def test_every_size_has_its_place_for_good():
    device = SlowCopies()
    memory = memory_for(device, [1, 2, 4])
    before = {size: [tensor.data_ptr() for tensor in inputs] for size, inputs in memory.on_device.items()}
    for size in (4, 1, 2, 4):
        assert [tensor.data_ptr() for tensor in memory.upload_padding(size)] == before[size]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.booleans()), min_size=3, max_size=12))
def test_what_is_staged_is_not_overwritten_before_it_was_copied(steps):
    """However late the copies are: each step's numbers are those of that step when the device reads them."""
    device = SlowCopies()
    memory = memory_for(device, [1, 2, 4])
    arrived: list[list[int]] = []
    for n, (size, catches_up) in enumerate(steps):
        values = int64(*range(10 * n, 10 * n + size))
        inputs = memory.upload(size, values % DUMMY_ROW, values, values, values)
        copy = device.queue.pop()

        def copy_and_look(
            copy: Callable[[], object] = copy, positions: torch.Tensor = inputs.positions
        ) -> None:
            copy()
            arrived.append(positions.tolist())

        device.queue.append(copy_and_look)
        if catches_up:
            device.run_until(n + 1)
    device.run_until(len(steps))

    assert arrived == [list(range(10 * n, 10 * n + size)) for n, (size, _) in enumerate(steps)]


def test_the_host_waits_only_for_the_copy_of_two_steps_ago():
    device = SlowCopies()
    memory = memory_for(device, [2])
    memory.upload_padding(2)
    memory.upload_padding(2)
    assert (device.waits, device.num_done) == (0, 0)

    memory.upload_padding(2)
    assert (device.waits, device.num_done) == (1, 1)

    device.run_until(2)
    device.waits = 0
    memory.upload_padding(2)
    assert device.waits == 0
