from __future__ import annotations

import stat

import pytest

from engine.launch.child.control import SetLogLevel, StartProfile, StopProfile
from engine.tokenizer_manager import all_processes
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import FakeClock


def error(reply):
    return reply.status_code, reply.json()["error"]["code"]


def test_the_log_level_is_told_to_all_processes_and_shown(serve: Serve):
    served = serve()
    assert served.client.get("/log_level").json() == {"level": "info"}
    assert served.client.put("/log_level", json={"level": "debug"}).json() == {"level": "debug"}
    assert served.engine.orders == [SetLogLevel("debug")]
    assert served.client.get("/log_level").json() == {"level": "debug"}
    assert served.client.get("/server_info").json()["config"]["log"]["log_level"] == "debug"


@pytest.mark.parametrize(
    "body", [{"level": "DEBUG"}, {"level": "verbose"}, {"level": None}, {}, {"level": 10}]
)
def test_another_level_is_refused_and_changes_nothing(serve: Serve, body):
    served = serve()
    reply = served.client.put("/log_level", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "level")
    assert served.engine.orders == []


def test_a_profile_is_begun_and_ended_with_a_file_per_process(serve: Serve):
    served = serve()
    begun = served.client.post("/start_profile").json()
    folder = served.engine.crash_dir / begun["folder"].rpartition("/")[2]
    assert begun == {"folder": str(folder), "duration": 60, "rate": 100}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert served.engine.orders == [StartProfile(folder.name, 100, 60)]

    again = served.client.post("/start_profile", json={})
    assert error(again) == (409, "profile_running")
    assert "60 s more; POST /stop_profile" in again.json()["error"]["message"]

    ended = served.client.post("/stop_profile").json()
    names = [f"{name}.folded" for name in ("detokenizer", "scheduler", "tokenizer_manager")]
    assert ended == {"folder": str(folder), "files": names, "missing": []}
    assert served.engine.orders[1:] == [StopProfile()]

    late = served.client.post("/stop_profile")
    assert error(late) == (409, "no_profile")
    assert str(folder) in late.json()["error"]["message"]
    assert "POST /start_profile" in late.json()["error"]["message"]
    assert served.client.post("/start_profile").status_code == 200


def test_a_profile_that_has_ended_by_itself_needs_no_stop(serve: Serve):
    clock = FakeClock()
    served = serve(clock=clock)
    assert served.client.post("/start_profile", json={"duration": 5, "rate": 10.5}).json()["rate"] == 10.5
    clock.now_s += 4.9
    assert error(served.client.post("/start_profile")) == (409, "profile_running")
    clock.now_s += 0.2
    assert error(served.client.post("/stop_profile")) == (409, "no_profile")
    assert served.client.post("/start_profile").status_code == 200


def test_a_process_that_does_not_write_is_named(serve: Serve, monkeypatch):
    monkeypatch.setattr(all_processes, "_WRITTEN_S", 0.1)
    served = serve()
    served.engine.profiled = ("tokenizer_manager", "scheduler-1")
    served.client.post("/start_profile")
    ended = served.client.post("/stop_profile").json()
    assert ended["missing"] == ["detokenizer"]
    assert ended["files"] == ["scheduler-1.folded", "tokenizer_manager.folded"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({"duration": value}, "duration") for value in (0, -1, 3600.1, "60", True)),
        *(({"rate": value}, "rate") for value in (0, 0.9, 1000.1, [100])),
        *(({name: 5}, name) for name in ("output_dir", "num_steps", "start_step")),
    ],
)
def test_what_a_profile_cannot_be_is_refused(serve: Serve, body, param):
    served = serve()
    reply = served.client.post("/start_profile", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert served.engine.orders == []
    assert list(served.engine.crash_dir.iterdir()) == []


def test_what_other_engines_clients_send_besides_is_a_warning(serve: Serve):
    reply = serve().client.post("/start_profile", json={"activities": ["CPU"], "profile_by_stage": False})
    assert reply.json()["warnings"] == ["unknown field activities was ignored"]


def test_no_place_for_the_files_is_said_with_a_way_out(serve: Serve):
    served = serve()
    served.engine.crash_dir.rmdir()
    served.engine.crash_dir.touch()
    reply = served.client.post("/start_profile")
    assert error(reply) == (503, "no_profile_folder")
    assert "--crash-dir" in reply.json()["error"]["message"]
    served.engine.crash_dir.unlink()
    assert served.client.post("/start_profile").status_code == 200


def test_a_supervisor_that_does_not_listen_is_an_error_and_nothing_changes(serve: Serve):
    served = serve()
    served.engine.takes_orders = False
    assert error(served.client.put("/log_level", json={"level": "error"})) == (503, "engine_dead")
    assert error(served.client.post("/start_profile")) == (503, "engine_dead")
    served.engine.takes_orders = True
    assert served.client.get("/log_level").json() == {"level": "info"}
    assert error(served.client.post("/stop_profile")) == (409, "no_profile")


def test_old_profiles_make_room_and_what_is_not_ours_stays(serve: Serve):
    served = serve()
    crash_dir = served.engine.crash_dir
    report, ours, others = (crash_dir / name for name in ("crash-1.txt", "profile-1", "profile-2"))
    report.touch()
    for folder in (ours, others):
        folder.mkdir()
        (folder / "scheduler.folded").touch()
    (others / "notes").touch()
    folders = []
    for _ in range(all_processes.KEPT_PROFILES + 2):
        folders.append(served.client.post("/start_profile").json()["folder"])
        served.client.post("/stop_profile")
    assert report.exists() and not ours.exists()
    assert [path.name for path in others.iterdir()] == ["notes"]
    assert [folder for folder in folders if (crash_dir / folder).exists()] == folders[2:]
