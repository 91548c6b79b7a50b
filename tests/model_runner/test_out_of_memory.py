"""A step for which the allocator finds no memory is dropped; what else its plan says has been done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.sampling import token_counts
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import RowUpdate

from .conftest import Driver, TinyModel, int32

PROMPT = [(7 * n + 3) % 96 for n in range(21)]
PENALISED = SamplingParams(
    temperature=0.7, top_k=40, seed=7, repetition_penalty=1.3, frequency_penalty=0.5, max_new_tokens=64
)


@pytest.fixture
def fail(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the next calls of a part of the model run out of memory."""

    def arrange(name: str, times: int = 1) -> None:
        part, _, method = name.rpartition(".")
        owner = driver.runner if not part else getattr(driver.runner, part)
        honest, left = getattr(owner, method), [None] * times

        def failing(*args: Any, **kwargs: Any) -> Any:
            result = honest(*args, **kwargs)  # memory may run out anywhere in it
            if not left:
                return result
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if hasattr(owner, "__dict__"):
            monkeypatch.setattr(owner, method, failing)
        else:  # slots
            monkeypatch.setattr(type(owner), method, staticmethod(failing))

    return arrange


def restart(driver: Driver, req: Any) -> Any:
    """What the scheduler does with a request of a dropped step."""
    driver.finish(req)
    return driver.start(req.tokens, req.sampling, prompt_len=req.prompt_len)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("where", "times"),
    [("executor.run", 1), ("model.logits", 1), ("sampler.sample", 1), ("builder.build", 2)],
)
@pytest.mark.parametrize(
    "sampling", [replace(PENALISED, temperature=0.0), PENALISED], ids=["greedy", "drawn"]
)
def test_a_step_without_memory_is_dropped_and_nothing_of_it_stays(driver, fail, where, times, sampling):
    alone = driver.generate([PROMPT], sampling, num=8)[0]
    req = driver.start(PROMPT, sampling)
    driver.step([(req, 21)])
    driver.step([(req, 1)])

    fail(where, times)
    result = driver.runner.launch(driver.plan([(req, 1)])).wait()

    assert result.out_of_memory == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert (result.next_token_ids, result.errors) == (b"", {})
    again = restart(driver, req)
    while len(again.output) < 8:
        driver.step([(again, min(16, len(again.tokens) - again.computed))])
    assert again.output == alone


def test_rows_leave_and_pages_move_also_in_a_step_that_is_dropped(driver, fail):
    alone = driver.generate([PROMPT], num=6)[0]
    gone, stays, new = driver.start([5, 6]), driver.start(PROMPT), driver.start([7, 8])
    driver.step([(gone, 2), (stays, 21)])
    copies = [driver.pages.pop() for _ in stays.pages]
    page_copies = [*zip(stays.pages, copies, strict=True)]
    update = RowUpdate(stays.row, 0, int32(driver.slots(copies, 0, stays.computed)))
    driver.finish(gone)

    fail("executor.run")
    plan = driver.plan([(new, 2)], row_updates=(update,), page_copies=page_copies)
    assert driver.runner.launch(plan).wait().out_of_memory

    for pool in (*driver.runner.kv_pool.k, *driver.runner.kv_pool.v):
        pool.view(-1, 4, *pool.shape[1:])[stays.pages] = torch.nan
    stays.pages = copies
    while len(stays.output) < 6:
        driver.step([(stays, 1)])
    assert stays.output == alone
    assert driver.start([9], SamplingParams(temperature=0.0, seed=0)).row >= 0


def test_where_several_ranks_share_the_model_it_ends_the_runner(driver, fail):
    driver.runner.drops_steps = False
    req = driver.start(PROMPT)
    fail("executor.run")
    with pytest.raises(torch.OutOfMemoryError):
        driver.step([(req, 21)])


@pytest.mark.parametrize("drops_steps", [True, False])
@pytest.mark.parametrize("where", ["builder.build", "slot_table.store"])
def test_uploads_are_made_once_more(driver, fail, where, drops_steps):
    """Also on ranks of a group, which drop no steps."""
    alone = driver.generate([PROMPT], num=4)[0]
    driver.runner.drops_steps = drops_steps
    req = driver.start(PROMPT)
    fail(where)

    driver.step([(req, 21)])

    while len(req.output) < 4:
        driver.step([(req, 1)])
    assert req.output == alone


def test_a_plan_whose_changes_are_not_in_the_slot_table_is_not_dropped(driver, fail):
    """Others would go on with pages that they no longer have."""
    donor = driver.start(PROMPT)
    driver.step([(donor, 21)])
    req = driver.start([*PROMPT[:20], 5], prefix=(donor, 20))
    fail("slot_table.update", times=2)
    with pytest.raises(torch.OutOfMemoryError):
        driver.step([(req, 1)])


@pytest.fixture
def swapping(make_driver: Callable[..., Driver], make_tiny_llama: Callable[..., TinyModel]) -> Driver:
    tiny = make_tiny_llama()
    return make_driver(tiny.spec, tiny.folder, num_host_pages=8)


class Short:
    """A call for which there is memory only from some try on; what it did before, it did."""

    def __init__(self, call: Callable[..., Any], num_failures: int) -> None:
        self.call = call
        self.left = num_failures

    def __call__(self, *args: Any) -> Any:
        result = self.call(*args)
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")
        return result


def move_there_and_back(driver: Driver, sampling: SamplingParams) -> list[int]:
    """Tokens of a request that was swapped, whose pages were copied, and that came back with its output."""
    req = driver.start(PROMPT, sampling)
    driver.step([(req, 21)])
    host_pages = range(len(req.pages))
    moved, copied = ([driver.pages.pop() for _ in host_pages] for _ in range(2))
    driver.step([], swap_outs=[*zip(req.pages, host_pages, strict=True)])
    driver.step([], swap_ins=[*zip(host_pages, moved, strict=True)])
    driver.step([], page_copies=[*zip(moved, copied, strict=True)])
    for pool in (*driver.runner.kv_pool.k, *driver.runner.kv_pool.v):
        pool.view(-1, 4, *pool.shape[1:])[[*req.pages, *moved]] = torch.nan
    req.pages[:] = copied
    update = RowUpdate(req.row, 0, int32(driver.slots(copied, 0, req.computed)))
    driver.step([(req, 1)], row_updates=(update,))
    again = restart(driver, req)
    while len(again.output) < 6:
        driver.step([(again, min(16, len(again.tokens) - again.computed))])
    output: list[int] = again.output
    return output


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("host_kv_pool", "copy_out"),
        ("host_kv_pool", "copy_in"),
        ("kv_pool", "copy_pages"),
        ("counts", "_grow"),
        ("counts.buffers", "put"),
        ("slot_table", "update"),
    ],
)
def test_what_later_steps_rest_on_is_tried_once_more(swapping, monkeypatch, part, method):
    """Pages that move, counts of penalties, and the slot table."""
    expected = swapping.generate([PROMPT], PENALISED, num=6)[0]
    counts = swapping.runner.counts
    counts.__init__(counts.in_prompt.shape[1], counts.buffers)  # so that it grows again
    owner: Any = swapping.runner
    for name in part.split("."):
        owner = getattr(owner, name)
    honest = getattr(owner, method)

    monkeypatch.setattr(owner, method, Short(honest, 1))
    assert move_there_and_back(swapping, PENALISED) == expected
    assert getattr(owner, method).left == 0


@pytest.mark.parametrize("name", ["copy_out", "copy_pages"])
def test_pages_that_cannot_move_end_the_runner(swapping, monkeypatch, name):
    owner = swapping.runner.host_kv_pool if name == "copy_out" else swapping.runner.kv_pool
    monkeypatch.setattr(owner, name, Short(getattr(owner, name), 2))
    with pytest.raises(torch.OutOfMemoryError):
        move_there_and_back(swapping, PENALISED)


def test_counts_grow_both_or_not_at_all(monkeypatch):
    counts = TokenCounts(5, InputBuffers(torch.device("cpu")))
    tokens = np.array([1, 1], dtype=np.int32)
    monkeypatch.setattr(token_counts, "_with_rows", Short(token_counts._with_rows, 1))
    with pytest.raises(torch.OutOfMemoryError):
        counts.add(3, tokens, tokens)
    assert len(counts.in_prompt) == len(counts.in_output) == 0
    for row in range(6):
        counts.add(row, tokens, tokens)
    assert counts.in_output[counts.slots(range(6))].tolist() == [[0, 2, 0, 0, 0]] * 6
    assert len(set(counts.slots(range(6)).tolist())) == 6


def test_other_errors_are_no_lack_of_memory(driver, monkeypatch):
    def broken(batch: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(driver.runner.executor, "run", broken)
    req = driver.start(PROMPT)
    with pytest.raises(RuntimeError, match="illegal"):
        driver.step([(req, 21)])
