"""`EngineThread`: scheduler, model runner and detokenizer on one thread of the caller's process, without sockets.

The caller's side (`submit`, `abort`, `close`) may be used from any thread. Everything that belongs to the engine is
made, used and dropped on its own thread: torch keeps its number of OpenMP threads per thread, and the scheduler has one
writer. Whatever ends the thread reaches every open request as `EngineDeadError`: nobody waits for an answer that will
not come.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ..detokenizer.manager import Detokenizer
from ..runtime.errors import ConfigError, EngineDeadError
from ..runtime.feasibility import Capacity
from ..runtime.messages import (
    HEARTBEAT_INTERVAL_S,
    AbortRequest,
    BatchTextOutput,
    Explain,
    Explanation,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    PinDone,
    PinPrefix,
    RequestList,
    SchedulerInput,
    SchedulerReport,
    TextOutput,
)

if TYPE_CHECKING:
    from ..scheduler.journal.recorder import Recorder
    from ..scheduler.pipeline import Pipeline
    from ..scheduler.scheduler import Scheduler

_CLOSE_TIMEOUT_S: Final = 30.0  # one step at most runs on after `close`
_MIN_WAIT_S: Final = (
    1e-3  # should the scheduler want to be asked at a time that has passed, and still do nothing
)

Answer = FlushCacheDone | PinDone | Explanation
A = TypeVar("A", FlushCacheDone, PinDone, Explanation)

RowQueue = queue.SimpleQueue[TextOutput | EngineDeadError]
"""Where rows of one or more requests arrive, in order; a dead engine puts its error there once per open request."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of; pipeline and recorder are the scheduler's."""

    scheduler: Scheduler
    pipeline: Pipeline
    detokenizer: Detokenizer
    capacity: Capacity
    recorder: Recorder


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
        self._loop.add([request], rows)

    def submit_all(self, requests: Sequence[GenerateRequest], rows: RowQueue) -> None:
        """As `submit`; no step comes between these requests, so that the same batch is scheduled alike every time.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._loop.add(requests, rows)

    def abort(self, rid: str, reason: str) -> None:
        """End a request; unknown and finished ones are ignored. It still gets its finished row."""
        self._loop.send(AbortRequest(rid, reason))

    def flush_cache(self) -> FlushCacheDone:
        """Drop the prefix cache, as far as no running request uses it.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._loop.ask(FlushCache, FlushCacheDone)

    def pin(self, input_ids: bytes, ttl_s: float, extra_key: str) -> PinDone:
        """Keep what is cached of a prompt ([n] int32) for so many seconds; 0 unpins.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._loop.ask(lambda pin_id: PinPrefix(pin_id, input_ids, ttl_s, extra_key), PinDone)

    def explain(self, rid: str) -> Explanation:
        """Why a request fared as it did, also one that has ended, as far as the scheduler remembers.

        Raises:
            EngineDeadError: the engine has ended.
        """
        return self._loop.ask(lambda explain_id: Explain(explain_id, rid), Explanation)

    def close(self) -> None:
        """End the thread; open requests get an `EngineDeadError`. Closing twice is fine."""
        self._finalizer()


class _Loop:
    """The thread's side. Holds no reference to `EngineThread`, so that one can be collected while this runs."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Sequence[SchedulerInput]] = (
            queue.SimpleQueue()
        )  # no message: just wake up
        self._lock = threading.Lock()  # guards the three below
        self._rows_of: dict[str, RowQueue] = {}  # open requests
        self._answers: dict[int, queue.SimpleQueue[Answer | EngineDeadError]] = {}  # to open questions
        self._death: EngineDeadError | None = None
        self._question_ids = itertools.count()
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
        self._inbox.put(requests)

    def send(self, message: SchedulerInput) -> None:
        self._inbox.put((message,))

    def ask(self, question: Callable[[int], SchedulerInput], kind: type[A]) -> A:
        """Send the question made for an id, and wait for its answer, which is of this kind."""
        answers: queue.SimpleQueue[Answer | EngineDeadError] = queue.SimpleQueue()
        question_id = next(self._question_ids)
        with self._lock:
            self._check_alive()
            self._answers[question_id] = answers
        self._inbox.put((question(question_id),))
        answer = answers.get()
        if isinstance(answer, EngineDeadError):
            raise EngineDeadError(str(answer)) from answer
        assert isinstance(answer, kind), f"{type(answer).__name__} answers a question for {kind.__name__}"
        return answer

    def close(self) -> None:
        self._closing = True
        self._inbox.put(())

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death

    # ------------------------------------------------------------ on the engine's thread

    def run(self, build: Callable[[], EngineParts]) -> None:
        """The thread's life; leaves nobody waiting, whatever happens."""
        death = EngineDeadError("the engine has been closed")
        try:
            parts = build()
            with contextlib.closing(parts.recorder):
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
        """Take in messages, advance the steps, deliver what came out; sleeps while there is nothing to do."""
        for message in self._take_messages(0.0):
            parts.pipeline.handle(message)
        advanced = parts.pipeline.advance(self._has_messages)
        self._deliver(parts)
        if not advanced:
            parts.pipeline.idle()
            for message in self._take_messages(wait_s(parts.scheduler, time.monotonic())):
                parts.pipeline.handle(message)

    def _has_messages(self) -> bool:
        return not self._inbox.empty()

    def _take_messages(self, wait_s: float | None) -> Iterator[SchedulerInput]:
        """What has arrived; waits so many seconds for the first one, None: as long as it takes."""
        with contextlib.suppress(queue.Empty):
            messages = self._inbox.get(timeout=wait_s) if wait_s != 0 else self._inbox.get_nowait()
            while True:
                yield from messages
                messages = self._inbox.get_nowait()

    def _deliver(self, parts: EngineParts) -> None:
        for message in parts.scheduler.take_outputs():
            match parts.detokenizer.handle(message):
                case BatchTextOutput(outputs=rows):
                    for row in rows:
                        self._deliver_row(parts, row)
                case FlushCacheDone() as done:
                    self._answer(done.flush_id, done)
                case PinDone() as done:
                    self._answer(done.pin_id, done)
                case Explanation() as explanation:
                    self._answer(explanation.explain_id, explanation)
                case SchedulerReport() | RequestList() | None:  # nobody asks for a list in process
                    pass

    def _answer(self, question_id: int, answer: Answer) -> None:
        with self._lock:
            answers = self._answers.pop(question_id)
        answers.put(answer)

    def _deliver_row(self, parts: EngineParts, row: TextOutput) -> None:
        finish = row.finish
        if row.ended_by_detokenizer:  # the scheduler would go on
            parts.pipeline.handle(AbortRequest(row.rid, "ended by the detokenizer"))
        with self._lock:
            rows = self._rows_of.get(row.rid) if finish is None else self._rows_of.pop(row.rid, None)
        if rows is not None:
            rows.put(row)

    def _die(self, death: EngineDeadError) -> None:
        with self._lock:
            self._death = death
            open_requests, self._rows_of = self._rows_of, {}
            questions, self._answers = self._answers, {}
        for rows in open_requests.values():
            rows.put(death)
        for answers in questions.values():
            answers.put(death)


class Wakeful(Protocol):
    """What `wait_s` asks: a `Scheduler`."""

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        ...

    def wake_s(self) -> float | None:
        """When it may decide something though no message comes."""
        ...


def wait_s(scheduler: Wakeful, now_s: float) -> float | None:
    """How long to wait for messages after a pass that had nothing to do; None: as long as it takes.

    While requests wait, not beyond the time at which the scheduler may decide something by itself, and no longer than
    a server's scheduler would: it counts fruitless passes to notice that it is stuck.
    """
    if not scheduler.num_unfinished:
        return None
    wake_s = scheduler.wake_s()
    until_wake_s = HEARTBEAT_INTERVAL_S if wake_s is None else wake_s - now_s
    return min(max(until_wake_s, _MIN_WAIT_S), HEARTBEAT_INTERVAL_S)


def _stop(loop: _Loop, thread: threading.Thread) -> None:
    loop.close()
    if (
        thread is not threading.current_thread()
    ):  # garbage may be collected on any thread, also on the engine's
        thread.join(_CLOSE_TIMEOUT_S)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
