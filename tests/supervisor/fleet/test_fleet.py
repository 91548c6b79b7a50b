"""A fleet in virtual time, with servers that do what the test says."""

from __future__ import annotations

import json

import pytest

from engine.runtime.errors import ConfigError, RequestError
from engine.supervisor.fleet.fleet import (
    END_GRACE_S,
    UNLISTED_S,
    WINDOW_S,
    Fleet,
    FleetSettings,
    ListedWorker,
    Phase,
    WorkerList,
)
from engine.supervisor.fleet.server import Status

KILLED = (-9, "was killed by SIGKILL")
MISTAKE = (2, "exited with code 2; its last lines above say why")
DRAIN_S = 30.0


class FakeServer:
    """One server; it listens when the test says so."""

    where = "here"

    def __init__(self, number: int, pid: int) -> None:
        self.number, self.pid = number, pid
        self.status: Status | None = None
        self.end: tuple[int | None, str] | None = None
        self.told: list[str] = []

    def listen(self) -> None:
        self.status = Status(self.pid, "here", f"http://s{self.pid}", "m", is_well=True)

    def poll(self) -> None:
        pass

    def drain(self) -> None:
        self.told.append("drain")

    def kill(self) -> None:
        self.told.append("kill")
        self.end = self.end or KILLED


class World:
    """A fleet, its servers, its list and its clock."""

    def __init__(self, replicas: int = 2) -> None:
        self.started: list[FakeServer] = []
        self.refusal = ""
        self.now_s = 0.0
        self.lists: list[list[ListedWorker]] = []
        settings = FleetSettings(replicas=replicas, drain_s=DRAIN_S, max_restarts=3)
        self.fleet = Fleet(settings, self.start, self)  # type: ignore[arg-type]

    def start(self, number: int) -> FakeServer:
        self.started.append(FakeServer(number, pid=len(self.started) + 1))
        return self.started[-1]

    def write(self, workers: list[ListedWorker]) -> None:
        if self.refusal:
            raise ConfigError(self.refusal)
        if not self.lists or self.lists[-1] != workers:
            self.lists.append(workers)

    def run(self, seconds: float = 0.0) -> World:
        """Let time pass."""
        until_s = self.now_s + seconds
        while True:
            self.fleet.poll(self.now_s)
            self.fleet.poll(self.now_s)
            if self.now_s >= until_s:
                return self
            self.now_s += 0.5

    def ready(self, seconds: float = 0.0) -> World:
        """Let all servers listen that do not yet."""
        self.run()
        for server in self.started:
            server.listen()
        return self.run(seconds)

    @property
    def listed(self) -> list[str]:
        return [worker.url for worker in self.lists[-1]]

    @property
    def phases(self) -> list[tuple[int, Phase]]:
        return [(each.number, each.phase) for each in self.fleet.replicas]


def test_servers_are_started_and_listed_when_they_answer():
    world = World(3).run()
    assert [server.number for server in world.started] == [0, 1, 2]
    assert world.lists == [[]]

    world.started[1].listen()
    world.run()
    assert world.listed == ["http://s2"]
    world.ready()
    assert world.lists[-1] == [
        ListedWorker(f"{i}-{i + 1}", f"http://s{i + 1}", model_id="m") for i in range(3)
    ]
    assert world.fleet.num_ready == 3


def test_a_server_that_dies_leaves_the_list_and_comes_back_with_another_id():
    world = World().ready()
    world.started[0].end = KILLED
    world.run(0.5)
    assert world.listed == ["http://s2"]
    assert world.phases == [(0, Phase.BACKOFF), (1, Phase.READY)]

    world.run(1.0).ready()
    assert world.listed == ["http://s3", "http://s2"]
    assert world.lists[-1][0].id == "0-3"
    assert world.fleet.replicas[0].last_failure == "was killed by SIGKILL"
    assert world.fleet.failure is None


def test_a_server_that_fails_again_and_again_is_given_up_and_scaling_tries_it_anew():
    world = World().ready()
    for _ in range(4):
        next(each for each in reversed(world.started) if each.number == 0).end = KILLED
        world.run(20.0)
    assert world.phases == [(0, Phase.FAILED), (1, Phase.READY)]
    assert len(world.started) == 2 + 3
    assert world.fleet.failure is None, "the other one serves"
    assert world.run(WINDOW_S).phases == [(0, Phase.FAILED), (1, Phase.READY)]

    world.fleet.scale_to(2)
    world.ready()
    assert world.phases == [(0, Phase.READY), (1, Phase.READY)]


def test_the_fleet_ends_when_all_are_given_up():
    world = World(1).ready()
    for _ in range(4):
        world.started[-1].end = KILLED
        world.run(20.0)
    assert world.fleet.failure == (
        1,
        "all replicas were given up: replica 0 failed 4 times within 300 s and at last was killed by SIGKILL",
    )


def test_a_mistake_in_the_settings_ends_the_fleet_before_any_has_served():
    world = World().run()
    world.started[1].end = MISTAKE
    world.run()
    assert world.fleet.failure == (2, "replica 1 exited with code 2; its last lines above say why")

    later = World().ready()
    later.started[1].end = MISTAKE
    later.run()
    assert later.fleet.failure is None, "the settings have been right before"


def test_pauses_between_restarts_double_and_the_past_is_forgotten():
    world = World(1).ready()
    for pause_s in (1.0, 2.0, 4.0):
        world.started[-1].end = KILLED
        world.run()
        before = len(world.started)
        assert len(world.run(pause_s - 0.5).started) == before
        assert len(world.run(0.5).started) == before + 1
    world.run(WINDOW_S + 1)
    world.started[-1].end = KILLED
    assert len(world.run(1.0).started) == 5


def test_scaling_down_drains_and_kills_what_does_not_end():
    world = World(3).ready()
    world.fleet.scale_to(2)
    last = world.started[2]
    world.run()
    assert world.listed == ["http://s1", "http://s2"]
    assert (last.told, world.phases[2]) == ([], (2, Phase.DRAINING))
    assert world.run(UNLISTED_S - 0.5).started[2].told == [], "routers read the list first"
    world.run(0.5)
    assert last.told == ["drain"]

    world.run(DRAIN_S + END_GRACE_S)
    assert last.told[:2] == ["drain", "kill"]
    world.run(0.5)
    assert world.phases == [(0, Phase.READY), (1, Phase.READY)]


def test_a_number_is_free_again_when_its_server_is_gone():
    world = World(2).ready()
    world.fleet.scale_to(1)
    world.run()
    world.fleet.scale_to(2)
    assert [each.number for each in world.run().started] == [0, 1, 2]
    world.started[1].end = (0, "ended")
    world.run()
    world.fleet.scale_to(3)
    assert [each.number for each in world.run().started] == [0, 1, 2, 1]


@pytest.mark.parametrize("replicas", [0, 513])
def test_a_number_out_of_bounds_is_refused(replicas):
    with pytest.raises(RequestError, match=rf"replicas is {replicas}, but it must lie in \[1, 512\]"):
        World().fleet.scale_to(replicas)


def test_scaling_down_takes_those_first_that_do_not_serve():
    world = World(3).run()
    for server in world.started[1:]:
        server.listen()
    world.run()
    world.fleet.scale_to(2)
    world.run()
    assert world.started[0].told == ["drain"]
    assert world.listed == ["http://s2", "http://s3"]


def test_the_end_drains_all_at_once():
    world = World(3).ready()
    world.started[0].end = KILLED
    world.run()
    world.fleet.stop(world.now_s)
    assert world.lists[-1] == []
    assert [each.told for each in world.started] == [["kill"], ["drain"], ["drain"]]
    world.run(5.0)
    assert len(world.started) == 3, "nothing is started any more"
    for server in world.started[1:]:
        server.end = (0, "ended")
    assert world.run(0.5).fleet.is_gone


def test_the_end_drains_a_server_that_has_just_left_the_list():
    world = World(2).ready()
    world.fleet.scale_to(1)
    world.run()
    world.fleet.stop(world.now_s)
    assert [each.told for each in world.started] == [["drain"], ["drain"]]
    world.run(UNLISTED_S + 1)
    assert [each.told for each in world.started] == [["drain"], ["drain"]]


def test_a_list_that_cannot_be_written_ends_nothing_and_is_tried_again(caplog):
    world = World(1)
    world.refusal = "the disk is full"
    world.ready(5.0)
    assert world.fleet.num_ready == 1
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the disk is full"
    ]
    world.refusal = ""
    assert world.run().listed == ["http://s1"]


def test_the_list_is_a_whole_file_of_the_fields_that_smg_knows(tmp_path):
    path = tmp_path / "workers.json"
    with WorkerList(path) as listing:
        assert json.loads(path.read_text()) == {"version": 1, "workers": []}
        listing.write([ListedWorker("0-1", "http://127.0.0.1:1", model_id="m")])
        assert json.loads(path.read_text()) == {
            "version": 1,
            "workers": [
                {
                    "id": "0-1",
                    "url": "http://127.0.0.1:1",
                    "worker_type": "regular",
                    "bootstrap_port": None,
                    "model_id": "m",
                }
            ],
        }
        assert [each.name for each in tmp_path.iterdir()] == ["workers.json"]
    assert json.loads(path.read_text())["workers"] == []

    with pytest.raises(ConfigError, match="cannot be written to .*; name another file with --worker-list"):
        WorkerList(tmp_path / "nope" / "workers.json").write([])
