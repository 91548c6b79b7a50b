"""`ThreadGroup`: the ranks of a group as threads of one process, which meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

TIMEOUT_S = 60.0
T = TypeVar("T")


class ThreadGroup:
    """One rank; `calls` are the operations it was asked for, with the shapes."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Tensor]) -> None:
        self.rank, self.size = rank, size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._barrier, self._board = barrier, board

    def wait_for_others(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce(self, x: Tensor) -> Tensor:
        total = sum(self._exchange("all_reduce", x)[1:], self._board[0].clone())
        self._barrier.wait()
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = torch.cat(self._exchange("all_gather", x), dim=-1)
        self._barrier.wait()
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        first = self._exchange("broadcast", x)[0].clone()
        self._barrier.wait()
        return x.copy_(first)

    def min_over_ranks(self, value: int) -> int:
        smallest = min(int(x) for x in self._exchange("min", torch.tensor(value)))
        self._barrier.wait()
        return smallest

    def meet(self, place: str) -> None:
        self._barrier.wait()

    def _exchange(self, name: str, x: Tensor) -> list[Tensor]:
        """All ranks' tensors; whoever has read them must come to the barrier again."""
        self.calls.append((name, tuple(x.shape)))
        self._board[self.rank] = x
        self._barrier.wait()
        return self._board


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Do `work` as each of `size` ranks at the same time; results in the order of ranks, or the first error."""
    barrier = threading.Barrier(size, timeout=TIMEOUT_S)
    board = [torch.empty(0)] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, size, barrier, board))
        except BaseException:
            barrier.abort()  # or the others would wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in sorted(
        filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)
    ):
        raise error
    return [future.result() for future in futures]
