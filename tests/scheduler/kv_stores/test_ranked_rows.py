"""`RankedRows` with the workers of real ranks: a row has the parts of all, and no part moves too early or too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.model_runner.distributed import transfer_worker
from engine.model_runner.distributed.transfer_worker import ComputedSteps, TransferWorker
from engine.model_runner.memory.page_memory import PageMemory
from engine.runtime.kv_backends.base import TransferError
from engine.runtime.transport.rank_transfer import worker_name
from engine.scheduler.kv_stores.ranked_rows import RankedRows
from engine.scheduler.transfer.link.ranks import Ranks

WAIT_S = 30.0
STEP = 3
NUM_PAGES = 9


def make_memory(sizes: list[int]) -> tuple[PageMemory, list[torch.Tensor]]:
    """Random pages of tensors with so many float32 numbers a page."""
    views = [torch.randn(NUM_PAGES, size) for size in sizes]
    return PageMemory(views), views


class Ranked:
    """Three ranks: two that divide heads, and a stage with more layers; each with checkpoints, too."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.pools = [make_memory(sizes) for sizes in ([4, 6], [4, 6], [8, 8, 2])]
        self.slots = [make_memory([size]) for size in (3, 3, 5)]
        endpoint = f"ipc://{folder}/ranks"
        ranks = Ranks(endpoint, 3, life=7)
        ends.callback(ranks.close)
        self.workers = [
            TransferWorker(
                endpoint,
                worker_name(rank, 7),
                self.pools[rank][0],
                writer=None,
                target=None,
                computed=ComputedSteps(torch.device("cpu")),
                states=self.slots[rank][0],
            )
            for rank in (1, 2)
        ]
        for worker in self.workers:
            ends.callback(worker.close)
        ranks.wait(WAIT_S)
        self.pages = RankedRows(self.pools[0][0], ranks, lambda: STEP)
        self.states = RankedRows(self.slots[0][0], ranks, lambda: STEP, states=True)

    def computed(self) -> None:
        for worker in self.workers:
            worker.launched(STEP)


@pytest.fixture
def ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranked]:
    monkeypatch.setattr(transfer_worker, "_IDLE_POLL_MS", 10)  # how long the end of a worker takes
    with ExitStack() as ends:
        yield Ranked(tmp_path, ends)


def read(rows: RankedRows, *page_ids: int) -> np.ndarray:
    out = np.zeros((len(page_ids), rows.page_bytes), np.uint8)
    rows.read_rows(np.array(page_ids, np.int32), out)
    return out


@pytest.mark.parametrize(("kind", "parts"), [("pages", (40, 40, 72)), ("states", (12, 12, 20))])
def test_a_row_has_the_parts_of_all_ranks_and_goes_into_their_pages(
    ranked: Ranked, kind: str, parts: tuple[int, ...]
) -> None:
    ranked.computed()
    rows: RankedRows = getattr(ranked, kind)
    memories = ranked.pools if kind == "pages" else ranked.slots
    assert rows.page_bytes == sum(parts)

    found = read(rows, 7, 2)

    begin = 0
    for (_, views), size in zip(memories, parts, strict=True):
        for row, page in enumerate((7, 2)):
            expected = b"".join(view[page].numpy().tobytes() for view in views)
            assert found[row, begin : begin + size].tobytes() == expected
        begin += size
    before = [[view.clone() for view in views] for _, views in memories]
    rows.write_rows(np.array([1, 5], np.int32), found)
    for (_, views), olds in zip(memories, before, strict=True):
        for view, old in zip(views, olds, strict=True):
            old[[1, 5]] = old[[7, 2]]
            assert torch.equal(view, old), "another page has changed"


@pytest.mark.parametrize("writes", [False, True])
def test_no_rank_moves_pages_before_it_has_computed_the_settled_step(ranked: Ranked, writes: bool) -> None:
    """Rank 0 has settled a step when another rank may still be at its end, and write to a page or to a state."""
    page_ids, rows = np.array([4], np.int32), np.zeros((1, ranked.pages.page_bytes), np.uint8)
    before = ranked.pools[1][1][0].clone()
    with ThreadPoolExecutor(1) as pool:
        move = ranked.pages.write_rows if writes else ranked.pages.read_rows
        moved = pool.submit(move, page_ids, rows)
        ranked.workers[0].launched(STEP - 1)
        ranked.workers[1].launched(STEP)
        with pytest.raises(TimeoutError):
            moved.result(0.1)
        assert torch.equal(ranked.pools[1][1][0], before)
        ranked.workers[0].launched(STEP)
        moved.result(WAIT_S)
    assert (ranked.pools[1][1][0][4] == 0).all() if writes else rows.any()


def test_a_failed_rank_is_an_error_when_no_other_rank_writes_any_more(ranked: Ranked) -> None:
    began, goes_on = threading.Event(), threading.Event()
    memories: list[Any] = [worker._memory for worker in ranked.workers]
    write_rows = memories[1].write_rows

    def fail(*_: Any) -> None:
        raise TransferError("no memory")

    def hold(*arguments: Any) -> None:
        began.set()
        assert goes_on.wait(WAIT_S)
        write_rows(*arguments)

    memories[0].write_rows, memories[1].write_rows = fail, hold
    ranked.computed()
    rows = read(ranked.pages, 3)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(ranked.pages.write_rows, np.array([6], np.int32), rows)
        assert began.wait(WAIT_S)
        with pytest.raises(TimeoutError):
            written.result(0.1)
        goes_on.set()
        with pytest.raises(TransferError, match="rank 1: no memory"):
            written.result(WAIT_S)
    assert torch.equal(ranked.pools[2][1][0][6], ranked.pools[2][1][0][3])
