"""Sockets between machines: ROUTER on machine 0, DEALER on the others, over TCP with CURVE; messages as in `ipc`.

Machine 0 listens; the others connect and send their names. Every connection is encrypted, and both sides must hold the
same `ClusterKey`. ZMQ reconnects until machine 0 listens, and after a connection breaks. Messages in transit are lost
when a connection breaks: the heartbeats (`node_link`) or the step numbers (`rank_loop`) reveal it. A message that does
not parse, such as one from another release, is dropped with an error in the log.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq
import zmq.auth.thread
from zmq.utils import z85

from ..errors import ConfigError, RankLostError
from .ipc import HasFileno, decode_or_drop, decode_waiting, make_socket
from .message_base import Message

HOW_TO_MAKE_ONE: Final = "(umask 077; openssl rand -hex 32 > cluster.key)"
_MIN_CHARS: Final = 32
_MAX_BYTES: Final = 4096
_PURPOSE: Final = b"engine-cluster"


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """The secret that the machines of one engine share: a pair of CURVE keys in Z85, as ZMQ takes them.

    Both sides use the same pair: a peer with the file can prove that it has it, and no other peer can listen, connect
    or impersonate the server (CurveZMQ, rfc.zeromq.org/spec/26). The file may hold any text that cannot be guessed;
    keys are derived from it, so one shell command can create it.
    """

    public: bytes
    secret: bytes = field(repr=False)


def load_cluster_key(path: str | None) -> ClusterKey:
    """Read the file.

    Raises:
        ConfigError: none is named, it cannot be read, others may read it, or it is too short for a secret.
    """
    if path is None:
        raise ConfigError(
            "machines that share a model need a secret that others do not have: make one with "
            f"{HOW_TO_MAKE_ONE}, copy it to each machine, and name it with --cluster-key-file"
        )
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            text = file.read(_MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError(
            f"cluster_key_file {path} cannot be read: {error.strerror}; make one with {HOW_TO_MAKE_ONE}"
        ) from None
    if mode & 0o077:
        raise ConfigError(f"cluster_key_file {path} may be read by others (mode {mode:o}); chmod 600 {path}")
    if len(text) < _MIN_CHARS:
        raise ConfigError(
            f"cluster_key_file {path} holds {len(text)} characters, but at least {_MIN_CHARS} random ones make a "
            f"secret; make one with {HOW_TO_MAKE_ONE}"
        )
    return derive_key(text)


@contextmanager
def key_in_memory(text: bytes) -> Iterator[str]:
    """The path of a key file in memory, for this process and its children; it disappears with this process."""
    descriptor = os.memfd_create("engine-cluster-key")
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, text)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def derive_key(text: bytes) -> ClusterKey:
    """The pair derived from a secret text."""
    secret = z85.encode(blake2b(text, digest_size=32, person=_PURPOSE).digest())
    return ClusterKey(public=zmq.curve_public(secret), secret=secret)


logger = logging.getLogger(__name__)

CONTROL, PLANS, STORE = 0, 1, 2
"""Offsets of the three ports from `--dist-init-addr`: supervisors, steps, rendezvous of the ranks."""

_NUM_PORTS: Final = 3
_MAX_REPORT_BYTES: Final = 1 << 20
"""Largest message that machine 0 accepts: it receives short reports only, and unauthenticated peers may connect."""

_REFUSALS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_HELLO: Final = b""

M = TypeVar("M")


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT for IPv6.

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535 - _NUM_PORTS + 1:
        raise ConfigError(
            f"dist_init_addr is {text!r}, but it must be HOST:PORT; that port and the next two are used"
        )
    return host, int(port)


def free_address(host: str) -> str:
    """An address as `--dist-init-addr` needs it; its ports are free on this machine at the time of the call."""
    while True:
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(_NUM_PORTS)]
            probes[0].bind(("", 0))
            port = probes[0].getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):  # in use, or above the last port
                for offset, probe in enumerate(probes[1:], 1):
                    probe.bind(("", port + offset))
                return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at this address only.

    Raises:
        ConfigError: the name is unknown, or the address cannot be listened at.
    """
    numeric = _resolve(host)
    try:
        return socket.create_server(
            (numeric, port), family=socket.AF_INET6 if ":" in numeric else socket.AF_INET
        )
    except OSError as error:
        raise _cannot_listen(host, port, os.strerror(error.errno or 0)) from None


def check_ports(address: str) -> None:
    """Check at start that all ports can be listened at, before the second and third are needed.

    Raises:
        ConfigError: one cannot; the message names it.
    """
    host, port = parse_address(address)
    for offset in range(_NUM_PORTS):
        listening_socket(host, port + offset).close()


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class ClusterServer(Generic[M]):
    """Machine 0's side of one port: sends to each peer by name and receives from all."""

    def __init__(
        self,
        address: str,
        port_offset: int,
        key: ClusterKey,
        decoder: msgspec.msgpack.Decoder[M] | None = None,
    ) -> None:
        """Listen.

        Args:
            address: `--dist-init-addr`.
            decoder: of the union that arrives here; None: only hellos arrive.

        Raises:
            ConfigError: the name is unknown, or the address cannot be listened at.
        """
        host, port = parse_address(address)
        numeric, port = _resolve(host), port + port_offset
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # This thread authenticates connections: only peers with the same key may connect.
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=OnlyThisKey(key))
        self._socket = make_socket(self._context, zmq.ROUTER)
        self._socket.maxmsgsize = _MAX_REPORT_BYTES
        self._socket.router_mandatory = True  # sending to an unknown peer raises an error
        self._socket.router_handover = True  # a peer that connects again is the same one
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = key.public, key.secret
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._bind(numeric, port)
        except zmq.ZMQError as error:
            self.close()
            raise _cannot_listen(host, port, error.strerror) from None

    def _bind(self, host: str, port: int) -> None:
        self._socket.ipv6 = ":" in host
        self._socket.bind(tcp(host, port))

    def receive(self, timeout_s: float = 0.0) -> list[tuple[str, M | None]]:
        """The messages that have arrived, with the sender's name; None for a hello. Waits `timeout_s` for the first."""
        if timeout_s > 0:
            self._socket.poll(math.ceil(timeout_s * 1000))
        arrived: list[tuple[str, M | None]] = []
        while self._socket.poll(0):
            name, data = self._socket.recv_multipart()
            if data == _HELLO or self._decoder is None:
                arrived.append((name.decode(errors="replace"), None))
            elif (message := decode_or_drop(data, self._decoder)) is not None:
                arrived.append((name.decode(errors="replace"), message))
        return arrived

    def wait_for(self, names: Sequence[str], timeout_s: float) -> None:
        """Wait until all of these have sent a hello.

        Raises:
            RankLostError: some have not; the message names them.
        """
        missing, deadline_s = set(names), time.monotonic() + timeout_s
        while missing:
            missing -= {name for name, _ in self.receive(0.1)}
            if time.monotonic() > deadline_s:
                raise RankLostError(f"no connection for steps from {', '.join(sorted(missing))}")

    def send_all(self, names: Sequence[str], message: Message) -> None:
        """Queue a message for each of these, encoded once.

        Raises:
            zmq.ZMQError: one is not connected.
        """
        data = self._encoder.encode(message)
        for name in names:
            self._socket.send_multipart([name.encode(), data], zmq.NOBLOCK)

    def close(self, linger_s: float = 0.0) -> None:
        """Stop listening; unsent messages have `linger_s` to be sent."""
        self._socket.close(linger=int(linger_s * 1000))
        self._authenticator.stop()
        self._context.term()


class ClusterClient(Generic[M]):
    """Another machine's side of one port. An inbox like `Inbox`, and an outbox."""

    def __init__(
        self,
        address: str,
        port_offset: int,
        name: str,
        key: ClusterKey,
        decoder: msgspec.msgpack.Decoder[M],
        wake: HasFileno | None = None,
    ) -> None:
        """Connect as `name` and send a hello; ZMQ delivers it once machine 0 listens.

        Raises:
            ConfigError: the host name is unknown.
        """
        host, port = parse_address(address)
        host = _resolve(host)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = make_socket(self._context, zmq.DEALER)
        self._socket.identity = name.encode()
        self._socket.curve_serverkey = self._socket.curve_publickey = key.public
        self._socket.curve_secretkey = key.secret
        self._monitor = self._socket.get_monitor_socket(_REFUSALS)
        self._socket.ipv6 = ":" in host
        self._socket.connect(tcp(host, port + port_offset))
        self._socket.send(_HELLO)
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wake is not None:
            self._poller.register(wake.fileno(), zmq.POLLIN)

    def poll(self, timeout_s: float = 0.0) -> list[M]:
        """As `Inbox.poll`."""
        if timeout_s > 0:
            self._poller.poll(math.ceil(timeout_s * 1000))
        return list(decode_waiting(self._socket, self._decoder))

    def send(self, message: Message) -> None:
        """Queue one message for sending."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def was_refused(self) -> bool:
        """Whether the CURVE handshake failed: the listener at machine 0's address has another key."""
        return bool(self._monitor.poll(0))

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; unsent messages have `linger_s` to be sent."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()


class OnlyThisKey:
    """Credentials provider of the authenticator: accepts one public key."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key

    def callback(self, domain: str, key: Any) -> bool:
        """Whether this public key may connect."""
        return bool(key == self._key.public)


def _cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port} for the other machines: {reason}; see --dist-init-addr"
    )


def tcp(host: str, port: int) -> str:
    """The address as ZMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def numeric_address(host: str) -> str:
    """An address of a host; ZMQ binds to no names.

    Raises:
        OSError: it has none.
    """
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _resolve(host: str) -> str:
    """A numeric address, which ZMQ needs to bind.

    Raises:
        ConfigError: the name is unknown.
    """
    try:
        return numeric_address(host)
    except OSError as error:
        raise ConfigError(f"dist_init_addr names {host!r}, which has no address: {error.strerror}") from None
