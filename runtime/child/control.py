"""The control channel: what supervisor and child tell each other, over one inherited socket pair per child.

    supervisor --Settings, PeersReady, PeersLost, PeerDied, Stop--> child --Ready, Failed, Heartbeat--> supervisor
    tokenizer manager --SetLogLevel, StartProfile, StopProfile--> supervisor --the same--> all children

It is apart from the ZMQ sockets so that it works before those exist and after they are stuck, and because
the kernel closes it with the process: end of file means that the other side is dead, at once and without a
time-out.

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

from ..config.engine_config import EngineConfig, LogLevel
from ..feasibility import Capacity
from ..messages import Message, Record
from ..model_files.model_spec import ModelSpec
from ..model_files.source import ModelSource

MAX_FRAME_BYTES: Final = 16 << 20
MAX_TRACEBACK_CHARS: Final = 32 << 10
"""So much fits into the socket's buffer: sending `Failed` does not block."""
_SEND_TIMEOUT_S: Final = 5.0
_LENGTH: Final = struct.Struct("<I")


class Role(enum.StrEnum):
    """The processes that the supervisor starts; the value is the name of the room's folder."""

    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    TOKENIZER_MANAGER = "tokenizer_manager"
    MODEL_RUNNER = "model_runner"


def process_label(role: Role, rank: int) -> str:
    """One word for a process, in logs and titles: `scheduler`, `model_runner_1`."""
    return f"{role}_{rank}" if role is Role.MODEL_RUNNER else role.value


class Endpoints(Record, frozen=True):
    """Where each room receives, as ZMQ addresses. The receiver binds, the sender connects.

    Attributes:
        model_runners: of the ranks 1, 2, ... on this machine; rank 0 is in the scheduler's process.
        rank_store: the file through which the ranks find each other.
        black_box: the folder for what a crash report needs (see `black_box`); "" for none.
    """

    scheduler: str
    detokenizer: str
    tokenizer_manager: str
    model_runners: tuple[str, ...] = ()
    rank_store: str = ""
    black_box: str = ""


# ---------------------------------------------------------------- tokenizer manager -> supervisor -> all children


class SetLogLevel(Message, frozen=True):
    """Log from this severity on."""

    level: LogLevel


class StartProfile(Message, frozen=True):
    """Look where the threads are, again and again, and write it down at the end; see `stack_sampler`.

    Attributes:
        folder: name of a folder within that of the crash reports, which each machine has for itself.
        rate_hz: looks per second.
        duration_s: from now to the end.
    """

    folder: str
    rate_hz: float
    duration_s: float


class StopProfile(Message, frozen=True):
    """End what `StartProfile` has begun, and write it down."""


ForAll = SetLogLevel | StartProfile | StopProfile

# ---------------------------------------------------------------- supervisor -> child


class Settings(Message, frozen=True):
    """The first frame: everything a child needs to start.

    Attributes:
        role: which process the child is.
        config: resolved: no value is "auto" any more.
        source: where the model's files lie.
        spec: the model's architecture facts.
        endpoints: where each room receives.
        rank: of a model runner, in its tensor-parallel group; the scheduler has 0.
        life: 0 for those that start with the engine, more for one that takes the place of a process that was lost.
        profile: what goes on while the process starts.
    """

    role: Role
    config: EngineConfig
    source: ModelSource
    spec: ModelSpec
    endpoints: Endpoints
    rank: int = 0
    life: int = 0
    profile: StartProfile | None = None


class PeersReady(Message, frozen=True):
    """To the tokenizer manager: scheduler and detokenizer are ready (again), and this much fits; open the port.

    Attributes:
        capacity: of the scheduler.
        restarts_left: how many more losses the engine survives as things are.
    """

    capacity: Capacity
    restarts_left: int = 0


class PeersLost(Message, frozen=True):
    """To the tokenizer manager: another process is gone, and `PeersReady` will follow.

    Attributes:
        message: why.
        started: the ids of requests that the scheduler had begun to work on lately, also of some that have ended; None
            where that is not known.
    """

    message: str
    started: tuple[str, ...] | None = None


class PeerDied(Message, frozen=True):
    """To the tokenizer manager: another process is gone; tell the clients `message`, exit within seconds."""

    message: str


class Stop(Message, frozen=True):
    """Exit; with `drain`, finish what runs first (tokenizer manager only, for at most `drain_timeout`)."""

    drain: bool


Order = PeersReady | PeersLost | PeerDied | Stop
ToChild = Settings | Order | ForAll


# ---------------------------------------------------------------- child -> supervisor


class Ready(Message, frozen=True):
    """The child can work.

    Attributes:
        capacity: what the scheduler can hold; None from the others.
        url: where the tokenizer manager listens; None from the others.
        details: what else is worth a word in the line that says "ready".
    """

    capacity: Capacity | None = None
    url: str | None = None
    details: dict[str, str] = {}  # noqa: RUF012  (msgspec copies mutable defaults)


class Failed(Message, frozen=True):
    """The child ends because of an error.

    Attributes:
        kind: "config": the user can mend it, `message` says how; "bug": ours; "rank_lost": the others of its group are
            gone or silent, so the cause is elsewhere.
        message: one line.
        traceback: of a bug, at most `MAX_TRACEBACK_CHARS` from its end.
    """

    kind: Literal["config", "bug", "rank_lost"]
    message: str
    traceback: str = ""


class Heartbeat(Message, frozen=True):
    """The child's loop goes round. Any other frame counts as one too."""


ToSupervisor = Ready | Failed | Heartbeat | ForAll


# ---------------------------------------------------------------- the channel

Incoming = TypeVar("Incoming")


class ControlChannel(Generic[Incoming]):
    """One end of a socket pair. Used by one thread; only `send` and `send_if_room` may be called from others, too.

    Attributes:
        closed: the other side is gone; what it said before has been, or is being, returned by `receive`.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Incoming]) -> None:
        sock.setblocking(False)
        sock.set_inheritable(False)  # a grandchild that held it would hide our death
        self.closed = False
        self._socket = sock
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._sending = threading.Lock()  # frames of two threads must not mix
        # Loops ask in every pass: 0.4 us, and 1.7 for a `recv` that raises; with cold caches several times that.
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor to poll: readable when `receive` has something to say."""
        return self._socket.fileno()

    def send(self, message: Message) -> bool:
        """Send one message, waiting a little for room in the socket's buffer.

        Returns:
            False: the other side is gone, or has read nothing for seconds with a full buffer.
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
        """Send one small message, or drop it when the buffer is full, as of who is stopped; whether it was sent."""
        with self._sending, contextlib.suppress(OSError):
            # The kernel takes so few bytes whole or not at all, so no half frame stays behind.
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
            except OSError:  # ECONNRESET: the peer died with our bytes unread
                data = b""
            if not data:
                self.closed = True
            self._buffer += data
        return self._take_messages()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until `receive` has something to say; False after `timeout_s` (None: no limit)."""
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
