"""Typed ZMQ sockets between processes: PUSH to PULL over `ipc://`, one message union per direction.

The receiver binds its `Inbox` (or `AsyncInbox`, for asyncio) and senders connect an `Outbox`. The union that a socket
carries is stated once, where the socket is made; encoder and decoder are built there too.

- No high-water mark: a full socket would block the scheduler's step on a slow reader, and ZMQ cannot say how full it
  is. Queued messages are bounded elsewhere: admission control counts the waiting requests, and the watchdog limits the
  silence of a reader.
- No linger: a process does not wait at exit for a peer that may be dead.
- A message that does not parse is dropped, with an error in the log, so that it affects one request only. Only a bug in
  the engine can produce one. The request that needed the message then waits until its client gives up.
- A socket is used by one thread, the one that made it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import zmq

from .message_base import Message

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 256 << 20
"""Larger ones are refused by the receiving socket. A 16 MB request body makes at most 64 MB of token ids."""

_MAX_MESSAGES_PER_POLL: Final = 512  # bounds the time that one poll takes from the loop

_EVENTS: Final = int(zmq.EVENTS)  # as an enum the conversion costs more than the call
_POLLIN: Final = int(zmq.POLLIN)

_MALFORMED: Final = (msgspec.MsgspecError, RecursionError)  # the second: nested too deeply
_FIELDS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])

M = TypeVar("M")


class HasFileno(Protocol):
    """An object to watch for reading."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


class Outbox:
    """Sends messages to one process; never blocks, so also for asyncio. Messages wait for a peer not yet bound."""

    def __init__(self, endpoint: str) -> None:
        self._socket = make_socket(zmq.Context.instance(), zmq.PUSH)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message) -> None:
        """Queue one message for sending."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; what has not been sent is lost."""
        self._socket.close()


class FanOutbox:
    """Sends each message to several processes, encoded once; in order, and none is lost while both sides live.

    It has one PUSH socket per receiver. A PUB socket would silently drop messages for a subscriber that has not joined
    yet or reads too slowly.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._sockets = [make_socket(zmq.Context.instance(), zmq.PUSH) for _ in endpoints]
        for socket, endpoint in zip(self._sockets, endpoints, strict=True):
            socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message) -> None:
        """Queue one message for sending to all."""
        data = self._encoder.encode(message)
        for socket in self._sockets:
            socket.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets; what has not been sent is lost."""
        for socket in self._sockets:
            socket.close()


class Inbox(Generic[M]):
    """Receives the messages of one process that has a plain loop."""

    def __init__(
        self, endpoint: str, decoder: msgspec.msgpack.Decoder[M], wake: HasFileno | None = None
    ) -> None:
        """Bind `endpoint`.

        Args:
            endpoint: ZMQ address.
            decoder: of the union that arrives here.
            wake: ends a waiting `poll` when readable (the control channel: `Child`).
        """
        self._socket = make_socket(zmq.Context.instance(), zmq.PULL)
        self._socket.bind(endpoint)
        self._decoder = decoder
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            self._poller.register(wake.fileno(), zmq.POLLIN)

    def poll(self, timeout_s: float = 0.0) -> list[M]:
        """The messages that have arrived, in order; waits up to `timeout_s` for the first, or for `wake`."""
        if timeout_s > 0:
            self._poller.poll(math.ceil(timeout_s * 1000))
        return list(decode_waiting(self._socket, self._decoder))

    def has_message(self) -> bool:
        """Whether `poll` would find one."""
        return _has_message(self._socket)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class AsyncInbox(Generic[M]):
    """Receives the messages of one process that has an asyncio loop; made inside the running loop."""

    def __init__(self, endpoint: str, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._socket = make_socket(zmq.Context.instance(), zmq.PULL)
        self._socket.bind(endpoint)
        self._decoder = decoder
        self._waiting: asyncio.Future[None] | None = None
        # Not zmq.asyncio: its futures and timers cost more than the rest of the work for a token.
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    async def receive(self) -> list[M]:
        """The messages that have arrived, in order; waits for the first.

        ZMQ's descriptor becomes readable once, when the first message comes; so the socket must be empty before this
        waits.
        """
        while not (messages := list(decode_waiting(self._socket, self._decoder))):
            self._waiting = self._loop.create_future()
            await self._waiting
        return messages

    def close(self) -> None:
        """Close the socket."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _on_readable(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def decode_waiting(socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[M]) -> Iterator[M]:
    """The messages that wait in a socket; those that do not parse are dropped.

    It asks whether there is a message: receiving until ZMQ raises cost 7 of 40 us per message.
    """
    taken = 0
    # counts messages that parse: an empty result means an empty socket
    while taken < _MAX_MESSAGES_PER_POLL and _has_message(socket):
        if (message := decode_or_drop(socket.recv(zmq.NOBLOCK), decoder)) is not None:
            taken += 1
            yield message


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    events = socket.get(_EVENTS)
    assert isinstance(events, int)  # EVENTS is an integer option
    return bool(events & _POLLIN)


def decode_or_drop(data: bytes, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """The message; None, and an error in the log, if it does not parse."""
    try:
        return decoder.decode(data)
    except _MALFORMED as error:
        logger.error("dropped a malformed message bytes=%d tag=%s error=%s", len(data), _tag_of(data), error)
        return None


def _tag_of(data: bytes) -> str:
    """The type a message claims to have, for the log; never its contents, which may include a prompt."""
    try:
        tag = msgspec.msgpack.decode(_FIELDS.decode(data)[0], type=str)
    except (*_MALFORMED, IndexError):
        return "unreadable"
    return tag if tag.isidentifier() else "unreadable"


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket with the options described in the module docstring."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    return socket
