"""`RayServers`: a fleet's servers on the machines of a Ray cluster. Only the broker imports Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from ...launch.child.control import ControlChannel
from ...runtime.config.log_config import LogConfig
from ...runtime.errors import ConfigError
from ..child_process import start_module
from ..signal_queue import SignalQueue
from .ray_messages import (
    FromBroker,
    Joined,
    JoinRay,
    KillServer,
    NoRay,
    ServerGone,
    ServerSeen,
    StartServer,
    StopServer,
)
from .server import ServerCommand, ServerEnd

logger = logging.getLogger(__name__)

_BROKER: Final = f"{__package__}.ray_broker"
_JOIN_S: Final = 180.0  # on a busy machine Ray itself allows a start 90 s
_LOOK_S: Final = 0.5
_BROKER_END_S: Final = 20.0


class RayServer:
    """One server on Ray, as the broker reports it."""

    def __init__(self, key: int, channel: ControlChannel[FromBroker]) -> None:
        self.pid: int | None = None
        self.where = "waits for Ray"
        self.url: str | None = None
        self.model: str | None = None
        self.end: ServerEnd | None = None
        self._key = key
        self._channel = channel

    def terminate(self) -> None:
        self._channel.send(StopServer(self._key))

    def kill(self) -> None:
        self._channel.send(KillServer(self._key))

    def seen(self, message: ServerSeen) -> None:
        """The broker reports news."""
        self.where = message.where
        self.pid, self.url, self.model = message.pid, message.url, message.model


class RayServers:
    """Starts servers as actors in placement groups, through the broker.

    Attributes:
        num_places: None: a cluster may grow.
    """

    num_places: int | None = None

    def __init__(
        self,
        channel: ControlChannel[FromBroker],
        command: ServerCommand,
        needs: dict[str, float],
        *,
        takes_host: bool,
    ) -> None:
        """Use a broker that has joined Ray.

        Args:
            channel: of the broker.
            command: of the servers.
            needs: what a server takes of its machine, in Ray's units.
            takes_host: see `StartServer`.
        """
        self._channel = channel
        self._command = command
        self._needs = needs
        self._takes_host = takes_host
        self._servers: dict[int, RayServer] = {}
        self._num_started = 0

    def start(self, number: int, share: int) -> RayServer:
        self._num_started += 1
        key, command = self._num_started, self._command
        server = self._servers[key] = RayServer(key, self._channel)
        self._channel.send(
            StartServer(
                key,
                command.module,
                command.arguments(number, share),
                command.env(number),
                self._needs,
                self._takes_host,
            )
        )
        return server

    def look(self) -> str:
        for message in self._channel.receive():
            match message:
                case ServerSeen(key=key) if key in self._servers:
                    self._servers[key].seen(message)
                case ServerGone(key=key, exit_code=code, cause=cause) if key in self._servers:
                    self._servers.pop(key).end = ServerEnd(code, cause)
                case NoRay(message=text):
                    return text
        if self._channel.closed:
            return (
                "the connection to Ray has ended, and with it the servers: its head or this machine's raylet is gone; "
                "the last lines of Ray are above"
            )
        return ""


@contextmanager
def ray_servers(
    command: ServerCommand,
    needs: dict[str, float],
    log: LogConfig,
    *,
    takes_host: bool,
    module: str = _BROKER,
) -> Iterator[RayServers]:
    """Join the Ray cluster that this machine belongs to, or start Ray here; at the end leave it, or stop it.

    Args:
        command, needs, takes_host: see `RayServers`.
        log: for the broker.
        module: tests replace it.

    Raises:
        ConfigError: no Ray.
        SystemExit: a signal came first.
    """
    with tempfile.TemporaryDirectory(prefix="engine-ray-", ignore_cleanup_errors=True) as folder:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_module(module, "ray", theirs.fileno())
        decoder: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)
        channel = ControlChannel(ours, decoder)
        try:
            channel.send(JoinRay(log, folder))
            joined = _wait_until_joined(channel)
            logger.info("joined ray address=%s machines: %s", joined.address, joined.machines)
            yield RayServers(channel, command, needs, takes_host=takes_host)
        finally:
            channel.close()
            _end(process)


def _wait_until_joined(channel: ControlChannel[FromBroker]) -> Joined:
    deadline_s = time.monotonic() + _JOIN_S
    with SignalQueue() as signals:
        while time.monotonic() < deadline_s:
            channel.wait(_LOOK_S)
            for message in channel.receive():
                match message:
                    case Joined():
                        return message
                    case NoRay(message=text):
                        raise ConfigError(text)
            if signals.received:
                raise SystemExit(128 + signals.received[0])
            if channel.closed:
                raise ConfigError("the process that talks to Ray has ended; its lines above say why")
    raise ConfigError(f"Ray does not answer within {_JOIN_S:g} s; see `ray status`, or use --on local")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_BROKER_END_S)
    except subprocess.TimeoutExpired:
        logger.warning("killing the process that talks to Ray: it has not ended in %g s", _BROKER_END_S)
    with contextlib.suppress(ProcessLookupError):
        # The group may outlive its leader if the broker started Ray.
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
