"""What the process between a fleet and Ray makes of orders and actors, with a Ray that only takes notes."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.launch.child.control import ControlChannel
from engine.runtime.config.log_config import LogConfig
from engine.runtime.errors import ConfigError
from engine.supervisor.fleet.ray_actor import Seen
from engine.supervisor.fleet.ray_broker import RAY_USE, ServersOnRay
from engine.supervisor.fleet.ray_messages import (
    FromBroker,
    KillServer,
    ServerGone,
    ServerSeen,
    StartServer,
    StopServer,
    ToBroker,
)
from engine.supervisor.fleet.ray_servers import RayServers, ray_servers
from engine.supervisor.fleet.server import ServerCommand, ServerEnd
from engine.supervisor.ray.cluster import RayCluster, ray_cluster
from tests.supervisor.fake_ray import HERE, THERE, FakeRay, RayError

NEEDS = {"CPU": 2.0}
URL = "http://127.0.0.1:4"


class Actor:
    """A `ServerActor` whose answers the test writes into `ray.ended`."""

    def __init__(self, ray: ActorRay, options: dict[str, Any]) -> None:
        self.name, self.options = f"actor {len(ray.actors)}", options
        self.calls: list[Any] = []
        for name in ("start", "look", "terminate", "kill"):
            setattr(self, name, SimpleNamespace(remote=lambda *args, name=name: self._call(name, *args)))

    def _call(self, name: str, *args: Any) -> str:
        self.calls.append((name, *args))
        return f"{self.name} {name}"


class ActorRay(FakeRay):
    """Makes actors of the fleet, on the first machine or on the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Actor] = []
        self.machine = "a"
        self.util.placement_group_table = lambda group: {"bundles_to_node_id": {0: self.machine}}

    def remote(self, what: Any) -> Any:
        def make(**options: Any) -> Any:
            self.actors.append(Actor(self, options))
            return SimpleNamespace(remote=lambda: self.actors[-1])

        return SimpleNamespace(options=make)

    def answers(self, answer: object) -> None:
        """What every call of the last actor comes to."""
        for name in ("start", "look", "terminate", "kill"):
            self.ended[f"{self.actors[-1].name} {name}"] = answer


class Setup:
    """The broker's side, with a Ray of two machines, and what it has told the fleet."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.fleet: ControlChannel[FromBroker] = ControlChannel(ours, msgspec.msgpack.Decoder(FromBroker))
        self.broker: ControlChannel[ToBroker] = ControlChannel(theirs, msgspec.msgpack.Decoder(ToBroker))
        self.ray = ActorRay()
        self.servers = ServersOnRay(RayCluster(self.ray, is_own=False), self.broker)

    def order(self, *orders: ToBroker) -> list[FromBroker]:
        for each in orders:
            self.servers.follow(each)
        self.servers.look()
        return self.fleet.receive()


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.fleet.close()
    setup.broker.close()


def start(key: int = 1) -> StartServer:
    return StartServer(key, "engine.cli.main", ["serve"], {"ENGINE_API_KEY": "sk"}, NEEDS, True)


def test_a_server_waits_for_its_place_and_is_started_in_it(setup):
    setup.ray.granted = False
    assert setup.order(start()) == [ServerSeen(1, "waits for a place on Ray with CPU 2")]
    assert setup.order() == []

    setup.ray.groups[0].granted = True
    assert setup.order() == [ServerSeen(1, HERE)]
    [actor] = setup.ray.actors
    assert (actor.options["num_cpus"], actor.options["num_gpus"]) == (2.0, 0)
    assert actor.calls == [("start", "engine.cli.main", ["serve"], {"ENGINE_API_KEY": "sk"})]
    assert (setup.ray.groups[0].bundles, setup.ray.groups[0].strategy) == ([NEEDS], "STRICT_PACK")


def test_news_are_told_once(setup):
    setup.order(start())
    setup.ray.answers(Seen(7, None, None, None))
    assert setup.order() == [ServerSeen(1, HERE, 7)]
    assert setup.order() == []
    setup.ray.answers(Seen(7, URL, "m", None))
    assert setup.order() == [ServerSeen(1, HERE, 7, URL, "m")]


def test_on_another_machine_it_listens_at_that_machine_s_address(setup):
    setup.ray.machine = "b"
    setup.order(start())
    assert setup.ray.actors[0].calls[0][2] == ["serve", "--host", THERE]
    setup.ray.answers(Seen(7, f"http://{THERE}:4", "m", None))
    assert setup.order()[0].url == f"http://{THERE}:4"


@pytest.mark.parametrize(
    ("answer", "code", "cause"),
    [
        (Seen(7, URL, "m", ServerEnd(-9, "was killed by SIGKILL")), -9, "was killed by SIGKILL"),
        (RayError("The actor is dead."), None, f"was lost with its actor on {HERE}: The actor is dead."),
    ],
)
def test_the_end_of_a_server_or_of_its_actor_frees_its_place(setup, answer, code, cause):
    setup.order(start())
    setup.ray.answers(answer)
    assert setup.order() == [ServerGone(1, code, cause)]
    assert setup.ray.events[-2:] == ["killed actor 0", "group removed"]
    assert setup.order(StopServer(1), KillServer(1)) == [], "too late"


def test_stop_drains_and_kill_ends_at_once(setup):
    setup.order(start())
    setup.ray.answers(Seen(7, URL, "m", None))
    setup.order(StopServer(1))
    assert ("terminate",) in setup.ray.actors[0].calls
    assert setup.order(KillServer(1)) == [ServerGone(1, -signal.SIGKILL, "was killed")]
    assert ("kill",) in setup.ray.actors[0].calls


def test_one_that_has_no_place_yet_is_just_dropped(setup):
    setup.ray.granted = False
    setup.order(start())
    assert setup.order(StopServer(1)) == [ServerGone(1, 0, "was not started")]
    assert setup.ray.events == ["group removed"]


def test_the_fleet_s_side_follows_the_reports(setup):
    command = ServerCommand("m", lambda number, share: [f"{number}/{share}"], lambda number: {})
    servers = RayServers(setup.fleet, command, NEEDS, takes_host=True)
    server = servers.start(3, 2)
    [order] = setup.broker.receive()
    assert order == StartServer(1, "m", ["3/2"], {}, NEEDS, True)

    setup.broker.send(ServerSeen(1, HERE, 7, URL, "m"))
    assert servers.look() == ""
    assert (server.where, server.pid, server.url, server.model, server.end) == (HERE, 7, URL, "m", None)
    server.terminate()
    server.kill()
    assert setup.broker.receive() == [StopServer(1), KillServer(1)]
    setup.broker.send(ServerGone(1, 0, "exited with code 0"))
    servers.look()
    assert server.end == ServerEnd(0, "exited with code 0")
    setup.broker.close()
    assert "the connection to Ray has ended" in servers.look()


def test_without_ray_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    rule = r"--on is ray, but Ray cannot be imported .*; pip install 'engine\[ray\]', or use --on local"
    with pytest.raises(ConfigError, match=rule), ray_cluster("unused", RAY_USE):
        pass


@pytest.mark.real_process
def test_a_broker_that_ends_at_once_is_an_error():
    command = ServerCommand("m", lambda number, share: [], lambda number: {})
    with (
        pytest.raises(ConfigError, match="the process that talks to Ray has ended"),
        ray_servers(command, NEEDS, LogConfig(), takes_host=True, module="json"),
    ):
        pass
