"""What a plan says may be fetched early: what its decodes read, as much as is allowed."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.attention.cpu_native import CpuNativeAttention
from engine.model_runner.attention.early_fetch import MIN_TOKENS, Early, EarlyFetch
from engine.model_runner.recording.native_program import told_of_calls
from tests.model_runner.attention.paged_batches import Pages, spec_of
from tests.model_runner.attention.test_cpu_native import Step
from tests.model_runner.kernels.cpu.conftest import best_library

__all__ = ["best_library"]  # fixture

LONGEST_BYTES = 192 * 64
PAGE_SIZE = 16


class Plan:
    """Of requests with one KV head of 16 numbers each."""

    def __init__(
        self, library: Any, table: Any, early_bytes: int, row_bytes: int = 32, window: int = 0
    ) -> None:
        self._library = library
        self._early = Early(most_bytes=early_bytes)
        self._table = table
        self._plan = library.new_attention_plan(
            table.ctypes.data,
            table.shape[1],
            PAGE_SIZE,
            1,
            1,
            16,
            window,
            0,
            row_bytes,
            ctypes.addressof(self._early),
        )

    def make(self, lens: Any, new_tokens: Any, decodes: Any = None) -> list[tuple[int, int]]:
        """The stretches of a step of requests that have `lens` tokens with their new ones: first slot, and how many."""
        rows = np.arange(len(lens))
        columns = [np.ascontiguousarray(c, dtype=np.int64) for c in (rows, lens - new_tokens, new_tokens)]
        decoding = None if decodes is None else np.ascontiguousarray(decodes, dtype=np.int64)
        self._library.plan_attention(
            self._plan,
            *(column.ctypes.data for column in columns),
            None if decoding is None else decoding.ctypes.data,
            len(lens),
        )
        step = Step.from_address(self._plan)
        if step.num_stretches == 0:
            return []
        pairs = ctypes.cast(step.stretches, ctypes.POINTER(ctypes.c_int32))
        return [tuple(pair) for pair in np.ctypeslib.as_array(pairs, (step.num_stretches, 2)).tolist()]

    def close(self) -> None:
        self._library.free_attention_plan(self._plan)


@pytest.fixture
def make_plan(best_library):
    plans = []

    def make(*args: Any, **kwargs: Any) -> Plan:
        plans.append(Plan(best_library, *args, **kwargs))
        return plans[-1]

    yield make
    for plan in plans:
        plan.close()


def random_table(source: Any, num_rows: int) -> Any:
    """25 pages each in random order; the first row's lie side by side."""
    pages = source.permutation(num_rows * 25).reshape(num_rows, 25)
    pages[0] = 500 + np.arange(25)
    return (pages[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(num_rows, -1).astype(np.int32)


def slots_of(stretches: list[tuple[int, int]]) -> list[int]:
    return [slot for first, count in stretches for slot in range(first, first + count)]


@pytest.mark.parametrize("row_bytes", [32, 384, 2048, 40_000])
@pytest.mark.parametrize("early_rows", [0, 1, 300, 900, 2200, 1 << 40])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_decodes_read(make_plan, row_bytes, early_rows, seed):
    source = np.random.default_rng(seed)
    lens, table = source.integers(1, 400, 11), random_table(source, 11)
    stretches = make_plan(table, 2 * row_bytes * early_rows, row_bytes).make(lens, np.ones(11))
    rows = slots_of(stretches)
    read = [slot for row, length in zip(table, lens, strict=True) for slot in row[:length].tolist()]
    assert len(set(rows)) == len(rows) and set(rows) <= set(read)
    assert all(count == 1 or count * row_bytes <= LONGEST_BYTES for _, count in stretches)
    if early_rows == 0:
        assert not rows
    elif early_rows > 11 * 400:
        assert rows == read  # in the order in which it is read
    else:
        assert len(rows) <= 2 * early_rows  # a share of the items, which are not equally long
        assert len(rows) > early_rows / 3 or early_rows == 1


def test_neighbours_are_one_stretch(make_plan):
    table = (100 + np.arange(300, dtype=np.int32)).reshape(1, 300)
    stretches = make_plan(table, 1 << 40, row_bytes=384).make(np.array([300]), np.ones(1))
    assert stretches == [(100 + n * 32, 32) for n in range(9)] + [(388, 12)]


def test_a_window_is_all_that_is_read(make_plan):
    table = np.arange(600, dtype=np.int32).reshape(1, 600)
    rows = slots_of(make_plan(table, 1 << 40, window=100).make(np.array([500]), np.ones(1)))
    assert rows == list(range(400, 500))


def test_drafts_read_what_decodes_read(make_plan):
    table = np.arange(600, dtype=np.int32).reshape(1, 600)
    rows = slots_of(make_plan(table, 1 << 40).make(np.array([500]), np.full(1, 5)))
    assert sorted(set(rows)) == list(range(500))


def test_prompts_and_shared_beginnings_are_not_fetched_early(make_plan):
    """They are read for many tokens at once, which takes the multipliers' time and not the memory's."""
    table = np.arange(1200, dtype=np.int32).reshape(2, 600)
    plan = make_plan(table, 1 << 40)
    assert plan.make(np.array([400]), np.full(1, 300), np.zeros(1)) == []
    table[1, :320] = table[0, :320]
    rows = slots_of(plan.make(np.array([400, 350]), np.ones(2)))
    assert sorted(rows) == [*range(320, 400), *range(920, 950)]


@pytest.mark.parametrize(("num_requests", "announces"), [(MIN_TOKENS - 1, False), (MIN_TOKENS, True)])
def test_each_layer_announces_the_next_one(best_library, num_requests, announces):
    """With its own plan, where layers have windows; behind the last one nothing stays announced."""
    backend: Any = functools.partial(
        CpuNativeAttention, library=best_library, early_fetch=EarlyFetch(1 << 20)
    )
    spec = spec_of(9, 3, 64, window=100)
    pages = Pages(spec, PAGE_SIZE, [20] * num_requests, torch.bfloat16, 0, backend=backend)
    pages.run([1] * num_requests, 0)
    attention = pages.bound()
    calls: list[tuple[str, tuple[Any, ...]]] = []
    rows, ones = torch.from_numpy(pages.rows), torch.ones(num_requests, dtype=torch.int64)
    step = attention.repeatable_step(rows, 19 * ones, ones)
    with told_of_calls(
        best_library, lambda function, args: calls.append((function.name, args)), only_told=True
    ):
        for layer_id in range(spec.num_layers):
            step.forward(layer_id, pages.q)
    attends = [args for name, args in calls if name == "attend"]
    expected = [(args[0], args[3], args[4], 3 * 64 * 2) for args in attends[1:]] + [
        (None, None, None, 3 * 64 * 2)
    ]
    assert len(attends) == spec.num_layers and len({args[0] for args in attends}) == 2, "two plans"
    assert [args for name, args in calls if name == "announce_attention"] == (expected if announces else [])
