"""`EngineThread`: scheduler, model runner and detokenizer on one thread of the caller's process, without sockets.

The caller's side (`submit`, `abort`, `close`) may be used from any thread. Everything that belongs to the engine is
made, used and dropped on its own thread: torch keeps its number of OpenMP threads per thread, and the scheduler has one
writer. Whatever ends the thread reaches every open request as `EngineDeadError`: nobody waits for an answer that will
not come.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..detokenizer.manager import Detokenizer
from ..runtime.errors import ConfigError, EngineDeadError
from ..runtime.feasibility import Capacity
from ..runtime.messages import (
    AbortRequest,
    BatchTextOutput,
    Explanation,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    PinDone,
    SchedulerInput,
    SchedulerReport,
    TextOutput,
)
from ..runtime.step_plan import Runner

if TYPE_CHECKING:
    from ..scheduler.scheduler import Scheduler

_CLOSE_TIMEOUT_S: Final = 30.0  # one step at most runs on after `close`

RowQueue = queue.SimpleQueue[TextOutput | EngineDeadError]
"""Where rows of one or more requests arrive, in order; a dead engine puts its error there once per open request."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    scheduler: Scheduler
    runner: Runner
    detokenizer: Detokenizer
    capacity: Capacity


class EngineThread:
    """An engine in this process.

    Attributes:
        capacity: what it can hold.
    """

    def __init__(self, build: Callable[[], EngineParts]) -> None:
        """Start the thread and wait until `build`, which runs on it, is done.

        Raises:
            ConfigError: from `build`; other errors of it come out unchanged, too.
        """
        self._loop = _Loop()
        self._thread = threading.Thread(target=self._loop.run, args=(build,), name="engine", daemon=True)
        self._thread.start()
        # Runs on garbage collection and at interpreter exit, so that torch is not pulled away under a running step.
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._thread)
        try:
            self.capacity = self._loop.wait_until_built()
        except BaseException:
            self._finalizer()
            raise

    def submit(self, request: GenerateRequest, rows: RowQueue) -> None:
        """Start a request, already verified and known to fit; its rows go to `rows`, the last one has `finish` set.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._loop.add(request, rows)

    def abort(self, rid: str, reason: str) -> None:
        """End a request; unknown and finished ones are ignored. It still gets its finished row."""
        self._loop.send(AbortRequest(rid, reason))

    def flush_cache(self) -> FlushCacheDone:
        """Drop the prefix cache, as far as no running request uses it.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._loop.flush_cache()

    def close(self) -> None:
        """End the thread; open requests get an `EngineDeadError`. Closing twice is fine."""
        self._finalizer()


class _Loop:
    """The thread's side. Holds no reference to `EngineThread`, so that one can be collected while this runs."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[SchedulerInput | None] = (
            queue.SimpleQueue()
        )  # None wakes it up to close
        self._lock = threading.Lock()  # guards the three below
        self._rows_of: dict[str, RowQueue] = {}  # open requests
        self._flushes: dict[int, queue.SimpleQueue[FlushCacheDone | EngineDeadError]] = {}
        self._death: EngineDeadError | None = None
        self._closing = False
        self._built: queue.SimpleQueue[Capacity | BaseException] = queue.SimpleQueue()

    # ------------------------------------------------------------ called by other threads

    def wait_until_built(self) -> Capacity:
        built = self._built.get()
        if isinstance(built, BaseException):
            raise built
        return built

    def add(self, request: GenerateRequest, rows: RowQueue) -> None:
        with self._lock:
            self._check_alive()
            self._rows_of[request.rid] = rows
        self._inbox.put(request)

    def send(self, message: SchedulerInput) -> None:
        self._inbox.put(message)

    def flush_cache(self) -> FlushCacheDone:
        answer: queue.SimpleQueue[FlushCacheDone | EngineDeadError] = queue.SimpleQueue()
        flush_id = id(answer)
        with self._lock:
            self._check_alive()
            self._flushes[flush_id] = answer
        self._inbox.put(FlushCache(flush_id))
        done = answer.get()
        if isinstance(done, EngineDeadError):
            raise EngineDeadError(str(done)) from done
        return done

    def close(self) -> None:
        self._closing = True
        self._inbox.put(None)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death

    # ------------------------------------------------------------ on the engine's thread

    def run(self, build: Callable[[], EngineParts]) -> None:
        """The thread's life; leaves nobody waiting, whatever happens."""
        death = EngineDeadError("the engine has been closed")
        try:
            parts = build()
            self._built.put(parts.capacity)
            while not self._closing:
                self._step(parts)
        except BaseException as error:  # also SystemExit: nothing but this hands it to the callers
            self._built.put(error)  # read only by a constructor that still waits
            death = EngineDeadError(f"the engine stopped because of an error: {_one_line(error)}")
            death.__cause__ = error
        finally:
            self._die(death)

    def _step(self, parts: EngineParts) -> None:
        """Take in messages, run one batch, deliver what came out; sleeps when there is nothing to do."""
        scheduler = parts.scheduler
        for message in self._take_messages(wait=False):
            scheduler.handle(message, time.monotonic())
        batch = scheduler.next_batch(time.monotonic())
        if batch is not None:
            result = parts.runner.launch(batch.plan).wait()
            scheduler.settle(batch, result, time.monotonic())
        self._deliver(parts)
        if batch is None:
            scheduler.on_idle()
            for message in self._take_messages(wait=True):
                scheduler.handle(message, time.monotonic())

    def _take_messages(self, *, wait: bool) -> Iterator[SchedulerInput]:
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(block=wait)
            while True:
                if message is not None:
                    yield message
                message = self._inbox.get_nowait()

    def _deliver(self, parts: EngineParts) -> None:
        for message in parts.scheduler.take_outputs():
            match parts.detokenizer.handle(message):
                case BatchTextOutput(outputs=rows):
                    for row in rows:
                        self._deliver_row(parts, row)
                case FlushCacheDone() as done:
                    with self._lock:
                        answer = self._flushes.pop(done.flush_id)
                    answer.put(done)
                case SchedulerReport() | PinDone() | Explanation():
                    pass

    def _deliver_row(self, parts: EngineParts, row: TextOutput) -> None:
        finish = row.finish
        if row.ended_by_detokenizer:  # the scheduler would go on
            parts.scheduler.handle(AbortRequest(row.rid, "ended by the detokenizer"), time.monotonic())
        with self._lock:
            rows = self._rows_of.get(row.rid) if finish is None else self._rows_of.pop(row.rid, None)
        if rows is not None:
            rows.put(row)

    def _die(self, death: EngineDeadError) -> None:
        with self._lock:
            self._death = death
            open_requests, self._rows_of = self._rows_of, {}
            flushes, self._flushes = self._flushes, {}
        for rows in open_requests.values():
            rows.put(death)
        for answer in flushes.values():
            answer.put(death)


def _stop(loop: _Loop, thread: threading.Thread) -> None:
    loop.close()
    if (
        thread is not threading.current_thread()
    ):  # garbage may be collected on any thread, also on the engine's
        thread.join(_CLOSE_TIMEOUT_S)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
