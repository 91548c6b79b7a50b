"""`Ranks`: rank 0's side of the workers that transfer the pages of the other ranks of its engine.

A worker is a thread beside the loop of its rank (`model_runner/distributed/transfer_worker.py`). A rank that dies or
freezes answers no order; the supervisor then starts all ranks again, this one included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

import msgspec
import zmq
from msgspec.structs import replace

from ....runtime.errors import RankLostError
from ....runtime.kv_backends.base import TransferError, Work
from ....runtime.transport.ipc import decode_or_drop, make_socket
from ....runtime.transport.kv_transfer import KVLayout, digest_of
from ....runtime.transport.rank_transfer import (
    FromWorker,
    Order,
    OrderDone,
    ToWorker,
    WorkerReady,
    worker_name,
)

logger = logging.getLogger(__name__)

Frames = Sequence[bytes | memoryview]

_READY_POLL_MS: Final = 100


class Ordered:
    """Operation that another rank runs; a `Work`.

    Attributes:
        frames: of the answer.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank
        self._is_over = False
        self._error = ""
        self.frames: Frames = ()

    def is_done(self) -> bool:
        if not self._is_over:
            self._ranks.take_answers()
        if self._error:
            raise TransferError(f"rank {self._rank}: {self._error}")
        return self._is_over

    def end(self, error: str, frames: Frames = ()) -> None:
        """The worker has answered."""
        self._is_over, self._error, self.frames = True, error, frames


class Ranks:
    """The workers of the ranks 1, 2, ...

    Attributes:
        workers: what each has said of itself, after `wait`.
    """

    def __init__(self, endpoint: str, num_ranks: int, life: int) -> None:
        """Listen for the workers of all ranks but the first; with one rank there are none, and no socket."""
        self._names = {worker_name(rank, life).encode(): rank for rank in range(1, num_ranks)}
        self._addresses = list(self._names)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._orders: dict[int, Ordered] = {}
        self._last_order = 0
        self._ready: dict[int, WorkerReady] = {}
        self.workers: Sequence[WorkerReady] = ()
        if self._names:
            self._context = zmq.Context()
            self._socket = make_socket(self._context, zmq.ROUTER)
            self._socket.router_mandatory = True  # a worker that is gone is an error, and not silence
            self._socket.bind(endpoint)

    def __len__(self) -> int:
        return len(self._names)

    def wait(self, timeout_s: float) -> None:
        """Wait until all workers have come.

        Raises:
            RankLostError: one has not; the message names it.
        """
        deadline_s = time.monotonic() + timeout_s
        while len(self._ready) < len(self):
            self._socket.poll(_READY_POLL_MS)
            self.take_answers()
            if time.monotonic() > deadline_s:
                missing = " and ".join(
                    str(rank) for rank in range(1, len(self) + 1) if rank not in self._ready
                )
                raise RankLostError(
                    f"rank 0 has waited {timeout_s:g} s for the KV transfers of rank {missing}"
                )
        self.workers = [self._ready[rank] for rank in sorted(self._ready)]

    def complete(self, layout: KVLayout) -> KVLayout:
        """A layout with the pools of all ranks, after `wait`."""
        return replace(layout, others=tuple(digest_of(worker.tensors) for worker in self.workers))

    def order(self, rank: int, order: Order, frames: Frames = ()) -> Ordered:
        """Send an order to one rank; its number is set here."""
        self._last_order += 1
        ordered = self._orders[self._last_order] = Ordered(self, rank)
        data = self._encoder.encode(replace(order, order=self._last_order))
        try:
            self._socket.send_multipart([self._addresses[rank - 1], data, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it has died, so it does nothing any more
            del self._orders[self._last_order]
            ordered.end(f"it cannot be reached: {error.strerror}")
        return ordered

    def send(self, message: ToWorker) -> None:
        """Send a message without an answer to all of them."""
        data = self._encoder.encode(message)
        for address in self._addresses:
            try:
                self._socket.send_multipart([address, data], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                logger.info("a message to a rank is lost: %s", error.strerror)

    def take_answers(self) -> None:
        """Note the orders that have ended."""
        while self._names and self._socket.poll(0):
            name, data, *frames = self._socket.recv_multipart(copy=False)
            rank = self._names.get(name.bytes)
            message = decode_or_drop(data.bytes, self._decoder)
            if rank is None or message is None:
                continue  # of an earlier life
            match message:
                case WorkerReady():
                    self._ready[rank] = message
                case OrderDone():
                    ordered = self._orders.pop(message.order, None)
                    if ordered is not None:
                        ordered.end(message.error, [frame.buffer for frame in frames])

    def wait_for(self, work: Work) -> None:
        """Wait until work of the ranks has ended; as long as it takes: a rank that dies ends this process, too.

        Raises:
            TransferError: see `Work`.
        """
        while not work.is_done():
            self._socket.poll(_READY_POLL_MS)

    def close(self) -> None:
        """Close the connections."""
        if self._context is not None:
            self._context.destroy(linger=0)
