"""`ray_machines`: `--executor ray`: Ray places the ranks; each actor is one machine of the engine.

The engine treats every rank as a separate machine: rank 0 runs here, rank N in actor N (`RayNode`), and the rest works
as with `--nnodes`. Ray may place ranks freely and assigns each its GPU. The code that detects failures without Ray also
detects them with Ray. In addition, Ray reports the end of an actor at once, before the machine counts as silent.

The key of the connections is created for each start. It is passed to the actors as an argument of a call, which Ray
sends directly, and encrypts if the cluster has TLS (RAY_USE_TLS). This process does not import Ray: `broker.py` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec

from ...launch.child.control import ControlChannel, ForAll
from ...models.spec.model_spec import ModelSpec
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.transport.cluster_ipc import free_address, key_in_memory
from ..child_watch import ChildFailure
from ..node_link import NodeHub, node_name
from ..signal_queue import SignalQueue
from ..standby import start_module
from .broker import (
    RUN_END_GRACE_S,
    FindPlaces,
    FromBroker,
    MachineEnded,
    NoPlaces,
    Placed,
    RunMachines,
    ToBroker,
)
from .cluster import absolute_model

logger = logging.getLogger(__name__)

_BROKER: Final = f"{__package__}.broker"
_LOOPBACK: Final = "127.0.0.1"
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_POLL_S: Final = 0.5
_CONNECT_S: Final = 60.0  # for Ray itself, in addition to the startup timeout
_BROKER_END_S: Final = RUN_END_GRACE_S + 10.0  # actors, then a Ray of its own (two seconds)


class Broker:
    """The supervisor's side of the process that talks to Ray; a context manager that kills its group at the end."""

    def __init__(self, module: str = _BROKER) -> None:
        self._process, channel = start_module(module, "ray")
        decoder: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)
        self._channel = ControlChannel(channel, decoder)

    @property
    def closed(self) -> bool:
        """Whether it has ended; its last messages can still be received."""
        return self._channel.closed

    def send(self, message: ToBroker) -> None:
        """Send it a message, which is lost if it is dead; `closed` shows that."""
        self._channel.send(message)

    def receive(self, timeout_s: float = 0.0) -> list[FromBroker]:
        """Its messages; waits `timeout_s` for the first."""
        self._channel.wait(timeout_s)
        return self._channel.receive()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._channel.close()
        try:
            self._process.wait(_BROKER_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("killing the process that talks to Ray: it has not ended in %g s", _BROKER_END_S)
        with contextlib.suppress(
            ProcessLookupError
        ):  # the group may outlive its leader if the broker started Ray
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class RayMachines:
    """Places for all ranks, and actors that wait there for their configuration.

    Attributes:
        config: for the supervisor of this machine.
    """

    def __init__(self, broker: Broker, placed: Placed, config: EngineConfig, key: bytes) -> None:
        self.config = config
        self._broker = broker
        self._placed = placed
        self._key = key

    def connect(self, config: EngineConfig, spec: ModelSpec) -> RayNodes:
        """Listen, and start the actors' ranks.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        hub = NodeHub(config, spec)
        ranks = range(1, config.parallel.tp)
        self._broker.send(RunMachines({rank: actor_config(config, rank) for rank in ranks}, self._key))
        return RayNodes(hub, self._broker, self._placed.machines)


class RayNodes:
    """The machines of an engine on Ray: a `NodeHub`, and the broker's reports about the actors."""

    remedy = "the actors' lines above say what they do"
    restart = "start the engine again"

    def __init__(self, hub: NodeHub, broker: Broker, machines: dict[int, str]) -> None:
        self._hub = hub
        self._broker = broker
        self._machines = machines

    @property
    def late(self) -> list[str]:
        return self._hub.late

    def poll(self) -> None:
        """See `Nodes`.

        Raises:
            ChildFailure: as `NodeHub`; an actor has ended or died; the broker is gone.
        """
        self._hub.poll()  # first: a machine's own report is the better cause
        for message in self._broker.receive():
            if isinstance(message, MachineEnded):
                name = f"{node_name(message.rank)} (Ray, {self._machines[message.rank]})"
                raise ChildFailure(f"{name}: {message.message}", 2 if message.exit_code == 2 else 1)
        if self._broker.closed:
            raise ChildFailure(
                "the connection to Ray has ended, and with it the ranks' places: its head or this machine's raylet is "
                "gone; the last lines of Ray are above"
            )

    def pass_on(self, order: ForAll) -> None:
        self._hub.pass_on(order)

    def stop(self, cause: str) -> None:
        self._hub.stop(cause)


@contextmanager
def ray_machines(config: EngineConfig, start_broker: Callable[[], Broker] = Broker) -> Iterator[RayMachines]:
    """Find places for the ranks, and start an actor for each except the first. At the end all of them are removed.

    Args:
        config: resolved.
        start_broker: tests replace it.

    Raises:
        ConfigError: no Ray, or no places for all ranks within the startup timeout.
        SystemExit: a signal came first.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="engine-ray-", ignore_cleanup_errors=True)
        )
        broker = stack.enter_context(start_broker())
        broker.send(FindPlaces(config, folder))
        placed = _wait_for_places(broker, config.server.startup_timeout + _CONNECT_S)
        for rank, machine in placed.machines.items():
            logger.info("placed rank=%d machine=%s", rank, machine)
        if placed.devices:
            stack.enter_context(_visible(placed.devices))
        key = secrets.token_hex(32).encode()
        parallel = dataclasses.replace(
            config.parallel,
            nnodes=config.parallel.tp,
            dist_init_addr=config.parallel.dist_init_addr or _address(placed),
            cluster_key_file=stack.enter_context(key_in_memory(key)),
        )
        yield RayMachines(broker, placed, dataclasses.replace(config, parallel=parallel), key)


def actor_config(config: EngineConfig, rank: int) -> bytes:
    """The configuration of one actor, enough to find machine 0; the rest comes from there, so secrets stay here."""
    model = dataclasses.replace(config.model, model=absolute_model(config.model.model))
    parallel = dataclasses.replace(config.parallel, node_rank=rank, cluster_key_file=None)
    server = dataclasses.replace(config.server, api_key=(), admin_api_key=None, api_key_file=None)
    return msgspec.msgpack.encode(dataclasses.replace(config, model=model, parallel=parallel, server=server))


def _wait_for_places(broker: Broker, timeout_s: float) -> Placed:
    deadline_s = time.monotonic() + timeout_s
    with SignalQueue() as signals:
        while time.monotonic() < deadline_s:
            for message in broker.receive(_POLL_S):
                match message:
                    case Placed():
                        return message
                    case NoPlaces():
                        raise ConfigError(message.message)
            if signals.received:
                raise SystemExit(128 + signals.received[0])
            if broker.closed:
                raise ConfigError(
                    "the connection to Ray ended before it granted places; its lines above say why"
                )
    raise ConfigError(
        f"Ray does not answer within {timeout_s:g} s; see `ray status`, or use --executor local"
    )


def _address(placed: Placed) -> str:
    """Address of this machine for the others: the loopback address if all ranks are on it."""
    return free_address(_LOOPBACK if set(placed.machines.values()) == {placed.address} else placed.address)


@contextmanager
def _visible(devices: str) -> Iterator[None]:
    """Let the children of this process see only rank 0's GPU, as Ray does in the actors."""
    before = os.environ.get(_DEVICES)
    os.environ[_DEVICES] = devices
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DEVICES]
        else:
            os.environ[_DEVICES] = before
