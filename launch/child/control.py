"""The control channel: the messages between supervisor and child, over one inherited socket pair per child.

    supervisor --Settings, PeersReady, PeersLost, PeerDied, Stop--> child --Ready, Failed, Heartbeat--> supervisor
    tokenizer manager --SetLogLevel, StartProfile, StopProfile, SetAdapters--> supervisor --the same--> all children

It is separate from the ZMQ sockets so that it works before they exist and while they are stuck. The kernel closes it
with the process: end of file means that the other side is dead, immediately and without a timeout.

A frame is a length (uint32, little-endian) and a msgpack message. Both ends are non-blocking.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import threading
import time
from typing import Final, Generic, Literal, TypeVar

import msgspec

from ...models.source import ModelSource
from ...models.spec.model_spec import ModelSpec
from ...runtime.adapter_spec import LoadedAdapter
from ...runtime.config.engine_config import EngineConfig
from ...runtime.config.server_config import LogLevel
from ...runtime.feasibility import Capacity
from ...runtime.transport.message_base import Message, Record

MAX_FRAME_BYTES: Final = 16 << 20
MAX_TRACEBACK_CHARS: Final = 32 << 10
"""This many characters fit into the socket's buffer: sending `Failed` does not block."""
_SEND_TIMEOUT_S: Final = 5.0
_LENGTH: Final = struct.Struct("<I")


class Role(enum.StrEnum):
    """The processes that the supervisor starts; the value is the name of the process's package."""

    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    TOKENIZER_MANAGER = "tokenizer_manager"
    MODEL_RUNNER = "model_runner"


def process_label(role: Role, rank: int = 0, replica: int | None = None) -> str:
    """One word for a process, in logs and process titles: `scheduler`, `model_runner_1`, `scheduler_of_replica_1`."""
    label = f"{role}_{rank}" if role is Role.MODEL_RUNNER else role.value
    return label if replica is None else f"{label}_of_replica_{replica}"


class Endpoints(Record, frozen=True):
    """The ZMQ addresses at which the processes receive. The receiver binds, the sender connects.

    Attributes:
        scheduler, detokenizer: of the process's own replica; of the first one for the tokenizer manager.
        model_runners: of the ranks 1, 2, ... on this machine; rank 0 is in the scheduler's process.
        rank_store: the file through which the ranks find each other.
        black_box: the folder for the files of a crash report (see `black_box`); "" for none.
        schedulers: of all replicas, for the tokenizer manager; empty if there is one replica.
        kv_transfer: of rank 0's link of KV transfers, for the other ranks.
        images: the folder for the tiles of images.
    """

    scheduler: str
    detokenizer: str
    tokenizer_manager: str
    model_runners: tuple[str, ...] = ()
    rank_store: str = ""
    black_box: str = ""
    schedulers: tuple[str, ...] = ()
    kv_transfer: str = ""
    images: str = ""


# ---------------------------------------------------------------- tokenizer manager -> supervisor -> all children


class SetLogLevel(Message, frozen=True):
    """Log from this severity up."""

    level: LogLevel


class StartProfile(Message, frozen=True):
    """Sample the stacks of all threads for a time and write them at the end; see `stack_sampler`.

    Attributes:
        folder: name of a folder inside the folder of the crash reports; each machine has its own.
        rate_hz: samples per second.
        duration_s: from the receipt of the message.
    """

    folder: str
    rate_hz: float
    duration_s: float


class StopProfile(Message, frozen=True):
    """End the profile that `StartProfile` began, and write it."""


class SetAdapters(Message, frozen=True):
    """The LoRA adapters that are loaded now; for processes that are started later."""

    adapters: tuple[LoadedAdapter, ...]


ForAll = SetLogLevel | StartProfile | StopProfile | SetAdapters

# ---------------------------------------------------------------- supervisor -> child


class Settings(Message, frozen=True):
    """The first frame: everything a child needs to start.

    Attributes:
        role: which process the child is.
        config: resolved: no value is "auto".
        source: the model's files.
        spec: the model's architecture facts.
        endpoints: the addresses of all processes.
        rank: of a model runner, in its tensor-parallel group; the scheduler has 0.
        life: 0 for processes that start with the engine, above 0 for one that replaces a lost process.
        profile: a profile that is running when the process starts.
        adapters: the LoRA adapters that are loaded when the process starts.
        replica: number of the replica that the process belongs to; 0 for the tokenizer manager.
        listener_fd: the descriptor of the listening socket that the tokenizer manager inherits; None: it binds its own.
    """

    role: Role
    config: EngineConfig
    source: ModelSource
    spec: ModelSpec
    endpoints: Endpoints
    rank: int = 0
    life: int = 0
    profile: StartProfile | None = None
    adapters: tuple[LoadedAdapter, ...] = ()
    replica: int = 0
    listener_fd: int | None = None

    @property
    def one_of_several(self) -> int | None:
        """The number of its replica, for names; None if there is one replica, or for the tokenizer manager."""
        if self.config.parallel.dp == 1 or self.role is Role.TOKENIZER_MANAGER:
            return None
        return self.replica

    @property
    def label(self) -> str:
        """The process in one word, see `process_label`."""
        return process_label(self.role, self.rank, self.one_of_several)


class PeersReady(Message, frozen=True):
    """To the tokenizer manager: scheduler and detokenizer of a replica are ready (again); at the start, those of all
    replicas are: open the port.

    Attributes:
        capacity: of the scheduler; at the start the smallest one.
        restarts_left: restarts that remain before the next failure ends the engine.
        details: the scheduler's facts about itself, from its `Ready`.
        replica: number of the replica that is back; no matter at the start.
    """

    capacity: Capacity
    restarts_left: int = 0
    details: dict[str, str] = {}  # noqa: RUF012  (msgspec copies mutable defaults)
    replica: int = 0


class PeersLost(Message, frozen=True):
    """To the tokenizer manager: a process of a replica is lost, and `PeersReady` will follow.

    Attributes:
        message: the reason.
        started: ids of requests that the scheduler started recently, including some that are finished; None if
            unknown.
        replica: number of the replica that the process belongs to.
        restarts_left: restarts that remain after this one.
    """

    message: str
    started: tuple[str, ...] | None = None
    replica: int = 0
    restarts_left: int = 0


class PeerDied(Message, frozen=True):
    """To the tokenizer manager: another process is lost; send `message` to the clients, then exit within seconds."""

    message: str


class Stop(Message, frozen=True):
    """Exit; with `drain`, first finish running requests, or what a disk should keep, for at most `drain_timeout`."""

    drain: bool


Order = PeersReady | PeersLost | PeerDied | Stop
ToChild = Settings | Order | ForAll


# ---------------------------------------------------------------- child -> supervisor


class Ready(Message, frozen=True):
    """The child can work.

    Attributes:
        capacity: of the scheduler; None from the others.
        url: the address where the tokenizer manager listens; None from the others.
        details: further information for the line that says "ready".
    """

    capacity: Capacity | None = None
    url: str | None = None
    details: dict[str, str] = {}  # noqa: RUF012  (msgspec copies mutable defaults)


class Failed(Message, frozen=True):
    """The child ends because of an error.

    Attributes:
        kind: "config": the user can fix it, `message` says how; "bug": an error in the engine; "rank_lost": the other
            ranks of the group are gone or silent, so the cause is elsewhere.
        message: one line.
        traceback: of a bug, at most the last `MAX_TRACEBACK_CHARS`.
    """

    kind: Literal["config", "bug", "rank_lost"]
    message: str
    traceback: str = ""


class Heartbeat(Message, frozen=True):
    """The child's loop is running. Any other frame counts as a heartbeat too."""


ToSupervisor = Ready | Failed | Heartbeat | ForAll


# ---------------------------------------------------------------- the channel

Incoming = TypeVar("Incoming")


class ControlChannel(Generic[Incoming]):
    """One end of a socket pair. Used by one thread; only `send` and `send_if_room` may be called from others, too.

    Attributes:
        closed: the other side is gone; `receive` still returns the messages it sent before.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Incoming]) -> None:
        sock.setblocking(False)
        sock.set_inheritable(False)  # a grandchild that held it would hide this process's death
        self.closed = False
        self._socket = sock
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._sending = threading.Lock()  # frames of two threads must not mix
        # Loops poll in every pass: 0.4 us, against 1.7 us for a `recv` that raises; more with cold caches.
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor to poll: readable when `receive` returns messages or sets `closed`."""
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; waits a few seconds for space in the socket's buffer.

        Returns:
            False: the other side is gone, or has not read for seconds while the buffer was full.
        """
        deadline_s = time.monotonic() + _SEND_TIMEOUT_S
        with self._sending:
            view = memoryview(self._frame(message))
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    if not self._wait(select.POLLOUT, deadline_s - time.monotonic()):
                        return False
                except OSError:
                    return False
        return True

    def send_if_room(self, message: Message) -> bool:
        """Send one small message, or drop it if the buffer is full, as for a stopped process; whether it was sent."""
        with self._sending, contextlib.suppress(OSError):
            # The kernel accepts this few bytes completely or not at all, so no partial frame is sent.
            self._socket.send(self._frame(message))
            return True
        return False

    def receive(self) -> list[Incoming]:
        """Every message that has arrived in full; never blocks. Sets `closed` at end of file."""
        while not self.closed and self._readable.poll(0):
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:  # ECONNRESET: the peer died before it read everything
                data = b""
            if not data:
                self.closed = True
            self._buffer += data
        return self._take_messages()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until `receive` has messages or the other side is gone; False after `timeout_s` (None: no limit)."""
        return self.closed or self._wait(select.POLLIN, timeout_s)

    def close(self) -> None:
        """Close this end; the other side reads end of file."""
        self.closed = True
        self._socket.close()

    def _frame(self, message: Message) -> bytes:
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body

    def _take_messages(self) -> list[Incoming]:
        messages: list[Incoming] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"control frame of {length} bytes, the limit is {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages

    def _wait(self, events: int, timeout_s: float | None) -> bool:
        poller = select.poll()
        poller.register(self._socket, events)
        return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def supervisor_end(sock: socket.socket) -> ControlChannel[ToSupervisor]:
    """The supervisor's end of a pair."""
    return ControlChannel(sock, msgspec.msgpack.Decoder(ToSupervisor))


def child_end(fd: int) -> ControlChannel[ToChild]:
    """The child's end of a pair, from the inherited descriptor."""
    return ControlChannel(socket.socket(fileno=fd), msgspec.msgpack.Decoder(ToChild))
