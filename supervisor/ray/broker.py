"""The process between a supervisor and Ray: it keeps Ray's threads and signal handlers out of the supervisor.

A supervisor must answer signals and notice failures within seconds, in any state of Ray: a driver with a cluster that
lost its head is stuck for a minute and is then ended by Ray. So the driver is a separate process, which `executor.py`
starts. It leads a process group, so that signals to the supervisor's group do not reach a Ray that was started here. It
ends when the channel is closed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any, Final

import msgspec

from ...launch.child.child import die_with
from ...launch.child.control import ControlChannel
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.logs import configure_logging
from ...runtime.transport.message_base import Message
from ..child_watch import STOP_GRACE_S
from .cluster import RayCluster, ray_cluster, why_it_died
from .placement import RayPlaces, ray_places

_POLL_S: Final = 0.2
RUN_END_GRACE_S: Final = STOP_GRACE_S + 2.0  # an actor's own supervisor gives its rank STOP_GRACE_S


class FindPlaces(Message, frozen=True):
    """To the broker, first: find places for the ranks; `folder`: for the files of a Ray that is started here."""

    config: EngineConfig
    folder: str


class RunMachines(Message, frozen=True):
    """To the broker: run the actors with their configurations, by rank; `key` is the secret that they share."""

    configs: dict[int, bytes]
    key: bytes

    def __repr__(self) -> str:
        return f"RunMachines(ranks={list(self.configs)})"


class Placed(Message, frozen=True):
    """From the broker: as `RayPlaces`."""

    address: str
    machines: dict[int, str]
    devices: str | None


class NoPlaces(Message, frozen=True):
    """From the broker: an error that the user can fix."""

    message: str


class MachineEnded(Message, frozen=True):
    """From the broker: the actor of this rank has ended with this exit code, or has died (1)."""

    rank: int
    exit_code: int
    message: str


ToBroker = FindPlaces | RunMachines
FromBroker = Placed | NoPlaces | MachineEnded


def main() -> None:
    """Follow the supervisor's orders until the channel ends."""
    _, fd, supervisor_pid = sys.argv[1:]
    die_with(int(supervisor_pid))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            signum, lambda _signum, _frame: None
        )  # unlike SIG_IGN, a handler is not inherited by child processes
    decoder: msgspec.msgpack.Decoder[ToBroker] = msgspec.msgpack.Decoder(ToBroker)
    channel = ControlChannel(socket.socket(fileno=int(fd)), decoder)
    match wait_for_one(channel):
        case FindPlaces(config=config, folder=folder):
            configure_logging(config.log, "ray")
            try:
                _serve(channel, config, folder)
            except ConfigError as error:
                channel.send(NoPlaces(str(error)))


def wait_for_one(channel: ControlChannel[ToBroker]) -> ToBroker | None:
    """The next message; None: the channel has ended."""
    while not channel.closed:
        channel.wait(None)
        for message in channel.receive():
            return message
    return None


def _serve(channel: ControlChannel[ToBroker], config: EngineConfig, folder: str) -> None:
    def go_on() -> bool:
        return not channel.wait(0.0)  # before the answer only the end of the channel makes it readable

    with ray_cluster(folder) as cluster, ray_places(cluster, config, go_on) as places:
        channel.send(Placed(places.address, places.machines, places.devices))
        match wait_for_one(channel):
            case RunMachines() as order:
                watch_runs(channel, cluster, places, order)


def watch_runs(
    channel: ControlChannel[ToBroker], cluster: RayCluster, places: RayPlaces, order: RunMachines
) -> None:
    """Run the actors, and report those that have ended; after the channel's end, wait briefly for the others."""
    ray = cluster.ray
    runs: dict[Any, int] = {
        actor.run.remote(order.configs[rank], order.key): rank for rank, actor in places.actors.items()
    }
    while not channel.closed:
        channel.wait(_POLL_S)
        channel.receive()
        ended, _ = ray.wait(list(runs), timeout=0) if runs else ([], [])
        for run in ended:
            channel.send(_end_of(ray, run, runs.pop(run)))
    if runs:
        ray.wait(list(runs), num_returns=len(runs), timeout=RUN_END_GRACE_S)


def _end_of(ray: Any, run: Any, rank: int) -> MachineEnded:
    try:
        exit_code, message = ray.get(run)
    except ray.exceptions.RayTaskError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201  (the actor's traceback)
        return MachineEnded(rank, 1, f"failed: {error.cause!r}")
    except ray.exceptions.RayError as error:
        return MachineEnded(rank, 1, why_it_died(error))
    return MachineEnded(rank, exit_code, message)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # Ray's threads and exit handlers have already run in its shutdown
