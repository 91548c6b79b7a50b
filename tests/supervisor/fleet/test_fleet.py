"""A fleet in virtual time, with servers that do what the test says."""

from __future__ import annotations

import json

import pytest

from engine.runtime.errors import ConfigError, RequestError
from engine.supervisor.fleet.fleet import END_GRACE_S, LEAVE_S, Fleet, FleetSettings
from engine.supervisor.fleet.probe import load_of
from engine.supervisor.fleet.replica import Phase
from engine.supervisor.fleet.restarts import WINDOW_S, Restarts
from engine.supervisor.fleet.scaling import Load, ScaleBounds
from engine.supervisor.fleet.server import ServerEnd
from engine.supervisor.fleet.worker_list import ListedWorker, WorkerList

KILLED = ServerEnd(-9, "was killed by SIGKILL")
MISTAKE = ServerEnd(2, "exited with code 2; its last lines above say why")
DRAIN_S = 30.0


class FakeServer:
    """One server; `url` appears when the test says so."""

    def __init__(self, number: int, share: int, pid: int) -> None:
        self.number, self.share, self.pid = number, share, pid
        self.where = "here"
        self.url: str | None = None
        self.model: str | None = None
        self.end: ServerEnd | None = None
        self.told: list[str] = []

    def terminate(self) -> None:
        self.told.append("terminate")

    def kill(self) -> None:
        self.told.append("kill")
        self.end = self.end or KILLED


class World:
    """A fleet, its servers, its list and its clock."""

    def __init__(self, replicas: int = 2, places: int | None = None, **settings: object) -> None:
        self.num_places = places
        self.started: list[FakeServer] = []
        self.gone = ""
        self.refusal = ""
        self.now_s = 0.0
        self.lists: list[list[ListedWorker]] = []
        bounds = ScaleBounds(min_replicas=replicas, max_replicas=replicas)
        fields = {"bounds": bounds, "drain_s": DRAIN_S, "max_restarts": 3} | settings
        self.fleet = Fleet(FleetSettings(replicas=replicas, **fields), self, self)  # type: ignore[arg-type]

    def start(self, number: int, share: int) -> FakeServer:
        self.started.append(FakeServer(number, share, pid=len(self.started) + 1))
        return self.started[-1]

    def look(self) -> str:
        return self.gone

    def write(self, workers: list[ListedWorker]) -> None:
        if self.refusal:
            raise ConfigError(self.refusal)
        if not self.lists or self.lists[-1] != workers:
            self.lists.append(workers)

    def run(
        self, seconds: float = 0.0, *, silent: tuple[FakeServer, ...] = (), load: Load | None = None
    ) -> World:
        """Let time pass; servers that listen answer, unless they are silent."""
        until_s = self.now_s + seconds
        while True:
            self.fleet.look(self.now_s)
            quiet = {server.url for server in silent}
            for ask in self.fleet.to_ask():
                if ask.url not in quiet:
                    self.fleet.answered(ask, self.now_s, is_well=True, load=load)
            self.fleet.look(self.now_s)
            if self.now_s >= until_s:
                return self
            self.now_s += 0.5

    def ready(self, seconds: float = 0.0, load: Load | None = None) -> World:
        """Let all servers listen that do not yet."""
        self.run()
        for server in self.started:
            server.url, server.model = f"http://s{server.pid}", "m"
        return self.run(seconds, load=load)

    @property
    def listed(self) -> list[str]:
        return [worker.url for worker in self.lists[-1]]

    @property
    def phases(self) -> list[tuple[int, Phase]]:
        return [(each.number, each.phase) for each in self.fleet.replicas]


def test_servers_are_started_and_listed_when_they_answer():
    world = World(3).run()
    assert [(server.number, server.share) for server in world.started] == [(0, 3), (1, 3), (2, 3)]
    assert world.lists == [[]]

    world.started[1].url = "http://s2"
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


def test_an_answer_of_the_process_before_says_nothing_about_the_new_one():
    world = World(1).ready()
    old = world.fleet.to_ask()
    world.started[0].end = KILLED
    world.run(1.5)
    world.fleet.answered(old[0], world.now_s, is_well=True, load=None)
    assert world.phases == [(0, Phase.STARTING)]


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
    restarts = Restarts(max_restarts=4)
    assert [restarts.failed(float(i)) for i in range(5)] == [1.0, 2.0, 4.0, 8.0, None]
    assert restarts.failed(4.0 + WINDOW_S + 1) == 1.0
    patient = Restarts(max_restarts=100)
    assert [patient.failed(0.0) for _ in range(10)][-1] == 60.0


def test_a_silent_server_is_killed_and_replaced():
    world = World(1, silence_s=60.0).ready(10.0)
    [server] = world.started
    world.run(59.0, silent=(server,))
    assert server.told == []
    world.run(2.0, silent=(server,))
    assert server.told == ["kill"]
    assert "did not answer for 60 s" in world.fleet.replicas[0].last_failure
    assert world.run(2.0).ready().listed == ["http://s2"]


def test_scaling_down_removes_from_the_list_waits_terminates_and_kills_what_does_not_end():
    world = World(3).ready()
    world.fleet.scale_to(2)
    last = world.started[2]
    world.run()
    assert world.listed == ["http://s1", "http://s2"]
    assert (last.told, world.phases[2]) == ([], (2, Phase.LEAVING))

    world.run(LEAVE_S)
    assert (last.told, world.phases[2]) == (["terminate"], (2, Phase.DRAINING))
    world.run(DRAIN_S + END_GRACE_S)
    assert last.told == ["terminate", "kill"]
    world.run(0.5)
    assert world.phases == [(0, Phase.READY), (1, Phase.READY)]


def test_scaling_down_takes_those_first_that_do_not_serve():
    world = World(3).run()
    for server in world.started[1:]:
        server.url = f"http://s{server.pid}"
    world.run()
    world.fleet.scale_to(2)
    world.run()
    assert world.started[0].told == ["terminate"]
    assert world.listed == ["http://s2", "http://s3"]


def test_a_number_is_free_again_when_its_server_is_gone():
    world = World(2).ready()
    world.fleet.scale_to(1)
    world.run(LEAVE_S)
    world.fleet.scale_to(2)
    world.run()
    assert [each.number for each in world.started] == [0, 1, 2]

    scarce = World(2, places=2).ready()
    scarce.fleet.scale_to(1)
    scarce.run(LEAVE_S)
    scarce.fleet.scale_to(2)
    assert len(scarce.run(1.0).started) == 2, "there is no device for it yet"
    scarce.started[1].end = ServerEnd(0, "exited with code 0")
    assert [each.number for each in scarce.run(0.5).started] == [0, 1, 1]


@pytest.mark.parametrize(
    ("world", "replicas", "rule"),
    [
        (World(), 0, r"\[1, 512\]"),
        (World(), 513, r"\[1, 512\]"),
        (World(places=4), 5, r"\[1, 4\], the devices of this machine"),
        (World(bounds=ScaleBounds(min_replicas=2, max_replicas=3)), 4, r"\[2, 3\], from --min-replicas to"),
    ],
)
def test_a_number_out_of_bounds_is_refused(world, replicas, rule):
    with pytest.raises(RequestError, match=rf"replicas is {replicas}, but it must lie in {rule}"):
        world.fleet.scale_to(replicas)


def test_a_queue_adds_servers_and_a_long_idle_time_takes_them_away():
    bounds = ScaleBounds(min_replicas=1, max_replicas=2, queue_tokens=100, up_after_s=5.0, down_after_s=30.0)
    world = World(1, bounds=bounds).ready()
    assert world.started[0].share == 2, "there may be two of them one day"
    world.run(6.0, load=Load(500, 1.0))
    assert world.fleet.target == 2
    world.ready(load=Load(0, 0.1)).run(29.0, load=Load(0, 0.1))
    assert world.listed == ["http://s1", "http://s2"]
    world.run(2.0 + LEAVE_S, load=Load(0, 0.1))
    assert world.started[1].told == ["terminate"]


def test_the_end_drains_all_at_once():
    world = World(3).ready()
    world.started[0].end = KILLED
    world.run()
    world.fleet.stop(world.now_s)
    assert world.lists[-1] == []
    assert [each.told for each in world.started] == [[], ["terminate"], ["terminate"]]
    world.run(5.0)
    assert len(world.started) == 3, "nothing is started any more"
    for server in world.started[1:]:
        server.end = ServerEnd(0, "exited with code 0")
    assert world.run(0.5).fleet.is_gone


def test_the_end_of_ray_is_the_end():
    world = World().ready()
    world.gone = "the connection to Ray has ended"
    assert world.run().fleet.failure == (1, "the connection to Ray has ended")
    assert world.fleet.is_gone
    assert world.lists[-1] == []


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


def test_the_load_of_a_server_is_that_of_its_ranks():
    rank = {
        "num_waiting_uncached_tokens": 100,
        "num_running_reqs": 1,
        "max_running_requests": 4,
        "token_usage": 0.1,
    }
    other = rank | {"token_usage": 0.9}
    assert load_of({"loads": [rank]}) == Load(100, 0.25)
    assert load_of({"loads": [rank, other]}) == Load(200, 0.5)
    empty: list[dict[str, object]] = [{}, {"loads": []}, {"loads": "x"}]
    assert [load_of(body) for body in empty] == [None] * 3
    assert load_of({"loads": ["x", {"token_usage": "y"}]}) == Load(0, 0.0)
