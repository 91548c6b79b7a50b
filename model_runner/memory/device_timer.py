"""`DeviceTimer`: how long the device took for work that a step queued, without waiting for it while it is queued."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import torch


class DeviceTimer:
    """Sums what is queued on the current stream inside its `with` blocks.

    On the CPU, where work is done when its call returns, that is the host's time. On a GPU it lies between two events
    in the stream: the host only queues, and its time would make every copy look free.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []  # start, stop, start, stop ...
        self._started_s = 0.0
        self._host_s = 0.0

    def __enter__(self) -> Self:
        if self._is_cuda:
            self._record()
        else:
            self._started_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_cuda:
            self._record()
        else:
            self._host_s += time.perf_counter() - self._started_s

    def wait_for_seconds(self) -> float:
        """Seconds so far; waits until the device has done it all."""
        if not self._events:
            return self._host_s
        self._events[-1].synchronize()
        spans = zip(self._events[::2], self._events[1::2], strict=True)
        return float(sum(start.elapsed_time(stop) for start, stop in spans)) / 1e3

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
