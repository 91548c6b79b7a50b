"""The process between a fleet and Ray: a placement group of one bundle and an actor in it for each server.

As `supervisor/ray/broker.py`, it keeps Ray's threads and signal handlers out of the process that must answer signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import Any, Final

import msgspec

from ...launch.child.child import die_with
from ...launch.child.control import ControlChannel
from ...runtime.errors import ConfigError
from ...runtime.logs import configure_logging
from ..ray.cluster import RayCluster, RayUse, ray_cluster
from ..ray.placement import why_it_died
from .ray_actor import Seen, ServerActor
from .ray_messages import (
    Joined,
    JoinRay,
    KillServer,
    NoRay,
    ServerGone,
    ServerSeen,
    StartServer,
    StopServer,
    ToBroker,
)

RAY_USE: Final = RayUse("--on is ray", "--on local", "the fleet")
_LOOK_S: Final = 0.2
_KILL_S: Final = 5.0
_PLACE_S: Final = 0.05


def main() -> None:
    """Follow the fleet's orders until the channel ends."""
    _, fd, fleet_pid = sys.argv[1:]
    die_with(int(fleet_pid))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Unlike SIG_IGN, a handler is not inherited by child processes.
        signal.signal(signum, lambda _signum, _frame: None)
    decoder: msgspec.msgpack.Decoder[ToBroker] = msgspec.msgpack.Decoder(ToBroker)
    channel = ControlChannel(socket.socket(fileno=int(fd)), decoder)
    order = _first(channel)
    if not isinstance(order, JoinRay):
        return
    configure_logging(order.log, "ray")
    try:
        with ray_cluster(order.folder, RAY_USE) as cluster:
            channel.send(Joined(cluster.address, cluster.describe()))
            ServersOnRay(cluster, channel).run()
    except ConfigError as error:
        channel.send(NoRay(str(error)))


def _first(channel: ControlChannel[ToBroker]) -> ToBroker | None:
    while not channel.closed:
        channel.wait(None)
        for message in channel.receive():
            return message
    return None


class ServersOnRay:
    """All servers of a fleet, by key."""

    def __init__(self, cluster: RayCluster, channel: ControlChannel[ToBroker]) -> None:
        self._cluster = cluster
        self._channel = channel
        self._servers: dict[int, ServerOnRay] = {}

    def run(self) -> None:
        """Follow orders and report, until the channel ends; what is left then is killed."""
        try:
            while not self._channel.closed:
                self._channel.wait(_LOOK_S)
                for order in self._channel.receive():
                    self.follow(order)
                self.look()
        finally:
            for server in self._servers.values():
                server.kill()

    def follow(self, order: ToBroker) -> None:
        """Do what the fleet orders; orders about servers that are gone come too late."""
        match order:
            case StartServer():
                self._servers[order.key] = ServerOnRay(self._cluster, order)
                self._channel.send(ServerSeen(order.key, self._servers[order.key].where))
            case StopServer(key=key) if key in self._servers:
                self._servers[key].terminate()
            case KillServer(key=key) if key in self._servers:
                self._servers[key].kill()

    def look(self) -> None:
        """Report what is new."""
        for key, server in list(self._servers.items()):
            news = server.look()
            if isinstance(news, ServerGone):
                del self._servers[key]
                server.free()
            if news is not None:
                self._channel.send(news)


class ServerOnRay:
    """One server: its place, its actor, and the answer that the actor owes.

    Attributes:
        where: its machine, or what it waits for.
    """

    def __init__(self, cluster: RayCluster, order: StartServer) -> None:
        """Ask for a place."""
        each = " and ".join(f"{name} {amount:g}" for name, amount in order.needs.items())
        self.where = f"waits for a place on Ray with {each}"
        self._cluster = cluster
        self._order = order
        self._group: Any = cluster.ray.util.placement_group([order.needs], strategy="STRICT_PACK")
        self._actor: Any = None
        self._answer: Any = None
        self._seen: Seen | None = None
        self._is_stopping = False
        self._gone: ServerGone | None = None

    def look(self) -> ServerSeen | ServerGone | None:
        """What is new; None: nothing."""
        ray, key = self._cluster.ray, self._order.key
        if self._gone is not None:
            return self._gone
        if self._actor is None:
            return self._start() if self._group.wait(_PLACE_S) else None
        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            seen = Seen(*ray.get(self._answer))
        except ray.exceptions.RayError as error:
            return ServerGone(key, None, f"was lost with its actor on {self.where}: {why_it_died(error)}")
        if seen.end is not None:
            return ServerGone(key, *seen.end)
        self._answer = self._actor.look.remote()
        if seen == self._seen:
            return None
        self._seen = seen
        return ServerSeen(key, self.where, seen.pid, self._url(seen.url), seen.model)

    def terminate(self) -> None:
        """Have it drain and end."""
        if self._actor is None:
            self._gone = ServerGone(self._order.key, 0, "was not started")
        else:
            self._actor.terminate.remote()

    def kill(self) -> None:
        """End it at once; if its machine does not answer, Ray ends its actor."""
        ray = self._cluster.ray
        if self._actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._actor.kill.remote(), timeout=_KILL_S)
        self._gone = ServerGone(self._order.key, -signal.SIGKILL, "was killed")

    def free(self) -> None:
        """Give the place back."""
        ray = self._cluster.ray
        with contextlib.suppress(ray.exceptions.RayError):
            if self._actor is not None:
                ray.kill(self._actor)
            ray.util.remove_placement_group(self._group)

    def _start(self) -> ServerSeen:
        ray, order, needs = self._cluster.ray, self._order, self._order.needs
        table = ray.util.placement_group_table(self._group)
        self.where = self._cluster.addresses().get(table["bundles_to_node_id"][0], "a machine of the cluster")
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=0
        )
        actor = ray.remote(ServerActor).options(
            num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), scheduling_strategy=place
        )
        self._actor = actor.remote()
        arguments = list(order.arguments)
        if order.takes_host and self.where != self._cluster.address:
            arguments += ["--host", self.where]
        self._answer = self._actor.start.remote(order.module, arguments, order.env)
        return ServerSeen(order.key, self.where)

    def _url(self, url: str | None) -> str | None:
        """An address that other machines can open."""
        if url is None or self.where == self._cluster.address:
            return url
        return url.replace("//127.0.0.1:", f"//{self.where}:")


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # Ray's threads and exit handlers have already run in its shutdown
