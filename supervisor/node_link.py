"""The supervisors of several machines: their messages, and how each notices that another one is gone.

    machine 1.. --NodeHello, NodeReady, NodeFailed, NodeBeat--> machine 0
    machine 0 --NodeSettings, NodeBeat, NodeOrder, NodeStop--> machine 1..

Machine 0 decides: it runs the server, and its configuration applies to all. `NodeHub` is its side, `NodeLink` that of
each other machine. Both send a beat in every pass of their supervisor's loop, at most one a second, and fail after
`SILENCE_S` without any. A longer pass means that this process did not run; it counts as one beat.

On the connection a machine is identified by its rank and a random number of this start, so that a second process that
claims the same rank is not mistaken for the first: it is stopped, and the running engine continues.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Final, NamedTuple

import msgspec
import zmq

from ..launch.child.control import ForAll
from ..models.spec.model_spec import ModelSpec
from ..runtime.config.device_config import ParallelConfig
from ..runtime.config.engine_config import EngineConfig
from ..runtime.installation import __version__
from ..runtime.transport.cluster_ipc import (
    CONTROL,
    ClusterClient,
    ClusterServer,
    check_ports,
    load_cluster_key,
)
from ..runtime.transport.message_base import Message
from .child_watch import ChildFailure

logger = logging.getLogger(__name__)

SILENCE_S: Final = 8.0
RESTART: Final = "start the engine again on all machines"
_BEAT_INTERVAL_S: Final = 1.0
_MAX_LATE_BEATS: Final = 2
_STOP_LINGER_S: Final = 1.0  # to send the last message


class NodeHello(Message, frozen=True):
    """First message of a machine, with its release of the engine and its model."""

    version: str
    node_rank: int
    tp: int
    nnodes: int
    spec: ModelSpec
    pp: int = 1


class NodeReady(Message, frozen=True):
    """All ranks of this machine can work."""


class NodeFailed(Message, frozen=True):
    """This machine ends because of this cause."""

    message: str


class NodeBeat(Message, frozen=True):
    """The supervisor's loop is running."""


class NodeSettings(Message, frozen=True):
    """Start your ranks with this resolved configuration; settings of the machine itself (paths, threads) are kept."""

    config: EngineConfig


class NodeOrder(Message, frozen=True):
    """Forward this to your ranks."""

    order: ForAll


class NodeStop(Message, frozen=True):
    """End; `cause` is the reason, or "" if the user stopped the engine."""

    cause: str


FromNode = NodeHello | NodeReady | NodeFailed | NodeBeat
ToNode = NodeSettings | NodeBeat | NodeOrder | NodeStop


class _Silence:
    """Seconds without a message from a peer, counted while this process was running.

    Attributes:
        silent_s: seconds as of the last call of `poll`.
    """

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._last_look_s = time.monotonic()

    def heard(self) -> None:
        self.silent_s = 0.0

    def poll(self) -> float:
        now_s = time.monotonic()
        self.silent_s += min(now_s - self._last_look_s, _BEAT_INTERVAL_S)
        self._last_look_s = now_s
        return self.silent_s


class _Peer(NamedTuple):
    """A machine that belongs to the engine: its name, and the time since its last message."""

    name: str
    silence: _Silence


class NodeHub:
    """Machine 0's side."""

    remedy = "start `engine serve` there with its --node-rank"
    restart = RESTART

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        """Listen for the others.

        Raises:
            ConfigError: one of the three ports cannot be listened at, or there is no key.
        """
        parallel = config.parallel
        assert parallel.dist_init_addr is not None
        self._config, self._spec = config, spec
        decoder: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
        key = load_cluster_key(parallel.cluster_key_file)
        check_ports(parallel.dist_init_addr)
        self._server = ClusterServer(parallel.dist_init_addr, CONTROL, key, decoder)
        self._missing = {node_name(node) for node in range(1, parallel.nnodes)}
        self._starting = set(self._missing)
        self._peers: dict[str, _Peer] = {}  # by its name on the connection
        self._next_beat_s = 0.0

    @property
    def late(self) -> list[str]:
        """Machines that are not ready yet."""
        return sorted(self._starting)

    def poll(self) -> None:
        """Read the others' messages, and send a beat.

        Raises:
            ChildFailure: one of them failed, fell silent, or has another configuration.
        """
        for sender, message in self._server.receive():
            if isinstance(message, NodeHello):
                self._welcome(sender, message)
            elif sender in self._peers:  # messages of refused machines are ignored
                self._hear(self._peers[sender], message)
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + _BEAT_INTERVAL_S
            self._send(NodeBeat())
        for peer in self._peers.values():
            if peer.silence.poll() > SILENCE_S:
                raise ChildFailure(
                    f"{peer.name} has been silent for {SILENCE_S:g} s: it, its supervisor or the network is gone"
                )

    def pass_on(self, order: ForAll) -> None:
        """Forward an order to all other machines."""
        self._send(NodeOrder(order))

    def stop(self, cause: str) -> None:
        """Tell all others to end."""
        self._send(NodeStop(cause))
        self._server.close(_STOP_LINGER_S)

    def _hear(self, peer: _Peer, message: FromNode | None) -> None:
        peer.silence.heard()
        match message:
            case NodeReady():
                logger.info("ready %s", peer.name)
                self._starting.discard(peer.name)
            case NodeFailed():
                raise ChildFailure(f"{peer.name}: {message.message}")

    def _welcome(self, sender: str, hello: NodeHello) -> None:
        """Accept a machine, or refuse it with a reason.

        Raises:
            ChildFailure: the engine cannot start with it, or it is a lost machine that came back.
        """
        name = node_name(hello.node_rank)
        first = next((identity for identity, peer in self._peers.items() if peer.name == name), None)
        if first is not None and self._is_lost(first):
            cause = f"{name} was lost and has come back"
            self._refuse(sender, f"{cause}; {RESTART}")
            raise ChildFailure(cause)
        if first is not None:
            cause = f"this engine has a {name} already; each machine needs its own --node-rank"
        else:
            cause = self._reason_against(name, hello)
        if cause:
            self._refuse(sender, cause)
            if first is None and self._missing:
                raise ChildFailure(cause, exit_code=2)
            logger.warning(
                "refused %s: %s", name, cause
            )  # all machines have joined: a late one does not affect the engine
            return
        logger.info("joined %s missing=%d", name, len(self._missing) - 1)
        self._missing.discard(name)
        self._peers[sender] = _Peer(name, _Silence())
        self._send_to(sender, name, NodeSettings(self._config))

    def _is_lost(self, identity: str) -> bool:
        """Whether a machine has missed its beats, or its connection is broken because it ended."""
        peer = self._peers[identity]
        late = peer.silence.silent_s > _MAX_LATE_BEATS * _BEAT_INTERVAL_S
        return late or not self._send_to(identity, peer.name, NodeBeat())

    def _reason_against(self, name: str, hello: NodeHello) -> str:
        parallel = self._config.parallel
        if hello.version != __version__:
            return f"{name} has release {hello.version} of the engine, machine 0 {__version__}; install one on both"
        if (hello.tp, hello.pp, hello.nnodes) != (parallel.tp, parallel.pp, parallel.nnodes):
            return (
                f"{name} was started with {_flags(hello.tp, hello.pp, hello.nnodes)}, machine 0 with "
                f"{_flags(parallel.tp, parallel.pp, parallel.nnodes)}"
            )
        if hello.spec != self._spec:
            return f"{name} has another model than machine 0; give both the same"
        return ""

    def _refuse(self, sender: str, cause: str) -> None:
        self._send_to(sender, sender, NodeStop(f"machine 0: {cause}"))

    def _send(self, message: ToNode) -> None:
        for identity, peer in self._peers.items():
            self._send_to(identity, peer.name, message)

    def _send_to(self, identity: str, name: str, message: ToNode) -> bool:
        """Send, and return whether there is a connection."""
        try:
            self._server.send_all([identity], message)
        except zmq.ZMQError:  # the connection is broken; if it stays so, the peer counts as silent
            logger.warning("no connection to %s", name)
            return False
        return True


class NodeLink:
    """Another machine's side; a context manager.

    Attributes:
        orders: received orders to forward; the caller removes them.
    """

    def __init__(self, parallel: ParallelConfig, spec: ModelSpec) -> None:
        """Connect, once machine 0 listens.

        Raises:
            ConfigError: there is no key, or machine 0's name is unknown.
        """
        assert parallel.dist_init_addr is not None
        decoder: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
        self._address = parallel.dist_init_addr
        self._client = ClusterClient(
            self._address,
            CONTROL,
            f"{node_name(parallel.node_rank)}, {secrets.token_hex(8)}",
            load_cluster_key(parallel.cluster_key_file),
            decoder,
        )
        self._client.send(
            NodeHello(__version__, parallel.node_rank, parallel.tp, parallel.nnodes, spec, parallel.pp)
        )
        self._silence: _Silence | None = None  # until machine 0 has sent a message
        self.orders: list[ForAll] = []
        self._next_beat_s = 0.0

    def poll(self, timeout_s: float = 0.0) -> NodeSettings | None:
        """Read machine 0's messages, and send a beat; returns the settings when they arrive.

        Raises:
            ChildFailure: machine 0 refuses this machine, or fell silent.
            NodeStopped: machine 0 orders this machine to end.
        """
        settings = None
        for message in self._client.poll(timeout_s):
            self._silence = self._silence or _Silence()
            self._silence.heard()
            match message:
                case NodeSettings():
                    settings = message
                case NodeOrder(order=order):
                    self.orders.append(order)
                case NodeStop():
                    raise NodeStopped(message.cause)
                case NodeBeat():
                    pass
        if self._silence is None and self._client.was_refused():
            raise ChildFailure(
                f"{self._address} did not accept this machine's key, or is no engine with several machines; give the "
                "same --cluster-key-file to all of them",
                exit_code=2,
            )
        if self._silence is not None and self._silence.poll() > SILENCE_S:
            raise ChildFailure(
                f"machine 0 at {self._address} has been silent for {SILENCE_S:g} s: it, its supervisor or the network "
                "is gone"
            )
        now_s = time.monotonic()
        if self._silence is not None and now_s >= self._next_beat_s:
            self._next_beat_s = now_s + _BEAT_INTERVAL_S
            self._client.send(NodeBeat())
        return settings

    def send(self, message: NodeReady | NodeFailed) -> None:
        """Send a message to machine 0."""
        self._client.send(message)

    def __enter__(self) -> NodeLink:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._client.close(_STOP_LINGER_S)


class NodeStopped(Exception):
    """Machine 0 orders this machine to end."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


def node_name(node_rank: int) -> str:
    """The name of a machine, in messages too."""
    return f"machine {node_rank}"


def _flags(tp: int, pp: int, nnodes: int) -> str:
    return f"--tp {tp} " + (f"--pp {pp} " if pp > 1 else "") + f"--nnodes {nnodes}"
