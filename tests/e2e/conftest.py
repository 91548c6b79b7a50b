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

from .model import make_model
from .serving import DEADLINE_S, EngineServe

StartServe = Callable[..., EngineServe]
RAY_FOLDER: Final = Path(__file__).parents[2] / "build" / "ray"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout; see `model.py`."""
    return make_model(tmp_path_factory.mktemp("models") / "small-llama")


@pytest.fixture
def model_copy(model: Path, tmp_path: Path) -> Path:
    """The same, for a test to break."""
    return Path(shutil.copytree(model, tmp_path / "broken-llama"))


@pytest.fixture(scope="session")
def serve(model: Path) -> Iterator[EngineServe]:
    """A server that all tests share: whoever uses it leaves it idle."""
    with EngineServe(str(model), "--dtype", "float32") as engine:
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
