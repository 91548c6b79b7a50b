"""`PageMover`: the thread that looks pages up in a store, and moves them between there and the KV pool.

    scheduler's loop      `send`: commands; news come into its inbox
    thread                look-ups at once; loads before stores, in order, 4 MiB at a time; copies from and to pages
    store's thread        the calls of the store, one at a time, between it and a buffer
    third thread          digest of the weights, at low priority; until then nothing is found, and stores wait

No request fails because of the store: what cannot be read is a miss. A bug in the thread turns the store off. A call
of the store may never return: it has the buffer and no page, so a canceled load ends at once, and after 30 s all jobs
end. The store is used again when the call has returned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...runtime.kv_backends.base import TransferError
from ...runtime.transport.kv_tiers import (
    CancelLoad,
    Forget,
    Forgotten,
    Found,
    Loaded,
    LoadPages,
    LookUp,
    Stored,
    StorePages,
    TierCommand,
    TierNews,
)
from ..prefix_cache.tier_pages import page_keys, root_key
from .identity import identity_of, is_salted, state_key
from .page_store import PageStore, StoreError
from .segment_file import RecordBuffer, record_bytes

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 4 << 20
"""A job moves so much, then the thread takes commands. A read of this size is as fast as a larger one."""
_NEWEST_SHARE: Final = 0.3
"""Weight of the newest load in the rate of reading."""
_HASHING_NICENESS: Final = 10
"""A tenth of a busy core: the digest of a 5 GB model takes 4 s of one."""

SLOW_S: Final = 1.0
"""Look-ups do not wait for a call of the store that takes longer."""
ANSWER_LIMIT_S: Final = 30.0
"""After this time without an answer of the store all jobs end, those that wait for the weights excepted."""
_TICK_S: Final = 0.25
"""While a call runs, the time is looked at so often."""

_NOT_OPEN: Final = "the store is not in use"
_NO_ANSWER: Final = "the store does not answer"
_NOT_WRITTEN: Final = "the store is full, or failed"
_SALTED: Final = "prompts with a salt are not stored"

Pages = npt.NDArray[np.int32]


class PageRows(Protocol):
    """The KV pool, or the checkpoints of state layers, whose slots are called pages here; `PageMemory` is one."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all tensors."""
        ...

    def read_rows(self, page_ids: Pages, rows: npt.NDArray[np.uint8]) -> None:
        """Copy pages into rows, [n, page_bytes] uint8."""
        ...

    def write_rows(self, page_ids: Pages, rows: npt.NDArray[np.uint8]) -> None:
        """Copy rows into pages."""
        ...


class NewsOutbox(Protocol):
    """The way to the scheduler: an `Outbox`, or a queue in the same process."""

    def send(self, message: TierNews, /) -> None:
        """Send news."""
        ...

    def close(self) -> None:
        """No more follow."""
        ...


_Call = Callable[[], Any]
_Work = Generator[_Call | None, Any, TierNews | None]
"""Pieces of a job: a call of the store, which is sent its value; None, where another job may go first. Returns the
answer."""


class _Weights(NamedTuple):
    """The weights are read; None: they cannot be."""

    content: str | None


class _Returned(NamedTuple):
    """The end of a call of the store."""

    value: Any = None
    error: Exception | None = None


_FIRST: Final = _Returned()
"""Begins a job, or goes on after None."""


class _EndedError(StoreError):
    """The job ends before its time; the text is the error in its answer."""


@dataclass(eq=False, slots=True)
class _Job:
    """A command that is executed in pieces.

    Attributes:
        job: its number.
        work: see `_Work`.
        nothing: makes the answer to a command that was not begun, from an error.
        num_bytes: that a load reads.
    """

    job: int
    work: _Work
    nothing: Callable[[str], TierNews | None]
    num_bytes: int = 0
    since_s: float = field(default_factory=time.monotonic)


class PageMover:
    """See the module."""

    def __init__(
        self,
        name: str,
        open_store: Callable[[bytes, Mapping[str, Any]], PageStore],
        facts: Mapping[str, Any],
        weights: Callable[[], str],
        memory: PageRows,
        *,
        page_size: int,
        open_outbox: Callable[[], NewsOutbox],
        states: PageRows | None = None,
        persist_salted: bool = False,
        portable: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """Start the threads.

        Args:
            name: of the store, in warnings.
            open_store: opens it for an identity with these facts; called once, in the thread.
            facts: `kv_facts`.
            weights: computes `weights_content`; called once, in a thread of its own.
            memory: of all ranks. Until a load or a store ends, nothing else uses or writes to its pages.
            open_outbox: leads to the scheduler; called in the thread.
            states: of a model with state layers, the slots for checkpoints.
            persist_salted: store pages of salted namespaces, too.
            portable: see `page_keys`.
        """
        self._name = name
        self._open_store = open_store
        self._facts = facts
        self._weights = weights
        self._memory = memory
        self._page_size = page_size
        self._open_outbox = open_outbox
        self._persist_salted = persist_salted
        self._portable = portable
        rows = max(1, _PIECE_BYTES // record_bytes(memory.page_bytes))
        self._buffer = RecordBuffer(rows, memory.page_bytes)
        self._states = states
        self._state = RecordBuffer(1, 0 if states is None else states.page_bytes)
        self._commands: SimpleQueue[TierCommand | _Weights | _Returned | None] = SimpleQueue()
        self._identity = b""
        self._store: PageStore | None = None
        self._is_off = False
        self._is_open = threading.Event()  # or off
        self._openings: deque[_Job] = deque()
        self._forgets: deque[_Job] = deque()
        self._questions: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._caller: _Job | None = None  # waits for the value of the call, if it has not ended
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._called_s: float | None = None  # the beginning of a call that has not returned
        self._has_warned = False  # of this call
        self._num_forgets = 0
        self._rate = 0.0  # bytes a second of loads; 0: not known
        self._closes = False
        self._ends_s = 0.0  # set by `close`
        threading.Thread(target=self._read_weights, name="kv-store-weights", daemon=True).start()
        self._caller_thread = threading.Thread(target=self._make_calls, name="kv-store-calls", daemon=True)
        self._caller_thread.start()
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    def send(self, commands: Sequence[TierCommand]) -> None:
        """Hand commands to the thread; never blocks."""
        for command in commands:
            self._commands.put(command)

    def wait_until_open(self) -> None:
        """Wait for the digest of the weights; before that nothing is found."""
        self._is_open.wait()

    def close(self, timeout_s: float = 0.5) -> None:
        """End the threads, after the jobs that can be done in this time."""
        self._ends_s = time.monotonic() + timeout_s
        self._commands.put(None)
        self._thread.join(timeout_s + 1.0)
        self._caller_thread.join(max(0.0, self._ends_s + 1.0 - time.monotonic()))

    # ------------------------------------------------------------ the threads

    def _read_weights(self) -> None:
        content = None
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _HASHING_NICENESS)
            content = self._weights()
        except Exception as error:
            logger.warning("%s: not used, because the weights cannot be read: %s", self._name, error)
        self._commands.put(_Weights(content))

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                returned = _Returned(call())
            except Exception as error:
                returned = _Returned(error=error)
            self._commands.put(returned)

    def _run(self) -> None:
        self._outbox = self._open_outbox()
        self._buffer.rows.fill(0)  # its memory is resident before the first load: 1,024 page faults
        while not self._closes or (self._has_work() and time.monotonic() < self._ends_s):
            try:
                self._take_commands()
                self._check_time()
                if self._called_s is None and (job := self._next_job()) is not None:
                    self._advance(job)
            except Exception:
                logger.exception("%s: not used any more", self._name)
                self._turn_off()
        if self._store is not None:
            self._calls.put(self._store.close)
        self._calls.put(None)
        self._outbox.close()

    def _take_commands(self) -> None:
        """Take all that have come; wait for one if there is nothing to do."""
        with contextlib.suppress(Empty):
            if self._called_s is not None or self._next_job() is None:
                is_timed = self._called_s is not None or self._forgets
                self._handle(self._commands.get(timeout=_TICK_S if is_timed else None))
            while True:
                self._handle(self._commands.get_nowait())

    def _has_work(self) -> bool:
        return self._called_s is not None or self._next_job() is not None

    def _next_job(self) -> _Job | None:
        """The job that is next; what is to be forgotten is not found any more."""
        if self._store is None:
            return next(iter(self._openings), None)
        queues = (self._forgets, self._questions, self._loads, self._stores)
        return next((queue[0] for queue in queues if queue), None)

    def _all_jobs(self) -> list[_Job]:
        return [*self._openings, *self._forgets, *self._questions, *self._loads, *self._stores]

    def _handle(self, command: TierCommand | _Weights | _Returned | None) -> None:
        match command:
            case LookUp(job) if self._store is None or not self._keeps(command.namespace):
                self._outbox.send(Found(job, 0))
            case LookUp(job):
                nothing = partial(Found, job, 0, 0, 0.0, 0)
                self._questions.append(_Job(job, self._look_up(command), nothing))
            case LoadPages(job) if self._store is None:
                self._outbox.send(Loaded(job, 0, _NOT_OPEN))
            case LoadPages(job):
                num_bytes = self._num_bytes(command)
                self._loads.append(_Job(job, self._load(command), partial(Loaded, job, 0), num_bytes))
            case StorePages(job) if self._is_off or not self._keeps(command.namespace):
                self._outbox.send(Stored(job, 0, _NOT_OPEN if self._is_off else _SALTED))
            case StorePages(job):
                work = self._save(command, self._num_forgets)
                self._stores.append(_Job(job, work, partial(Stored, job, 0)))
            case CancelLoad(job):
                for each in [load for load in self._loads if load.job == job]:
                    self._end(each, "")
            case Forget(job) if self._is_off:
                self._outbox.send(Forgotten(job, _NOT_OPEN))
            case Forget(job):
                self._num_forgets += 1
                self._forgets.append(_Job(job, self._forget(job), partial(Forgotten, job)))
            case _Weights(None):
                self._turn_off()
            case _Weights(content) if content is not None:
                self._openings.append(_Job(0, self._open(content), lambda _: None))
            case _Returned():
                self._return(command)
            case None:
                self._closes = True

    def _turn_off(self) -> None:
        """Answer all jobs, and from now on each with nothing."""
        self._is_off = True
        self._is_open.set()
        if self._store is not None:
            self._calls.put(self._store.close)
            self._store = None
        for job in self._all_jobs():
            self._answer(job, job.nothing(_NOT_OPEN))

    # ------------------------------------------------------------ jobs

    def _advance(self, job: _Job, returned: _Returned = _FIRST) -> None:
        """Do a piece of a job, up to its next call of the store."""
        try:
            work = job.work
            call = work.send(returned.value) if returned.error is None else work.throw(returned.error)
        except StopIteration as end:
            self._answer(job, end.value)
            return
        if call is not None:
            self._caller, self._called_s = job, time.monotonic()
            self._calls.put(call)

    def _return(self, returned: _Returned) -> None:
        """A call has ended: go on with its job, unless that has ended before."""
        caller, self._caller, self._called_s = self._caller, None, None
        if self._has_warned:
            self._has_warned = False
            logger.info("%s: answers again", self._name)
        if caller is not None:
            self._advance(caller, returned)

    def _end(self, job: _Job, why: str) -> None:
        """End a job before its time. A call that it waits for goes on, with no page and with the buffer."""
        is_forget = job in self._forgets
        try:
            job.work.throw(_EndedError(why))
        except StopIteration as end:
            self._answer(job, end.value)
        except _EndedError:
            self._answer(job, job.nothing(why))
        if is_forget:
            self._handle(Forget())  # as soon as it can be, before anything is found

    def _answer(self, job: _Job, answer: TierNews | None) -> None:
        for queue in (self._openings, self._forgets, self._questions, self._loads, self._stores):
            if job in queue:
                queue.remove(job)
        if self._caller is job:
            self._caller = None
        if answer is not None:
            self._outbox.send(answer)

    def _check_time(self) -> None:
        """End what has waited too long for the store."""
        now_s = time.monotonic()
        waits_s = 0.0 if self._called_s is None else now_s - self._called_s
        late = [job for job in self._forgets if now_s - job.since_s > ANSWER_LIMIT_S]
        if waits_s > SLOW_S:
            late += self._questions
        if waits_s > ANSWER_LIMIT_S:
            late += [*self._loads, *self._stores]
            self._is_open.set()
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s: does not answer, and is not used until it does", self._name)
        for job in late:
            self._end(job, _NO_ANSWER)

    def _open(self, weights: str) -> _Work:
        self._identity = identity_of(self._facts, weights)
        self._store = yield partial(self._open_store, self._identity, {**self._facts, "weights": weights})
        self._is_open.set()
        return None

    def _forget(self, job: int) -> _Work:
        error = ""
        try:
            yield self._opened.forget
        except StoreError as failure:
            error = str(failure)
        return Forgotten(job, error)

    @property
    def _opened(self) -> PageStore:
        assert self._store is not None
        return self._store

    def _keeps(self, namespace: str) -> bool:
        return self._persist_salted or not is_salted(namespace)

    def _keys(self, command: LookUp | LoadPages | StorePages) -> Iterator[bytes]:
        root = root_key(self._identity, command.namespace)
        return page_keys(root, command.token_ids, self._page_size, self._portable)

    def _look_up(self, command: LookUp) -> _Work:
        store, keys = self._opened, list(self._keys(command))
        try:
            num_pages = yield partial(store.find, keys)
            if self._states is not None and num_pages:  # as many as have the state after them
                states = [state_key(key) for key in keys[:num_pages]]
                has = yield partial(store.has, states)
                num_pages = max((count for count, is_there in enumerate(has, 1) if is_there), default=0)
                if num_pages and not (yield partial(store.find, [states[num_pages - 1]])):
                    num_pages = 0
        except StoreError as error:
            return Found(command.job, 0, error=str(error))
        state_bytes = self._states.page_bytes if self._states is not None and num_pages else 0
        num_bytes = num_pages * self._memory.page_bytes
        ahead = sum(load.num_bytes for load in self._loads)
        estimate_s = (num_bytes + state_bytes + ahead) / self._rate if self._rate else 0.0
        return Found(command.job, num_pages, num_bytes, estimate_s, state_bytes, used_bytes=store.used_bytes)

    def _num_bytes(self, command: LoadPages) -> int:
        """Bytes of all that a load reads."""
        state_bytes = self._states.page_bytes if self._states is not None and command.checkpoint else 0
        return len(_page_ids(command)) * self._memory.page_bytes + state_bytes

    def _load(self, command: LoadPages) -> _Work:
        store, pages = self._opened, _page_ids(command)
        keys = list(islice(self._keys(command), command.first_page, command.first_page + len(pages)))
        started_s = time.monotonic()
        done = state_bytes = 0
        error = ""
        try:
            while done < len(keys):
                piece = keys[done : done + len(self._buffer.rows)]
                count = yield partial(store.read, piece, self._buffer)
                self._memory.write_rows(pages[done : done + count], self._buffer.payloads[:count])
                done += count
                if count < len(piece):
                    break
                yield None
            if self._states is not None and command.checkpoint and done == len(keys):
                is_there = yield partial(store.read, [state_key(keys[-1])], self._state)
                if is_there:
                    self._states.write_rows(np.array([command.checkpoint], np.int32), self._state.payloads)
                    state_bytes = self._states.page_bytes
        except (StoreError, TransferError) as failure:
            error = str(failure)
        num_bytes = done * self._memory.page_bytes + state_bytes
        if command.checkpoint and not state_bytes:
            done = 0
        seconds = time.monotonic() - started_s
        if done:
            rate = num_bytes / max(seconds, 1e-6)
            self._rate += (rate - self._rate) * (_NEWEST_SHARE if self._rate else 1.0)
        return Loaded(command.job, done, error, seconds, num_bytes)

    def _save(self, command: StorePages, num_forgets: int) -> _Work:
        """Store pages; `num_forgets`: when it was ordered."""
        store, pages = self._opened, _page_ids(command)
        keys = list(islice(self._keys(command), command.first_page, command.first_page + len(pages)))
        started_s = time.monotonic()
        done = num_bytes = 0
        error = ""
        try:
            while done < len(keys):
                self._check_kept(num_forgets)
                end = min(len(keys), done + len(self._buffer.rows))
                has = yield partial(store.has, keys[done:end])
                new = [index for index, is_there in zip(range(done, end), has, strict=True) if not is_there]
                if new:
                    self._memory.read_rows(pages[new], self._buffer.payloads[: len(new)])
                    written = yield partial(store.write, [keys[index] for index in new], self._buffer)
                    num_bytes += written * self._memory.page_bytes
                    if written < len(new):
                        done = new[written]
                        raise StoreError(_NOT_WRITTEN)
                done = end
                yield None
            if self._states is not None and command.checkpoint:
                key = state_key(keys[-1])
                if not (yield partial(store.has, [key]))[0]:
                    self._check_kept(num_forgets)
                    self._states.read_rows(np.array([command.checkpoint], np.int32), self._state.payloads)
                    if not (yield partial(store.write, [key], self._state)):
                        raise StoreError(_NOT_WRITTEN)
                    num_bytes += self._states.page_bytes
        except (StoreError, TransferError) as failure:
            error = str(failure)
        seconds, used_bytes = time.monotonic() - started_s, store.used_bytes
        return Stored(command.job, done, error, seconds, num_bytes, used_bytes)

    def _check_kept(self, num_forgets: int) -> None:
        if num_forgets != self._num_forgets:
            raise StoreError("forgotten")


def _page_ids(command: LoadPages | StorePages) -> Pages:
    return np.frombuffer(command.pages, dtype=np.int32)
