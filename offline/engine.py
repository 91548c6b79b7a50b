"""`EngineThread`: scheduler, model runner and detokenizer on one thread of the caller's process, without sockets.

The caller's side (`submit`, `abort`, `close`) may be used from any thread. All objects of the engine are created, used
and dropped on its own thread: torch keeps its number of OpenMP threads per thread, and the scheduler has one writer. If
the thread ends for any reason, every open request gets an `EngineDeadError`, so that no caller waits forever.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from ..detokenizer.manager import Detokenizer
from ..runtime.errors import ConfigError, EngineDeadError
from ..runtime.feasibility import Capacity
from ..runtime.messages import (
    HEARTBEAT_INTERVAL_S,
    AbortRequest,
    AdapterDone,
    Call,
    CallAnswer,
    CallRequest,
    Explanation,
    FlushCacheDone,
    GenerateRequest,
    PinDone,
    SchedulerInput,
    TextOutput,
)

if TYPE_CHECKING:
    from ..scheduler.event_loop import KVThread
    from ..scheduler.journal.recorder import Recorder
    from ..scheduler.pipeline import Pipeline
    from ..scheduler.scheduler import Scheduler

_CLOSE_TIMEOUT_S: Final = 30.0  # after `close` at most one step still runs
_MIN_WAIT_S: Final = 1e-3  # if the scheduler's wake-up time has passed and it still has nothing to do

A = TypeVar("A", FlushCacheDone, PinDone, Explanation, AdapterDone)

RowQueue = queue.SimpleQueue[TextOutput | EngineDeadError]
"""The queue of the rows of one or more requests, in order; a dead engine puts its error there once per open request."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The components of an engine; pipeline and recorder belong to the scheduler.

    Attributes:
        tier: with `--kv-disk` or `--kv-store`; closed within `drain_timeout_s`.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    detokenizer: Detokenizer
    capacity: Capacity
    recorder: Recorder
    tier: KVThread | None = None
    drain_timeout_s: float = 0.0


class EngineThread:
    """An engine in this process.

    Attributes:
        capacity: of its scheduler.
    """

    def __init__(self, build: Callable[[Callable[[SchedulerInput], None]], EngineParts]) -> None:
        """Start the thread and wait until `build`, which runs on it, is done.

        Raises:
            ConfigError: from `build`; its other errors are raised unchanged, too.
        """
        self._loop = _Loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run, args=(build,), name="engine", daemon=True)
        self._thread.start()
        # Runs on garbage collection and at interpreter exit, so that torch is not unloaded during a step.
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._thread, self._pid)
        try:
            self.capacity = self._loop.wait_until_built()
        except BaseException:
            self._finalizer()
            raise

    def check_usable(self) -> None:
        """Check that a call can be answered.

        Raises:
            EngineDeadError: the engine has ended, or as `check_process`.
        """
        self.check_process()
        self._loop.check_alive()

    def check_process(self) -> None:
        """Check that this process has the engine's thread.

        Raises:
            EngineDeadError: it is a fork of the one that has; a fork copies no threads, so a call would wait for ever.
        """
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this engine runs in the process {self._pid}, and a forked process has no copy of it; make the LLM in "
                f"the process that uses it, for example with the start method 'spawn' of multiprocessing"
            )

    def submit(self, request: GenerateRequest, rows: RowQueue) -> None:
        """Start a request, already verified and known to fit; its rows go to `rows`, the last one has `finish` set.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self.submit_all([request], rows)

    def submit_all(self, requests: Sequence[GenerateRequest], rows: RowQueue) -> None:
        """As `submit`; no step runs between these requests, so that the same batch is always scheduled alike.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self.check_usable()
        self._loop.add(requests, rows)

    def abort(self, rid: str, reason: str) -> None:
        """End a request; unknown and finished ones are ignored. A finished row still arrives for it."""
        if os.getpid() == self._pid:
            self._loop.send(AbortRequest(rid, reason))

    def call(self, request: CallRequest, kind: type[A]) -> A:
        """Wait for the scheduler's answer to a call, which is of this kind; steps go on meanwhile.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self.check_usable()
        return self._loop.call(request, kind)

    def num_users(self, lora_id: str) -> int:
        """Open requests that use a LoRA adapter."""
        return self._loop.num_users(lora_id)

    def close(self) -> None:
        """End the thread; open requests get an `EngineDeadError`. Closing twice, or in a forked process, is allowed."""
        self._finalizer()


class _Loop:
    """The thread's side. Holds no reference to `EngineThread`, so that it can be collected while this runs."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Sequence[SchedulerInput]] = (
            queue.SimpleQueue()
        )  # an empty sequence only wakes the thread
        self._lock = threading.Lock()  # guards the four below
        self._rows_of: dict[str, RowQueue] = {}  # open requests
        self._lora_of: dict[str, str] = {}  # of these, those with an adapter
        self._answers: dict[int, queue.SimpleQueue[CallAnswer | EngineDeadError]] = {}  # of pending calls
        self._death: EngineDeadError | None = None
        self._call_ids = itertools.count(1)  # 0: no answer is wanted
        self._closing = False
        self._built: queue.SimpleQueue[Capacity | BaseException] = queue.SimpleQueue()

    # ------------------------------------------------------------ called by other threads

    def wait_until_built(self) -> Capacity:
        built = self._built.get()
        if isinstance(built, BaseException):
            raise built
        return built

    def add(self, requests: Sequence[GenerateRequest], rows: RowQueue) -> None:
        with self._lock:
            self._check_alive()
            self._rows_of.update((request.rid, rows) for request in requests)
            self._lora_of.update((request.rid, request.lora_id) for request in requests if request.lora_id)
        self._inbox.put(requests)

    def num_users(self, lora_id: str) -> int:
        with self._lock:
            return sum(used == lora_id for used in self._lora_of.values())

    def send(self, message: SchedulerInput) -> None:
        self._inbox.put((message,))

    def call(self, request: CallRequest, kind: type[A]) -> A:
        answers: queue.SimpleQueue[CallAnswer | EngineDeadError] = queue.SimpleQueue()
        call_id = next(self._call_ids)
        with self._lock:
            self._check_alive()
            self._answers[call_id] = answers
        self._inbox.put((Call(call_id, request),))
        answer = answers.get()
        if isinstance(answer, EngineDeadError):
            raise EngineDeadError(str(answer)) from answer
        assert isinstance(answer, kind), f"{type(answer).__name__} answers a call for {kind.__name__}"
        return answer

    def close(self) -> None:
        self._closing = True
        self._inbox.put(())

    def check_alive(self) -> None:
        with self._lock:
            self._check_alive()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death

    # ------------------------------------------------------------ on the engine's thread

    def run(self, build: Callable[[Callable[[SchedulerInput], None]], EngineParts]) -> None:
        """The thread's main function; whatever happens, every waiting caller gets an answer."""
        death = EngineDeadError("the engine has been closed; make a new LLM")
        try:
            parts = build(self.send)
            with contextlib.closing(parts.recorder):
                self._built.put(parts.capacity)
                drain_timeout_s = 0.0
                try:
                    while not self._closing:
                        self._step(parts)
                    if parts.tier is not None:
                        parts.tier.send(parts.scheduler.close())
                        drain_timeout_s = parts.drain_timeout_s
                finally:
                    if parts.tier is not None:
                        parts.tier.close(drain_timeout_s)
        except BaseException as error:  # also SystemExit: only this passes it to the callers
            self._built.put(error)  # read only by a constructor that still waits
            death = EngineDeadError(f"the engine stopped because of an error: {_one_line(error)}")
            death.__cause__ = error
        finally:
            self._die(death)

    def _step(self, parts: EngineParts) -> None:
        """Handle messages, advance the steps, deliver their outputs; sleeps while there is nothing to do."""
        for message in self._take_messages(0.0):
            parts.pipeline.handle(message)
        advanced = parts.pipeline.advance(self._has_messages)
        if parts.tier is not None:
            parts.tier.send(parts.scheduler.take_transfer_commands())
        self._deliver(parts)
        if not advanced:
            parts.pipeline.idle()
            wait = wait_s(parts.scheduler.num_unfinished, parts.scheduler.wake_s(), time.monotonic())
            if parts.pipeline.is_preparing:
                wait = _MIN_WAIT_S  # the thread that compiles them does not wake this one
            for message in self._take_messages(wait):
                parts.pipeline.handle(message)

    def _has_messages(self) -> bool:
        return not self._inbox.empty()

    def _take_messages(self, wait_s: float | None) -> Iterator[SchedulerInput]:
        """Messages that have arrived; waits `wait_s` seconds for the first one, None: without limit."""
        with contextlib.suppress(queue.Empty):
            messages = self._inbox.get(timeout=wait_s) if wait_s != 0 else self._inbox.get_nowait()
            while True:
                yield from messages
                messages = self._inbox.get_nowait()

    def _deliver(self, parts: EngineParts) -> None:
        for batch in parts.scheduler.take_outputs():
            for row in parts.detokenizer.process(batch).outputs:
                self._deliver_row(parts, row)
        for done in parts.scheduler.take_call_answers():
            with self._lock:
                answers = self._answers.pop(done.call_id)
            answers.put(done.answer)

    def _deliver_row(self, parts: EngineParts, row: TextOutput) -> None:
        finish = row.finish
        if row.ended_by_detokenizer:  # the scheduler would continue the request
            parts.pipeline.handle(AbortRequest(row.rid, "ended by the detokenizer"))
        with self._lock:
            rows = self._rows_of.get(row.rid) if finish is None else self._rows_of.pop(row.rid, None)
            if finish is not None:
                self._lora_of.pop(row.rid, None)
        if rows is not None:
            rows.put(row)

    def _die(self, death: EngineDeadError) -> None:
        with self._lock:
            self._death = death
            open_requests, self._rows_of = self._rows_of, {}
            self._lora_of.clear()
            calls, self._answers = self._answers, {}
        for rows in open_requests.values():
            rows.put(death)
        for answers in calls.values():
            answers.put(death)


def wait_s(num_unfinished: int, wake_s: float | None, now_s: float) -> float | None:
    """Seconds to wait for messages after a pass that had nothing to do; None: without limit.

    While requests wait, it ends at the time when the scheduler may act by itself, and after the heartbeat interval at
    most, as in a server: the scheduler counts fruitless passes to detect a stall.
    """
    if wake_s is None and not num_unfinished:
        return None
    until_wake_s = HEARTBEAT_INTERVAL_S if wake_s is None else wake_s - now_s
    return min(max(until_wake_s, _MIN_WAIT_S), HEARTBEAT_INTERVAL_S)


def _stop(loop: _Loop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:  # a forked process: the thread is that of its parent
        return
    loop.close()
    if (
        thread is not threading.current_thread()
    ):  # garbage may be collected on any thread, including the engine's
        thread.join(_CLOSE_TIMEOUT_S)
    _return_free_memory()


def _return_free_memory() -> None:
    """Give freed memory back to the system: glibc keeps what loading a model has used, 20 MiB for each `LLM`."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
