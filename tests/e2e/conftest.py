"""A small model for all end-to-end tests, one server for those that leave it as it was, and servers for the others."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import openai
import pytest

from .serving import DEADLINE_S, SLOW, EngineServe

StartServe = Callable[..., EngineServe]
CRAMPED: Final = (
    *("--dtype", "float32", "--page-size", "4", "--max-total-tokens", "400"),
    *("--max-running-requests", "16", "--chunked-prefill-size", "16", "--schedule-conservativeness", "0.1"),
)
RAY_FOLDER: Final = Path(__file__).parents[2] / "build" / "ray"


@pytest.fixture(scope="session")
def model(small_llama: Path) -> Path:
    """A folder in Hugging Face layout; see `model.py`."""
    return small_llama


@pytest.fixture
def model_copy(model: Path, tmp_path: Path) -> Path:
    """The same, for a test to break."""
    return Path(shutil.copytree(model, tmp_path / "broken-llama"))


@pytest.fixture(scope="session")
def serve(shared_serve: EngineServe) -> EngineServe:
    """A server that all tests share: whoever uses it leaves it idle."""
    return shared_serve


@pytest.fixture(scope="session")
def slow_serve(model: Path) -> Iterator[EngineServe]:
    """Another one, whose memory is far too small for many requests, and on which no answer ends before a client on a
    busy machine has read its first events and left."""
    with EngineServe(str(model), *CRAMPED, *SLOW) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


@pytest.fixture
def start_serve() -> Iterator[StartServe]:
    """Starts servers of a test's own, and kills what is left of them."""
    started: list[EngineServe] = []

    def start(*arguments: str) -> EngineServe:
        started.append(EngineServe(*arguments))
        return started[-1]

    yield start
    for engine in started:
        engine.__exit__()


@pytest.fixture
def real_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, for the processes that a test starts; skips the test where `make ray` has not installed it."""
    if importlib.util.find_spec("ray") is None:
        if not (RAY_FOLDER / "ray").is_dir():
            pytest.skip(
                f"Ray is not installed in {RAY_FOLDER}: `make ray` installs it, from the package index"
            )
        paths = filter(None, (os.environ.get("PYTHONPATH"), str(RAY_FOLDER)))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "90")  # on a busy machine a start takes a minute


@pytest.fixture(scope="session")
def client(serve: EngineServe) -> Iterator[openai.OpenAI]:
    """The official client, with the shared server."""
    with openai_client(serve) as client:
        yield client


def openai_client(engine: EngineServe) -> openai.OpenAI:
    """The official client, without its retries: a test shall see what the server says."""
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S)
