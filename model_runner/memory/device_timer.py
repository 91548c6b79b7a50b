"""`DeviceTimer`: measures the device time of the work that a step queues, without waiting while it is queued."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import torch


class DeviceTimer:
    """Sums the time of the work queued on the current stream inside its `with` blocks.

    On the CPU work is done when its call returns, so the host's time is measured. On a GPU the time between two events
    of the stream is measured: the host only queues, and by its time every copy would look free.
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
        """Seconds so far; waits until the device has done all of the work."""
        if not self._events:
            return self._host_s
        self._events[-1].synchronize()
        spans = zip(self._events[::2], self._events[1::2], strict=True)
        return float(sum(start.elapsed_time(stop) for start, stop in spans)) / 1e3

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
