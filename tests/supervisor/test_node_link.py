"""The supervisors of two machines, without processes: who is let in, and who notices what."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.launch.child.control import SetLogLevel, StartProfile, StopProfile
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import ConfigError
from engine.runtime.transport.cluster_ipc import parse_address
from engine.supervisor import node_link
from engine.supervisor.child_watch import ChildFailure
from engine.supervisor.node_link import NodeFailed, NodeHub, NodeLink, NodeReady, NodeSettings, NodeStopped
from tests.launch.child.test_child import SETTINGS
from tests.runtime.transport.test_cluster_ipc import free_address

DEADLINE_S = 60.0
SPEC = SETTINGS.spec


@pytest.fixture
def parallel(tmp_path: Path) -> ParallelConfig:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 64)
    return ParallelConfig(tp=4, nnodes=2, dist_init_addr=free_address(), cluster_key_file=str(key))


@pytest.fixture
def hub(parallel: ParallelConfig) -> Iterator[NodeHub]:
    hub = NodeHub(EngineConfig(parallel=parallel), SPEC)
    yield hub
    hub.stop("")


@pytest.fixture
def connect(parallel: ParallelConfig) -> Iterator[Callable[..., NodeLink]]:
    """Connects as machine 1, with a configuration that may differ."""
    with ExitStack() as stack:

        def start(spec: Any = SPEC, **changes: Any) -> NodeLink:
            own = dataclasses.replace(parallel, **{"node_rank": 1, **changes})
            return stack.enter_context(NodeLink(own, spec))

        yield start


def until(done: Callable[[], Any], *looks: Callable[[], Any]) -> Any:
    """Let everyone poll, until there is a result."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (result := done()):
        assert time.monotonic() < deadline_s
        for look in looks:
            look()
    return result


def cause_of_the_end(link: NodeLink, *looks: Callable[[], Any]) -> str:
    """Why machine 0 sends this machine away."""
    with pytest.raises(NodeStopped) as stopped:
        until(lambda: None, lambda: link.poll(0.01), *looks)
    return stopped.value.cause


def test_a_machine_joins_gets_the_settings_and_is_ready(hub, connect, parallel):
    assert hub.late == ["machine 1"]
    link = connect()

    settings = until(lambda: link.poll(0.01), hub.poll)
    assert settings == NodeSettings(EngineConfig(parallel=parallel))
    assert hub.late == ["machine 1"]
    link.send(NodeReady())

    until(lambda: hub.late == [], hub.poll, link.poll)


def test_what_all_processes_are_told_reaches_the_other_machines_in_its_order(hub, connect):
    link = connect()
    until(lambda: link.poll(0.01), hub.poll)
    orders = [SetLogLevel("debug"), StartProfile("profile-1", 100.0, 60.0), StopProfile()]
    for order in orders:
        hub.pass_on(order)

    until(lambda: len(link.orders) == len(orders), hub.poll, lambda: link.poll(0.01))
    assert link.orders == orders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 2}, "machine 1 was started with --tp 2 --nnodes 2, machine 0 with --tp 4 --nnodes 2"),
        (
            {"tp": 3, "nnodes": 3, "node_rank": 2},
            "machine 2 was started with --tp 3 --nnodes 3, machine 0 with --tp 4 --nnodes 2",
        ),
        (
            {"spec": replace(SPEC, num_layers=7)},
            "machine 1 has another model than machine 0; give both the same",
        ),
    ],
)
def test_machines_that_do_not_belong_together_are_told_apart_and_both_know_why(
    hub, connect, changes, message
):
    link = connect(**changes)

    with pytest.raises(ChildFailure, match=f"^{message}$") as failure:
        until(lambda: None, hub.poll)
    assert failure.value.exit_code == 2
    assert cause_of_the_end(link) == f"machine 0: {message}"


def test_a_machine_of_another_release_is_refused(hub, connect, monkeypatch):
    monkeypatch.setattr(node_link, "__version__", "0.0.1")
    link = connect()
    monkeypatch.undo()

    with pytest.raises(
        ChildFailure, match="^machine 1 has release 0.0.1 of the engine, machine 0 .*; install one"
    ):
        until(lambda: None, hub.poll)
    assert "has release 0.0.1" in cause_of_the_end(link)


def test_a_second_machine_of_the_same_rank_is_sent_away_and_the_engine_goes_on(hub, connect):
    first, second = connect(), connect()  # at the same time
    links = dict.fromkeys((first, second), False)
    causes: list[str] = []

    def poll(link: NodeLink) -> None:
        try:
            links[link] |= link.poll(0.01) is not None
        except NodeStopped as stopped:
            causes.append(stopped.cause)

    until(lambda: causes and any(links.values()), hub.poll, lambda: poll(first), lambda: poll(second))
    assert causes == [
        "machine 0: this engine has a machine 1 already; each machine needs its own --node-rank"
    ]
    (accepted,) = (link for link, welcome in links.items() if welcome)

    third = connect(spec=replace(SPEC, num_layers=7))  # late, and wrong
    accepted.send(NodeReady())
    until(lambda: hub.late == [], hub.poll, accepted.poll)
    assert "machine 1 already" in cause_of_the_end(third, hub.poll, accepted.poll)


def test_a_wrong_machine_does_not_end_an_engine_that_is_complete(hub, connect):
    first = connect()
    until(lambda: first.poll(0.01), hub.poll)

    late = connect(tp=3, nnodes=3, node_rank=2)

    assert "machine 2 was started with" in cause_of_the_end(late, hub.poll, first.poll)
    first.send(NodeReady())
    until(lambda: hub.late == [], hub.poll, first.poll)


def test_what_a_refused_machine_says_concerns_nobody(hub, connect):
    first = connect()
    until(lambda: first.poll(0.01), hub.poll)
    second = connect()
    second.send(NodeFailed("stopped by SIGINT"))

    cause_of_the_end(second, hub.poll)
    hub.poll()

    assert hub.late == ["machine 1"]


class FakeClock:
    """The clock of `node_link`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def tick(self) -> None:
        """A beat's time goes by."""
        self.now_s += node_link._BEAT_INTERVAL_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(node_link, "time", clock)
    return clock


def test_a_machine_that_fell_silent_and_comes_back_is_named(clock, hub, connect):
    first = connect()
    until(lambda: first.poll(0.01), hub.poll)
    first.send(NodeReady())
    until(lambda: not hub.late, hub.poll)  # so nothing that it has sent is still on its way
    for _ in range(4):
        clock.tick()
        hub.poll()

    assert_lost_and_back(hub, connect())


def test_a_machine_that_ended_and_comes_back_at_once_is_named(hub, connect, parallel, monkeypatch, caplog):
    monkeypatch.setattr(node_link, "_BEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(node_link, "_MAX_LATE_BEATS", 1000)
    with NodeLink(dataclasses.replace(parallel, node_rank=1), SPEC) as first:
        until(lambda: first.poll(0.01), hub.poll)
    until(lambda: "no connection to machine 1" in caplog.text, hub.poll)

    assert_lost_and_back(hub, connect())


def assert_lost_and_back(hub: NodeHub, second: NodeLink) -> None:
    message = "machine 1 was lost and has come back"
    with pytest.raises(ChildFailure, match=f"^{message}$") as failure:
        until(lambda: None, hub.poll)
    assert failure.value.exit_code == 1
    assert cause_of_the_end(second) == f"machine 0: {message}; start the engine again on all machines"


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_each_port_that_is_in_use_is_named_at_start(parallel, offset):
    host, port = parse_address(parallel.dist_init_addr)
    with (
        socket.create_server((host, port + offset)),
        pytest.raises(
            ConfigError, match=f"^cannot listen on {host}:{port + offset} .*: Address already in use; see"
        ),
    ):
        NodeHub(EngineConfig(parallel=parallel), SPEC)


def test_the_cause_travels_both_ways(hub, connect):
    link = connect()
    until(lambda: link.poll(0.01), hub.poll)

    link.send(NodeFailed("its GPU is on fire"))
    with pytest.raises(ChildFailure, match="^machine 1: its GPU is on fire$"):
        until(lambda: None, hub.poll)

    hub.stop("machine 0: it is too hot here")
    with pytest.raises(NodeStopped) as stopped:
        until(lambda: link.poll(0.01))
    assert stopped.value.cause == "machine 0: it is too hot here"


def test_silence_is_noticed_on_both_sides_and_beats_break_it(clock, hub, connect):
    link = connect()
    until(lambda: link.poll(0.01), hub.poll)
    (peer,) = hub._peers.values()
    silences = link._silence, peer.silence
    for _ in range(30):  # nobody is silent: of two beats at least one has come
        clock.tick()
        hub.poll()
        link.poll()
        until(lambda: max(one.silent_s for one in silences) <= 1.0, hub.poll, link.poll)

    with pytest.raises(ChildFailure, match="^machine 1 has been silent for 8 s"):
        until(lambda: None, clock.tick, hub.poll)
    with pytest.raises(ChildFailure, match=r"^machine 0 at 127\.0\.0\.1:\d+ has been silent for 8 s"):
        until(lambda: None, clock.tick, lambda: link.poll(0.01))


def test_a_supervisor_that_slept_itself_does_not_blame_the_others(hub, connect, monkeypatch):
    link = connect()
    until(lambda: link.poll(0.01), hub.poll)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 3600.0)

    hub.poll()
    link.poll()


def test_without_a_key_there_is_no_link(parallel):
    with pytest.raises(ConfigError, match="machines that share a model need a secret"):
        NodeLink(dataclasses.replace(parallel, cluster_key_file=None), SPEC)


def test_an_engine_of_one_machine_does_not_load_it():
    code = "import sys, engine.supervisor.supervisor; print('engine.supervisor.node_link' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
