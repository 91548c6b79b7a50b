"""Another log level and a profile, in all processes of a real server while it works, and in restarted ones."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from .serving import DEADLINE_S, SLOW, EngineServe

pytestmark = pytest.mark.real_process

DEBUG_LINE = "level=debug process=scheduler logger=scheduler.event_loop"
PROCESSES = ("detokenizer", "model_runner_1", "scheduler", "tokenizer_manager")
LONG = {
    "prompt": "a secret prompt",
    "max_tokens": 2000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@contextmanager
def long_request(engine: EngineServe) -> Iterator[threading.Event]:
    """While a request runs, which takes 40 s at least; the event is set at its end."""
    ended, begun, leave = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        with (
            httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client,
            client.stream("POST", "/v1/completions", json=LONG) as stream,
        ):
            for _ in stream.iter_lines():
                begun.set()
                if leave.is_set():
                    return
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(DEADLINE_S)
        yield ended
    finally:
        leave.set()
        thread.join(DEADLINE_S)


def wait_for_tokens(engine: EngineServe, num: int) -> None:
    """Wait until so many more have been generated, one per step."""
    before = engine.metrics_when(lambda _: True)["generation_tokens_total"]
    engine.metrics_when(lambda metrics: metrics["generation_tokens_total"] >= before + num)


def frames_of(path: Path) -> set[str]:
    """All frames of a profile."""
    return {frame for line in path.read_text().splitlines() for frame in line.rpartition(" ")[0].split(";")}


@pytest.mark.slow
def test_log_level_and_profile_of_a_running_request(start_serve, model):
    engine = start_serve(str(model), "--dtype", "float32", "--tp", "2", *SLOW).wait_until_ready()
    with (
        httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client,
        long_request(engine) as ended,
    ):
        assert "level=debug" not in engine.log
        assert client.put("/log_level", json={"level": "debug"}).json() == {"level": "debug"}
        engine.wait_for_log(DEBUG_LINE)

        begun = client.post("/start_profile", json={"rate": 200, "duration": 3600}).json()
        wait_for_tokens(engine, 100)
        profile = client.post("/stop_profile").json()
        assert not ended.is_set()  # serving goes on

        assert profile == {
            "folder": begun["folder"],
            "files": [f"{name}.folded" for name in PROCESSES],
            "missing": [],
        }
        folder = Path(profile["folder"])
        assert folder.parent == engine.crash_dir
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in PROCESSES:
            path = folder / f"{name}.folded"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert "secret" not in path.read_text()
            assert f"engine.{name.removesuffix('_1')}.process:main" in frames_of(path)
        assert "engine.scheduler.event_loop:EventLoop.step" in frames_of(folder / "scheduler.folded")
        assert "engine.model_runner.distributed.rank_loop:RankLoop.step" in frames_of(
            folder / "model_runner_1.folded"
        )
        begun = client.post("/start_profile").json()
        engine.wait_for_log(
            Path(begun["folder"]).name
        )  # the supervisor has it, so nobody is told to end before
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []
    left = sorted(path.name for path in Path(begun["folder"]).iterdir())
    assert left == [f"{name}.folded" for name in PROCESSES]  # the end of the server is that of a profile


@pytest.mark.slow
def test_who_takes_the_place_of_a_lost_process_follows_too(start_serve, model):
    engine = start_serve(str(model), "--dtype", "float32").wait_until_ready()
    with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client:
        assert client.put("/log_level", json={"level": "debug"}).status_code == 200
        assert client.post("/start_profile", json={"duration": 3600}).status_code == 200
        so_far = len(engine.log)
        os.kill(engine.pids["scheduler"], signal.SIGKILL)
        engine.wait_for_log("recovered restart=1")
        os.kill(engine.pids["tokenizer_manager"], signal.SIGKILL)
        engine.wait_for_log("recovered restart=2")
    with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client:
        assert client.get("/log_level").json() == {"level": "debug"}
        body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert DEBUG_LINE in engine.log[so_far:].partition("recovered restart=1")[2]
        profile = client.post("/stop_profile").json()
        assert profile["missing"] == []
        assert set(profile["files"]) >= {"scheduler-1.folded", "tokenizer_manager-2.folded"}
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []
