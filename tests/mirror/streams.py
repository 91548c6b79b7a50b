"""Streams, events and graphs of a mirror: queues of calls that run as late as possible.

Nothing runs before the host waits for it. So a missing wait, host memory that is written again while a copy from it is
queued, or a result that is read too early, shows as poison or as another number: always, not sometimes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .faults import Faults
from .memory import poison

Order = Literal["late", "eager"]
"""eager: each call runs at once, as if the host waited after it. A result that differs then depends on the order."""

Work = Callable[[], object]


@dataclass(slots=True, eq=False)
class Mark:
    """A place in a queue."""

    is_reached: bool = False

    def reach(self) -> None:
        self.is_reached = True


class Stream:
    """One queue; in the place of `torch.cuda.Stream`."""

    device = torch.device("cuda:0")

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._queue: deque[Work] = deque()

    def put(self, work: Work) -> None:
        """Queue a call, or record it if there is a capture."""
        if self._streams.capturing is not None:
            self._streams.capturing.work.append(work)
        else:
            self.put_now(work)

    def put_now(self, work: Work) -> None:
        """Queue a call, also during a capture."""
        self._queue.append(work)
        if self._streams.order == "eager":
            self.run_all()

    def mark(self) -> Mark:
        mark = Mark()
        self.put_now(mark.reach)
        return mark

    def run_until(self, mark: Mark) -> None:
        while not mark.is_reached:
            self._run_next()

    def run_all(self) -> None:
        while self._queue:
            self._run_next()

    def drop_all(self) -> None:
        self._queue.clear()

    def _run_next(self) -> None:
        work = self._queue.popleft()
        with _disable_current_modes(), torch.inference_mode():
            work()

    # ------------------------------------------------------------ torch.cuda.Stream

    def wait_stream(self, other: Stream) -> None:
        mark = other.mark()
        self.put_now(lambda: other.run_until(mark))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self._streams.wait("Stream.synchronize")
        self.run_all()

    def query(self) -> bool:
        return not self._queue


class Event:
    """In the place of `torch.cuda.Event`; waiting for one is what a step's end does, so it is no fault."""

    def __init__(self, streams: Streams, enable_timing: bool = False) -> None:
        self._streams = streams
        self._is_timed = enable_timing
        self._place: tuple[Stream, Mark] | None = None

    def record(self, stream: Stream | None = None) -> None:
        if self._streams.capturing is not None:
            self._streams.faults.add("event in a capture")
        stream = stream or self._streams.current
        self._place = stream, stream.mark()

    def synchronize(self) -> None:
        self._streams.forbid_in_capture("Event.synchronize")
        if self._place is not None:
            stream, mark = self._place
            if not mark.is_reached:
                self._streams.faults.stall()
            stream.run_until(mark)

    def wait(self, stream: Stream | None = None) -> None:
        place = self._place
        if place is not None:
            (stream or self._streams.current).put_now(lambda: place[0].run_until(place[1]))

    def query(self) -> bool:
        return self._place is None or self._place[1].is_reached

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, always the same."""
        assert self._is_timed and other._is_timed, "the events measure no time"
        assert self.query() and other.query(), "the events have not happened yet"
        return 0.1


class Graph:
    """In the place of `torch.cuda.CUDAGraph`: the calls of a capture, and the memory that was allocated in it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.work: list[Work] = []
        self.memory: list[Tensor] = []

    def replay(self) -> None:
        """Queue the calls again. What the last replay left in the recording's memory is poisoned first."""
        put = self._streams.current.put
        put(self._poison)
        for work in self.work:
            put(work)

    def _poison(self) -> None:
        for each in self.memory:
            poison(each)


class Streams:
    """All queues of one mirror.

    Attributes:
        capturing: the graph that is recorded now.
    """

    def __init__(self, faults: Faults, order: Order) -> None:
        self.faults = faults
        self.order = order
        self.capturing: Graph | None = None
        self._stack = [Stream(self)]
        self._all = list(self._stack)

    @property
    def current(self) -> Stream:
        return self._stack[-1]

    def new(self, *_: Any, **__: Any) -> Stream:
        """As `torch.cuda.Stream(device)`."""
        self._all.append(Stream(self))
        return self._all[-1]

    def run_all(self) -> None:
        """Everything that is queued, without a fault."""
        for stream in self._all:
            stream.run_all()

    def drop_all(self) -> None:
        """Forget what is queued: after an error, which it would repeat."""
        for stream in self._all:
            stream.drop_all()

    def wait(self, what: str) -> None:
        """Note that the host waits for the device; an error in a capture, as on a GPU."""
        self.forbid_in_capture(what)
        self.faults.wait(what)

    def forbid_in_capture(self, what: str) -> None:
        if self.capturing is not None:
            self.faults.add("wait in a capture", what)
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def synchronize(self, what: str = "torch.cuda.synchronize") -> None:
        self.wait(what)
        self.run_all()

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`."""
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def capture(
        self, graph: Graph, pool: object = None, stream: Stream | None = None, **_: Any
    ) -> Iterator[None]:
        """As `torch.cuda.graph`, which waits for the device first."""
        assert self.capturing is None, "two captures at once"
        self.run_all()
        with self.use(stream or self.current):
            self.capturing = graph
            try:
                yield
            finally:
                self.capturing = None
