"""`PageMover`: the thread that looks pages up in a store, and moves them between there and the KV pool.

    scheduler's loop      `send`: commands; news come into its inbox
    thread                look-ups at once; loads before stores, in order, 4 MiB at a time
    second thread         digest of the weights, at low priority; until then nothing is found, and stores wait

No request fails because of the store: what cannot be read is a miss. A bug in the thread turns the store off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol, assert_never

import numpy as np
import numpy.typing as npt

from ...runtime.kv_backends.base import TransferError
from ...runtime.transport.kv_tiers import (
    CancelLoad,
    Forget,
    Found,
    Loaded,
    LoadPages,
    LookUp,
    Stored,
    StorePages,
    TierCommand,
    TierNews,
)
from .identity import identity_of, is_salted, page_keys, root_key, state_key
from .page_store import PageStore, StoreError
from .segment_file import RecordBuffer, record_bytes

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 4 << 20
"""A job moves so much, then the thread takes commands. A read of this size is as fast as a larger one."""
_NEWEST_SHARE: Final = 0.3
"""Weight of the newest load in the rate of reading."""
_HASHING_NICENESS: Final = 10
"""A tenth of a busy core: the digest of a 5 GB model takes 4 s of one."""

_NOT_OPEN: Final = "the store is not in use"
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


class _Weights(NamedTuple):
    """The weights are read; None: they cannot be."""

    content: str | None


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
        """
        self._name = name
        self._open_store = open_store
        self._facts = facts
        self._weights = weights
        self._memory = memory
        self._page_size = page_size
        self._open_outbox = open_outbox
        self._persist_salted = persist_salted
        rows = max(1, _PIECE_BYTES // record_bytes(memory.page_bytes))
        self._buffer = RecordBuffer(rows, memory.page_bytes)
        self._states = states
        self._state = RecordBuffer(1, 0 if states is None else states.page_bytes)
        self._commands: SimpleQueue[TierCommand | _Weights | None] = SimpleQueue()
        self._identity = b""
        self._store: PageStore | None = None
        self._is_off = False
        self._is_open = threading.Event()  # or off
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._cancelled: set[int] = set()
        self._num_forgets = 0
        self._rate = 0.0  # bytes a second of loads; 0: not known
        self._closes = False
        self._ends_s = 0.0  # set by `close`
        threading.Thread(target=self._read_weights, name="kv-store-weights", daemon=True).start()
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
        """End the thread, after the jobs that it can do in this time."""
        self._ends_s = time.monotonic() + timeout_s
        self._commands.put(None)
        self._thread.join(timeout_s + 1.0)

    # ------------------------------------------------------------ the threads

    def _read_weights(self) -> None:
        content = None
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _HASHING_NICENESS)
            content = self._weights()
        except Exception as error:
            logger.warning("%s: not used, because the weights cannot be read: %s", self._name, error)
        self._commands.put(_Weights(content))

    def _run(self) -> None:
        self._outbox = self._open_outbox()
        while not self._closes or (self._jobs() and time.monotonic() < self._ends_s):
            try:
                if not self._jobs():
                    self._handle(self._commands.get())
                with contextlib.suppress(Empty):
                    while True:
                        self._handle(self._commands.get_nowait())
                if self._jobs():
                    self._advance(self._jobs())
            except Exception:
                logger.exception("%s: not used any more", self._name)
                self._turn_off()
        if self._store is not None:
            self._store.close()
        self._outbox.close()

    def _jobs(self) -> deque[_Job]:
        """The jobs whose turn it is: loads first; stores wait for the weights."""
        return self._stores if self._store is not None and not self._loads else self._loads

    def _handle(self, command: TierCommand | _Weights | None) -> None:
        match command:
            case LookUp():
                found = Found(command.job, 0, error=_NOT_OPEN)
                try:
                    found = self._found(command)
                finally:  # a bug is answered, too
                    self._outbox.send(found)
            case LoadPages() if self._store is None:
                self._outbox.send(Loaded(command.job, 0, _NOT_OPEN))
            case LoadPages():
                self._loads.append(_Job(command, self._load(command)))
            case StorePages() if self._is_off or not self._keeps(command.namespace):
                self._outbox.send(Stored(command.job, 0, _NOT_OPEN if self._is_off else _SALTED))
            case StorePages():
                self._stores.append(_Job(command, self._save(command, self._num_forgets)))
            case CancelLoad():
                self._cancelled |= {command.job} & {job.command.job for job in self._loads}
            case Forget():
                self._num_forgets += 1
                if self._store is not None:
                    self._store.forget()
            case _Weights():
                self._open(command.content)
            case None:
                self._closes = True
            case _:
                assert_never(command)

    def _open(self, weights: str | None) -> None:
        if weights is None:
            self._turn_off()
            return
        self._identity = identity_of(self._facts, weights)
        self._store = self._open_store(self._identity, {**self._facts, "weights": weights})
        if self._num_forgets:
            self._store.forget()
        self._is_open.set()

    def _turn_off(self) -> None:
        """Answer all jobs, and from now on each with nothing."""
        self._is_off = True
        self._is_open.set()
        store, self._store = self._store, None
        for job in self._loads:
            self._outbox.send(Loaded(job.command.job, 0, _NOT_OPEN))
        for job in self._stores:
            self._outbox.send(Stored(job.command.job, 0, _NOT_OPEN))
        self._loads.clear()
        self._stores.clear()
        if store is not None:
            with contextlib.suppress(Exception):  # the thread must go on answering
                store.close()

    # ------------------------------------------------------------ jobs

    def _advance(self, jobs: deque[_Job]) -> None:
        """Do a piece of the first job."""
        answer = next(jobs[0].work)
        if answer is not None:
            jobs.popleft()
            self._outbox.send(answer)

    def _keeps(self, namespace: str) -> bool:
        return self._persist_salted or not is_salted(namespace)

    def _keys(self, command: LookUp | LoadPages | StorePages) -> Iterator[bytes]:
        return page_keys(root_key(self._identity, command.namespace), command.token_ids, self._page_size)

    def _found(self, command: LookUp) -> Found:
        if self._store is None or not self._keeps(command.namespace):
            return Found(command.job, 0)
        try:
            num_pages = self._num_found(list(self._keys(command)))
        except StoreError as error:
            return Found(command.job, 0, error=str(error))
        state_bytes = self._states.page_bytes if self._states is not None and num_pages else 0
        num_bytes = num_pages * self._memory.page_bytes
        ahead = sum(self._num_bytes(job.command) for job in self._loads)
        estimate_s = (num_bytes + state_bytes + ahead) / self._rate if self._rate else 0.0
        used_bytes = self._store.used_bytes
        return Found(command.job, num_pages, num_bytes, estimate_s, state_bytes, used_bytes=used_bytes)

    def _num_found(self, keys: Sequence[bytes]) -> int:
        """Number of first pages that the store has; in a model with state layers, with the state after them."""
        assert self._store is not None
        num_pages = self._store.find(keys)
        if self._states is None or not num_pages:
            return num_pages
        states = [state_key(key) for key in keys[:num_pages]]
        num_pages = max((count for count, has in enumerate(self._store.has(states), 1) if has), default=0)
        return num_pages if num_pages and self._store.find([states[num_pages - 1]]) else 0

    def _num_bytes(self, command: LoadPages | StorePages) -> int:
        """Bytes of all that a load reads."""
        state_bytes = self._states.page_bytes if self._states is not None and command.checkpoint else 0
        return len(_page_ids(command)) * self._memory.page_bytes + state_bytes

    def _load(self, command: LoadPages) -> Iterator[Loaded | None]:
        """Load in pieces; the last value is the answer."""
        assert self._store is not None
        pages = _page_ids(command)
        keys = list(islice(self._keys(command), command.first_page, command.first_page + len(pages)))
        started_s = time.monotonic()
        done = state_bytes = 0
        error = ""
        try:
            while done < len(keys) and command.job not in self._cancelled:
                piece = keys[done : done + len(self._buffer.rows)]
                count = self._store.read(piece, self._buffer)
                self._memory.write_rows(pages[done : done + count], self._buffer.payloads[:count])
                done += count
                if count < len(piece):
                    break
                yield None
            if command.checkpoint and done == len(keys):
                state_bytes = self._load_state(command.checkpoint, keys[-1])
        except (StoreError, TransferError) as failure:
            error = str(failure)
        num_bytes = done * self._memory.page_bytes + state_bytes
        if command.checkpoint and not state_bytes:
            done = 0
        self._cancelled.discard(command.job)
        seconds = time.monotonic() - started_s
        if done:
            rate = num_bytes / max(seconds, 1e-6)
            self._rate += (rate - self._rate) * (_NEWEST_SHARE if self._rate else 1.0)
        yield Loaded(command.job, done, error, seconds, num_bytes)

    def _load_state(self, checkpoint: int, page_key: bytes) -> int:
        """Load the state after a page; returns its bytes, 0 if the store has lost it."""
        assert self._states is not None and self._store is not None
        if not self._store.read([state_key(page_key)], self._state):
            return 0
        self._states.write_rows(np.array([checkpoint], np.int32), self._state.payloads)
        return self._states.page_bytes

    def _save(self, command: StorePages, num_forgets: int) -> Iterator[Stored | None]:
        """Store in pieces; the last value is the answer. `num_forgets`: when it was ordered."""
        assert self._store is not None
        pages = _page_ids(command)
        keys = list(islice(self._keys(command), command.first_page, command.first_page + len(pages)))
        started_s = time.monotonic()
        done = num_bytes = 0
        error = ""
        try:
            while done < len(keys):
                self._check_kept(num_forgets)
                end = min(len(keys), done + len(self._buffer.rows))
                piece = zip(range(done, end), self._store.has(keys[done:end]), strict=True)
                new = [index for index, is_there in piece if not is_there]
                if new:
                    self._memory.read_rows(pages[new], self._buffer.payloads[: len(new)])
                    written = self._store.write([keys[index] for index in new], self._buffer)
                    num_bytes += written * self._memory.page_bytes
                    if written < len(new):
                        done = new[written]
                        raise StoreError(_NOT_WRITTEN)
                done = end
                yield None
            if command.checkpoint and not self._store.has([state_key(keys[-1])])[0]:
                self._check_kept(num_forgets)
                num_bytes += self._save_state(command.checkpoint, keys[-1])
        except (StoreError, TransferError) as failure:
            error = str(failure)
        seconds, used_bytes = time.monotonic() - started_s, self._store.used_bytes
        yield Stored(command.job, done, error, seconds, num_bytes, used_bytes)

    def _check_kept(self, num_forgets: int) -> None:
        if num_forgets != self._num_forgets:
            raise StoreError("forgotten")

    def _save_state(self, checkpoint: int, page_key: bytes) -> int:
        """Store the state after a page; returns its bytes."""
        assert self._states is not None and self._store is not None
        self._states.read_rows(np.array([checkpoint], np.int32), self._state.payloads)
        if not self._store.write([state_key(page_key)], self._state):
            raise StoreError(_NOT_WRITTEN)
        return self._states.page_bytes


class _Job(NamedTuple):
    """A load or a store; `work` does a piece of it at each step, and yields None until it yields the answer."""

    command: LoadPages | StorePages
    work: Iterator[TierNews | None]


def _page_ids(command: LoadPages | StorePages) -> Pages:
    return np.frombuffer(command.pages, dtype=np.int32)
