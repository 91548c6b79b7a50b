"""One server of a fleet: its actor, with a Ray that only takes notes, and the process that ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cli.fleet.run import RAY_USE
from engine.launch.child.socket_dir import ServerRecord
from engine.runtime.errors import ConfigError
from engine.supervisor.fleet import server as server_module
from engine.supervisor.fleet.server import (
    Server,
    ServerActor,
    ServerOptions,
    Status,
    describe_end,
    start_tied,
)
from engine.supervisor.ray.cluster import ray_cluster
from tests.supervisor.fake_ray import HERE, THERE, ActorRay, RayError

DEADLINE_S = 30.0
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
OPTIONS = ServerOptions({"CPU": 2.0}, {"ENGINE_API_KEY": "sk"}, "sk", HERE, takes_host=True)
UP = Status(7, HERE, "http://127.0.0.1:4", "m", is_well=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ---------------------------------------------------------------- the fleet's side


def test_a_server_waits_for_its_place_and_reports():
    ray = ActorRay()
    server = Server(ray, ["serve"], OPTIONS)
    [actor] = ray.actors
    assert actor.options == {"num_cpus": 2.0, "num_gpus": 0}
    assert actor.made == (["serve"], OPTIONS)
    server.poll()
    assert (server.status, server.where) == (None, "waits for a place on Ray with CPU 2")

    ray.answers(actor, UP)
    server.poll()
    assert (server.status, server.where, server.end) == (UP, HERE, None)
    assert actor.calls == ["status", "status"]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (UP._replace(exit_code=0), (0, "ended")),
        (UP._replace(exit_code=2), (2, "exited with code 2; its last lines above say why")),
        (RayError("The actor is dead."), (None, f"was lost with its actor on {HERE}: The actor is dead.")),
    ],
)
def test_the_end_of_a_server_or_of_its_actor_is_noticed_and_frees_its_place(answer, end):
    ray = ActorRay()
    server = Server(ray, ["serve"], OPTIONS)
    ray.answers(ray.actors[0], UP)
    server.poll()
    ray.answers(ray.actors[0], answer)
    server.poll()
    assert server.end == end
    server.kill()
    assert (server.end, ray.events[-1]) == (end, "killed actor 0")


def test_drain_and_kill_reach_the_server():
    ray = ActorRay()
    server = Server(ray, ["serve"], OPTIONS)
    ray.answers(ray.actors[0], UP)
    server.poll()
    server.drain()
    server.kill()
    assert ray.actors[0].calls[2:] == ["drain", "kill"]
    assert server.end == (-signal.SIGKILL, "was killed")

    early = Server(ray, ["serve"], OPTIONS)
    early.drain()
    assert early.end == (0, "was not started")


def test_an_actor_that_does_not_answer_is_killed_too():
    ray = ActorRay()
    server = Server(ray, ["serve"], OPTIONS)
    ray.answers(ray.actors[0], UP)
    server.poll()
    ray.ended["actor 0 kill"] = RayError("Get timed out: some object(s) not ready.")
    server.kill()
    assert ray.events[-1] == "killed actor 0"


def test_without_ray_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    rule = r"servers of a fleet run on Ray, but Ray cannot be imported .*, or use `engine serve --dp N`"
    with pytest.raises(ConfigError, match=rule), ray_cluster("unused", RAY_USE):
        pass


# ---------------------------------------------------------------- the actor


class Process:
    pid = 7
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def start_actor(monkeypatch) -> Callable[[str], tuple[ServerActor, list[str]]]:
    """An actor on a machine, with a server that answers well, and the command line of the server."""
    record = ServerRecord(7, "m", "/m", "http://127.0.0.1:4", 0.0)
    monkeypatch.setattr(server_module, "running_servers", lambda: [record])
    commands: list[list[str]] = []

    def start(command: list[str], env: dict[str, str]) -> Any:
        assert env == OPTIONS.env
        commands.append(command)
        return Process()

    def actor(node: str) -> tuple[ServerActor, list[str]]:
        ray = ActorRay()
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: node))
        monkeypatch.setitem(sys.modules, "ray", ray)
        found = ServerActor(["serve"], OPTIONS)
        answer = SimpleNamespace(status_code=200)
        monkeypatch.setattr(found, "_client", SimpleNamespace(get=lambda url: answer))
        return found, commands[-1]

    monkeypatch.setattr(server_module, "start_tied", start)
    return actor


def test_on_another_machine_a_server_listens_at_that_machine_s_address(start_actor):
    here, command = start_actor("a")
    assert command[-1] == "serve"
    assert here.status() == UP
    there, command = start_actor("b")
    assert command[-3:] == ["serve", "--host", THERE]
    assert there.status() == Status(7, THERE, f"http://{THERE}:4", "m", is_well=True)


# ---------------------------------------------------------------- its process


@pytest.mark.real_process
def test_it_becomes_the_command_with_its_variables_and_says_how_it_ended(tmp_path: Path):
    path = tmp_path / "pid"
    code = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getpid()} {os.environ[\"X\"]}'); sys.exit(3)"
    process = start_tied([sys.executable, "-c", code, str(path)], {"X": "y"})
    assert process.wait(DEADLINE_S) == 3
    assert path.read_text() == f"{process.pid} y"
    assert describe_end(3) == "exited with code 3; its last lines above say why"
    assert describe_end(-signal.SIGTERM) == "was killed by SIGTERM"


@pytest.mark.real_process
def test_it_ends_with_a_parent_that_is_killed(tmp_path: Path):
    path = tmp_path / "pid"
    program = (
        "import sys, time\nfrom engine.supervisor.fleet.server import start_tied\n"
        f"process = start_tied({SLEEP!r}, {{}})\n"
        "open(sys.argv[1], 'w').write(str(process.pid))\ntime.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(path)])
    wait_for(lambda: path.exists() and path.read_text() != "")
    pid = int(path.read_text())
    parent.kill()
    parent.wait()

    def is_gone() -> bool:
        try:
            return "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True

    wait_for(is_gone)
