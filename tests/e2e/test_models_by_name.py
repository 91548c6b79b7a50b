"""A model of the hub in every command that takes one: downloaded by the first start, then served without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.runtime.installation import cache_dir
from tests.fake_hub import FakeHub

from . import serving
from .conftest import StartServe
from .serving import DEADLINE_S, run_engine

pytestmark = pytest.mark.real_process
NAME = "org/small-llama"


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the tests' model; caches are the test's own, except for the compiled kernels."""
    with FakeHub() as fake:
        fake.add_folder(NAME, model)
        own = fake.environment(tmp_path)
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "kernels").symlink_to(cache_dir() / "kernels")
        usual = serving.engine_environment
        monkeypatch.setattr(serving, "engine_environment", lambda tmp: usual(tmp) | own | dict(OFFLINE))
        OFFLINE.clear()
        yield fake
        OFFLINE.clear()


OFFLINE: dict[str, str] = {}
"""Further variables of the commands that follow."""


def go_offline() -> None:
    OFFLINE.update(HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")


@pytest.mark.slow
def test_serve_downloads_then_needs_no_network(hub: FakeHub, start_serve: StartServe, tmp_path: Path) -> None:
    engine = start_serve(NAME)
    engine.wait_until_ready()
    assert engine.model == NAME
    assert f"downloading {NAME}: " in engine.log
    listed = httpx.get(f"{engine.url}/v1/models", timeout=DEADLINE_S).json()
    assert [model["id"] for model in listed["data"]] == [NAME]

    rows = json.loads(run_engine(engine.tmp, "ps", "--json").stdout)
    (own,) = [row for row in rows if row["pid"] == engine.process.pid]
    assert (own["model"], own["url"]) == (NAME, engine.url)
    assert own["memory_bytes"] > 1 << 20
    refused = run_engine(engine.tmp, "rm", NAME)
    assert (refused.returncode, "uses it; stop that first" in refused.stderr) == (2, True)
    assert engine.stop() == 0
    assert engine.leftovers() == []

    hub.requests.clear()
    go_offline()
    again = start_serve(NAME)
    again.wait_until_ready()
    assert "downloading" not in again.log
    assert again.stop() == 0
    assert hub.requests == []


@pytest.mark.slow
def test_each_command_takes_the_name(hub: FakeHub, tmp_path: Path) -> None:
    pulled = run_engine(tmp_path, "pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    go_offline()
    chat = run_engine(tmp_path, "chat", "--model", NAME, "--max-tokens", "3", "--json", "the quick")
    assert chat.returncode == 0, chat.stderr
    assert json.loads(chat.stdout)["model"] == NAME
    doctor = run_engine(tmp_path, "doctor", NAME, "--port", "0")
    assert f"model      {NAME}: llama" in doctor.stdout
    shown = run_engine(tmp_path, "serve", NAME, "--print-config")
    assert NAME in shown.stdout
    simulated = run_engine(tmp_path, "simulate", NAME, "--num-requests", "3")
    assert (simulated.returncode, NAME in simulated.stdout) == (0, True), simulated.stderr
    sizes = ("--num-prompts", "1", "--random-input-len", "8", "--random-output-len", "2")
    bench = run_engine(tmp_path, "bench", "offline", "--model", NAME, *sizes)
    assert bench.returncode == 0, bench.stderr


@pytest.mark.slow
def test_llm_shows_its_first_download_and_is_silent_then(hub: FakeHub, tmp_path: Path) -> None:
    code = f"from engine import LLM; llm = LLM({NAME!r}, num_threads=1); print(llm.model_name); llm.close()"

    def run() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | serving.engine_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        return done.stdout, done.stderr

    out, err = run()
    assert out == f"{NAME}\n"
    assert err.startswith(f"downloading {NAME}: ")
    assert run() == (out, "")
