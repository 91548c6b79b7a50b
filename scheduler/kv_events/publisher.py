"""`KVEventPublisher`: sends KV events to subscribers, and sends them again to those that have missed some.

    event loop --publish--> payload --inproc--> thread --PUB--> subscribers
                                                   ^ buffer
                                                   `--ROUTER--> one subscriber: what it has missed

The event loop encodes a payload and gives it a sequence number; this never blocks. The thread owns the sockets to the
outside, so a replay is answered also in the middle of a long step. A PUB socket never waits for a subscriber: when
`hwm` messages wait for one, it drops further ones for this subscriber, which sees a gap in the sequence numbers and
asks the ROUTER socket for what is missing.

Sequence numbers begin at 0 in each process, with a message that clears what subscribers knew: after a crash nothing is
cached. vllm-router takes a smaller number for a restart. Subscribers of the crashed process connect again within 0.2 s
of the bind, so the first messages wait for them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq

from ...runtime.config.kv_event_settings import KVEventSettings
from ...runtime.errors import ConfigError
from ..adapters.adapter_table import Adapter
from ..prefix_cache.block_events import AllBlocksCleared, BlockEvent, BlocksStored
from .wire import END_OF_REPLAY, EventBatch, batches, wire_event

logger = logging.getLogger(__name__)

MAX_BUFFER_BYTES: Final = 64 << 20
"""Most bytes of payloads that are kept for replays."""
_MAX_QUEUED: Final = 100_000
"""Messages on the way to the thread."""
_MAX_REQUEST_BYTES: Final = 1024
"""In one message of a subscriber: a subscription, or a request for a replay."""
_SEQ_BYTES: Final = 8
_END_WAIT_S: Final = 1.0
_RECONNECT_S: Final = 0.5
"""From the bind to the first message: more than two of ZMQ's intervals between attempts to connect."""
_TO_THREAD: Final = "inproc://payloads"
_STOP: Final = b""

Socket = zmq.Socket[bytes]
AdapterOf = Callable[[str], Adapter | None]


class KVEvents:
    """Takes the events of each step. This base publishes nothing."""

    @property
    def num_events(self) -> int:
        """Events that were published."""
        return 0

    @property
    def num_replays(self) -> int:
        """Requests of subscribers that had missed messages."""
        return 0

    def publish(self, events: Sequence[BlockEvent], adapter_of: AdapterOf) -> None:
        """Send the events of a step; never blocks. `adapter_of`: the loaded adapter with a fingerprint."""

    def close(self) -> None:
        """Close the sockets."""


class KVEventPublisher(KVEvents):
    """See the module.

    Attributes:
        endpoints: the addresses at which the sockets are bound, with their ports.
    """

    def __init__(
        self,
        settings: KVEventSettings,
        block_size: int,
        replica: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind the sockets and start the thread.

        Args:
            block_size: tokens per block.
            replica: its number, which each message names as the data-parallel rank.
            clock: seconds since the epoch.

        Raises:
            ConfigError: an address cannot be listened at.
        """
        self._num_events = 0
        self._block_size = block_size
        self._replica = replica
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._next_seq = 0
        self._has_dropped = False
        # A context of its own: its I/O thread copies payloads to subscribers, not that of the scheduler's sockets.
        self._context: zmq.Context[Socket] = zmq.Context()
        self._to_thread = _make_socket(self._context, zmq.PAIR, _MAX_QUEUED)
        self._to_thread.bind(_TO_THREAD)
        from_loop = _make_socket(self._context, zmq.PAIR, _MAX_QUEUED)
        from_loop.connect(_TO_THREAD)
        try:
            pub = _make_socket(self._context, zmq.PUB, settings.hwm)
            pub.maxmsgsize = _MAX_REQUEST_BYTES
            _bind(pub, "kv_events", settings.endpoint)
            replay = None
            if settings.replay_endpoint is not None:
                # One replay fits; a subscriber that asks again and again without reading gets no more than that.
                replay = _make_socket(self._context, zmq.ROUTER, settings.buffer_steps + 1)
                replay.maxmsgsize = _MAX_REQUEST_BYTES
                _bind(replay, "kv_events_replay", settings.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoints = tuple(_bound_at(socket) for socket in (pub, replay) if socket is not None)
        self._sender = _Sender(from_loop, pub, replay, settings)
        self._thread = threading.Thread(target=self._sender.run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def num_events(self) -> int:
        return self._num_events

    @property
    def num_replays(self) -> int:
        return self._sender.num_replays

    def publish(self, events: Sequence[BlockEvent], adapter_of: AdapterOf) -> None:
        for batch in batches(events):
            wire = [wire_event(event, self._block_size, _adapter(event, adapter_of)) for event in batch]
            payload = self._encoder.encode(EventBatch(self._clock(), wire, self._replica))
            seq = self._next_seq.to_bytes(_SEQ_BYTES, "big")
            self._next_seq += 1
            self._num_events += len(batch)
            self._queue([seq, payload])

    def clear(self) -> None:
        """Tell subscribers that nothing is cached; the first message of a process."""
        self.publish([AllBlocksCleared()], lambda fingerprint: None)

    def _queue(self, frames: list[bytes]) -> None:
        """Give a message to the thread; drop it if `_MAX_QUEUED` wait, which subscribers see as a gap."""
        try:
            self._to_thread.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if not self._has_dropped:
                logger.error("drop kv events: their thread does not run")
            self._has_dropped = True

    def close(self) -> None:
        """Send what is queued, and close the sockets; subscribers have no time to be slow now."""
        self._queue([_STOP])
        self._thread.join(_END_WAIT_S)
        self._to_thread.close()
        if not self._thread.is_alive():
            self._context.term()


class _Sender:
    """The thread of a `KVEventPublisher`.

    Attributes:
        num_replays: as in `KVEvents`.
    """

    def __init__(
        self, from_loop: Socket, pub: Socket, replay: Socket | None, settings: KVEventSettings
    ) -> None:
        self.num_replays = 0
        self._from_loop = from_loop
        self._pub = pub
        self._replay = replay
        self._topic = settings.topic.encode()
        self._max_count = settings.buffer_steps
        self._buffer: deque[tuple[int, bytes, bytes]] = deque()  # number, the same as bytes, payload
        self._buffer_bytes = 0
        self._sends_from_s: float | None = time.monotonic() + _RECONNECT_S  # None: since then

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._from_loop, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            is_open = True
            while is_open:
                ready = dict(poller.poll(self._wait_ms()))
                if self._wait_ms() == 0:
                    self._send_first()
                if self._from_loop in ready:
                    is_open = self._send_queued()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        finally:
            for socket in (self._from_loop, self._pub, self._replay):
                if socket is not None:
                    socket.close()

    def _wait_ms(self) -> int | None:
        """Time until the first messages are sent; None: they are."""
        if self._sends_from_s is None:
            return None
        return max(0, math.ceil((self._sends_from_s - time.monotonic()) * 1000))

    def _send_first(self) -> None:
        """Send the messages that waited for subscribers."""
        self._sends_from_s = None
        for _, seq, payload in self._buffer:
            self._pub.send_multipart([self._topic, seq, payload])

    def _send_queued(self) -> bool:
        """Send the payloads that wait; False: it was the last time."""
        while self._from_loop.poll(0):
            frames = self._from_loop.recv_multipart()
            if frames == [_STOP]:
                if self._sends_from_s is not None:
                    self._send_first()
                return False
            seq, payload = frames
            if self._sends_from_s is None:
                self._pub.send_multipart([self._topic, seq, payload])  # PUB drops, it does not block
            self._keep(seq, payload)
        return True

    def _keep(self, seq: bytes, payload: bytes) -> None:
        self._buffer.append((int.from_bytes(seq, "big"), seq, payload))
        self._buffer_bytes += len(payload)
        while len(self._buffer) > self._max_count or (
            self._buffer_bytes > MAX_BUFFER_BYTES and len(self._buffer) > 1
        ):
            self._buffer_bytes -= len(self._buffer.popleft()[2])

    def _answer(self, replay: Socket) -> None:
        """Send a subscriber the messages from a number on, then one that ends the replay."""
        *envelope, number = replay.recv_multipart()
        if len(number) != _SEQ_BYTES or not envelope:
            logger.warning("a request for kv events has no sequence number of 8 bytes bytes=%d", len(number))
            return
        self.num_replays += 1
        first = int.from_bytes(number, "big")
        for seq, seq_bytes, payload in self._buffer:
            if seq >= first:
                replay.send_multipart([*envelope, self._topic, seq_bytes, payload], zmq.NOBLOCK)
        replay.send_multipart([*envelope, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)


def check_addresses(settings: KVEventSettings) -> None:
    """Whether the sockets could be bound now.

    Raises:
        ConfigError: one cannot.
    """
    context: zmq.Context[Socket] = zmq.Context()
    try:
        _bind(_make_socket(context, zmq.PUB, 1), "kv_events", settings.endpoint)
        if settings.replay_endpoint is not None:
            _bind(_make_socket(context, zmq.ROUTER, 1), "kv_events_replay", settings.replay_endpoint)
    finally:
        context.destroy(linger=0)


def _make_socket(context: zmq.Context[Socket], kind: int, hwm: int) -> Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.set_hwm(hwm)
    return socket


def _bind(socket: Socket, setting: str, endpoint: str) -> None:
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{setting} is {endpoint!r}, but it cannot be listened at: {error.strerror}; use another address"
        ) from None


def _adapter(event: BlockEvent, adapter_of: AdapterOf) -> Adapter | None:
    return adapter_of(event.lora_id) if isinstance(event, BlocksStored) and event.lora_id else None


def _bound_at(socket: Socket) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
