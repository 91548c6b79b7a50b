"""`TransferWorker`: moves the KV of a rank other than 0 to or from other engines or a disk, as rank 0 orders.

It is a thread beside the loop of the rank: while the loop waits in a sum for the other ranks, pages go on moving.
Orders and answers are those of `runtime/transport/rank_transfer.py`. A worker decides nothing and knows of no claim:
which pages may be written to, and when they are free again, is settled between the two rank 0s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, assert_never

import msgspec
import numpy as np
import torch
import zmq

from ...runtime.kv_backends.base import Done, TransferError
from ...runtime.transport.ipc import decode_or_drop, make_socket
from ...runtime.transport.message_base import own_identity
from ...runtime.transport.rank_transfer import (
    PROGRESS_S,
    AddPeer,
    DropPeer,
    MakeProgress,
    Order,
    OrderDone,
    ReadOwnPages,
    ReadRows,
    StoreOwnPages,
    ToWorker,
    WorkerReady,
    WriteOwnPages,
    WriteRows,
)

if TYPE_CHECKING:
    from ...runtime.kv_backends.base import PageTarget, PageWriter, Work
    from ...runtime.transport.message_base import Message
    from ..memory.page_memory import PageMemory

logger = logging.getLogger(__name__)

_BUSY_POLL_MS: Final = 1
_IDLE_POLL_MS: Final = 500
_KEPT_EVENTS: Final = 8


class Event(Protocol):
    """A place in the device's queue, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...


class ComputedSteps:
    """Which steps this rank has computed, so that their KV may leave it.

    Rank 0 orders a write when it has settled the step, that is, when it has waited for its own device. The sums of the
    step make that late enough in most cases; but a rank's last work of a step need not be before a sum, so each rank
    looks at its own device. On the CPU a launch returns when the step is computed.
    """

    def __init__(self, device: torch.device, record: Callable[[], Event] | None = None) -> None:
        """`record`: marks the end of what the calling thread has queued; None: as the device needs it."""
        if record is None and device.type == "cuda":
            record = _record
        self._record = record
        # Written by the loop and read by the worker, which must see all or nothing of a change: a tuple is replaced. An
        # event that is done implies those before it.
        self._last_launched = 0
        self._events: tuple[tuple[int, Event], ...] = ()

    def launched(self, step_id: int) -> None:
        """A step is launched; called by the thread that has."""
        if self._record is not None:
            self._events = (*self._events[1 - _KEPT_EVENTS :], (step_id, self._record()))
        self._last_launched = step_id

    def has(self, step_id: int) -> bool:
        """Whether a step, and thus each one before it, is computed."""
        if self._last_launched < step_id:
            return False
        # The oldest one that is kept may be a later one, when the rank is far ahead; then it is soon done.
        event = next((event for step, event in self._events if step >= step_id), None)
        return event is None or event.query()


def _record() -> Event:
    event = torch.cuda.Event()
    event.record()
    return event


class _Waiting:
    """`Work` that begins when a step is computed."""

    def __init__(self, is_computed: Callable[[], bool], begin: Callable[[], Work]) -> None:
        self._is_computed = is_computed
        self._begin = begin
        self._work: Work | None = None

    def is_done(self) -> bool:
        if self._work is None:
            if not self._is_computed():
                return False
            self._work = self._begin()
        return self._work.is_done()


class TransferWorker:
    """See the module. The rank's loop calls `launched` and `check`."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        memory: PageMemory,
        *,
        writer: PageWriter | None,
        target: PageTarget | None,
        computed: ComputedSteps,
        states: PageMemory | None = None,
    ) -> None:
        """Connect to rank 0 and start the thread.

        Args:
            endpoint: of rank 0's link.
            name: of this worker, as rank 0 expects it.
            memory: of the rank's pool.
            writer, target: the backend of a prefill or a decode engine; both None: pages travel through rank 0.
            computed: the steps of this rank.
            states: the checkpoints of state layers; None: the model has none.
        """
        self._memory = memory
        self._states = states
        self._writer = writer
        self._target = target
        self._computed = computed
        self._works: dict[int, Work] = {}  # by order
        self._frames: dict[int, Sequence[memoryview]] = {}  # of reads
        self._progress_until_s = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        self._failure: Exception | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, zmq.DEALER)
        self._socket.identity = name.encode()
        self._socket.connect(endpoint)
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def launched(self, step_id: int) -> None:
        self._computed.launched(step_id)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread."""
        self._stops.set()
        self._thread.join(timeout=5.0)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            target = b"" if self._target is None else self._target.target()
            states = () if self._states is None else self._states.tensors
            self._answer(WorkerReady(own_identity(), self._memory.tensors, target, states))
            while not self._stops.is_set():
                polls = self._target is not None and time.monotonic() < self._progress_until_s
                self._socket.poll(_BUSY_POLL_MS if self._works or polls else _IDLE_POLL_MS)
                while self._socket.poll(0):
                    data, *frames = self._socket.recv_multipart(copy=False)
                    message = decode_or_drop(data.bytes, self._decoder)
                    if message is not None:
                        self._take(message, frames)
                if polls and self._target is not None:
                    self._target.progress()
                self._answer_done()
        except Exception as error:
            self._failure = error
            logger.exception("the worker of KV transfers has failed")
        finally:
            for backend in (self._writer, self._target):
                if backend is not None:
                    backend.close()

    def _take(self, message: ToWorker, frames: Sequence[zmq.Frame]) -> None:
        match message:
            case MakeProgress():
                self._progress_until_s = time.monotonic() + PROGRESS_S
            case DropPeer():
                if self._writer is not None:
                    self._writer.drop_peer(message.peer)
            case _:
                try:
                    self._works[message.order] = self._begin(message, frames)
                except (TransferError, ValueError) as error:
                    self._answer(OrderDone(message.order, str(error)))

    def _begin(self, order: Order, frames: Sequence[zmq.Frame]) -> Work:
        match order:
            case AddPeer():
                self._expect_writer().add_peer(order.peer, order.target)
                return Done()
            case WriteOwnPages():
                sources, targets = _ids(order.sources), _ids(order.targets)
                writer = self._expect_writer()
                return _Waiting(
                    lambda: self._computed.has(order.step_id),
                    lambda: writer.write(order.peer, sources, targets),
                )
            case ReadOwnPages():
                return _Waiting(lambda: self._computed.has(order.step_id), lambda: self._read(order))
            case StoreOwnPages():
                self._memory.write(_ids(order.pages), [frame.buffer for frame in frames])
                return Done()
            case ReadRows() | WriteRows():
                return _Waiting(
                    lambda: self._computed.has(order.step_id), lambda: self._move_rows(order, frames)
                )
            case _:
                assert_never(order)

    def _read(self, order: ReadOwnPages) -> Work:
        self._frames[order.order] = self._memory.read(_ids(order.pages))
        return Done()

    def _move_rows(self, order: ReadRows | WriteRows, frames: Sequence[zmq.Frame]) -> Work:
        memory, pages = self._states if order.states else self._memory, _ids(order.pages)
        assert memory is not None, "rank 0 has state layers, and this rank has none"
        shape = len(pages), memory.page_bytes
        if isinstance(order, WriteRows):
            memory.write_rows(pages, np.frombuffer(frames[0].buffer, np.uint8).reshape(shape))
        else:
            rows = np.empty(shape, np.uint8)
            memory.read_rows(pages, rows)
            self._frames[order.order] = [rows.data.cast("B")]
        return Done()

    def _expect_writer(self) -> PageWriter:
        if self._writer is None:
            raise TransferError("this rank writes to no other engine")
        return self._writer

    def _answer_done(self) -> None:
        for number, work in list(self._works.items()):
            error = ""
            try:
                if not work.is_done():
                    continue
            except TransferError as failed:
                error = str(failed)
            del self._works[number]
            self._answer(OrderDone(number, error), self._frames.pop(number, ()))

    def _answer(self, message: Message, frames: Sequence[memoryview] = ()) -> None:
        self._socket.send_multipart([self._encoder.encode(message), *frames], zmq.NOBLOCK)


def _ids(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.frombuffer(data, dtype=np.int32)
