"""`engine serve --tp 2 --executor ray` with a real Ray on this machine: as one rank, and its end, whoever fails."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.runtime.installation import cache_dir

from .serving import EngineServe
from .test_tensor_parallel import answers

pytestmark = [pytest.mark.real_process, pytest.mark.slow, pytest.mark.usefixtures("real_ray")]

ARGUMENTS = ("--dtype", "float32", "--tp", "2", "--executor", "ray")
START_S = 180.0  # Ray's own processes begin first


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without Ray's files, and with the compiled kernels."""
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        cache = Path(home, ".cache", "engine")
        cache.mkdir(parents=True)
        (cache / "kernels").symlink_to(cache_dir() / "kernels")
        monkeypatch.setenv("HOME", home)
        yield Path(home)


def session_of(engine: EngineServe) -> list[str]:
    """Processes that descend from the engine, Ray's too: they share its session or were told its directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        belongs = int(session) == engine.process.pid or f"TMPDIR={engine.tmp}".encode() in environment
        if belongs and state != "Z":
            found.append(f"{entry.name} {command}")
    return found


def assert_nothing_is_left(engine: EngineServe) -> None:
    deadline_s = time.monotonic() + 10.0
    while (left := session_of(engine)) and time.monotonic() < deadline_s:
        pass
    assert left == []
    assert engine.leftovers() == []


def actor_pid(engine: EngineServe) -> int:
    match = re.search(r"\(RayNode pid=(\d+)", engine.log)
    assert match, engine.log
    return int(match[1])


def test_ranks_on_ray_answer_as_one_rank_and_leave_nothing(serve, start_serve, model, home):
    engine = start_serve(str(model), *ARGUMENTS).wait_until_ready(START_S)
    assert set(engine.pids) == {"scheduler", "detokenizer", "tokenizer_manager", "model_runner_1"}
    assert "starting Ray on this machine" in engine.log

    assert answers(engine.url) == answers(serve.url)

    # As some shells and service managers do: Ray must not be gone before the engine has drained.
    os.killpg(engine.process.pid, signal.SIGTERM)
    assert engine.wait() == 0
    assert_nothing_is_left(engine)
    assert not (home / ".ray").exists()
    assert "Traceback" not in engine.log


def test_an_actor_that_dies_ends_the_engine_and_is_named(start_serve, model):
    engine = start_serve(str(model), *ARGUMENTS).wait_until_ready(START_S)

    os.kill(actor_pid(engine), signal.SIGKILL)

    assert engine.wait() == 1
    (cause,) = engine.causes
    assert cause.startswith("engine: machine 1 (Ray, ")
    # Ray says the latter where it has not yet made sure, as on a busy machine.
    assert re.search(r"The actor (is dead because its worker process has died|\w+ is unavailable)", cause)
    assert_nothing_is_left(engine)


def test_a_rank_that_dies_is_named_through_its_actor(start_serve, model):
    engine = start_serve(str(model), *ARGUMENTS).wait_until_ready(START_S)

    os.kill(engine.pids["model_runner_1"], signal.SIGKILL)

    assert engine.wait() == 1
    (cause,) = engine.causes
    assert cause.startswith("engine: machine 1: model_runner of rank 1 was killed by SIGKILL")
    assert_nothing_is_left(engine)
