"""Servers for the clients: one of the default model, and one of a random model with a long context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.models.hub.built_in.fetch import cached_model

from ..model import make_model
from ..serving import EngineServe


@pytest.fixture(scope="session")
def default_serve() -> Iterator[EngineServe]:
    """A server of the default model that takes any model name: agents send names of their own."""
    if cached_model() is None:
        pytest.skip("the default model is not in the cache")
    with EngineServe("--served-model-name", "*", "--max-total-tokens", "32768", "--deterministic") as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


@pytest.fixture(scope="session")
def long_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServe]:
    """A server of a random model with room for an agent's tools, one token for most of their characters."""
    folder = make_model(tmp_path_factory.mktemp("models") / "long-llama", max_model_len=65536)
    with EngineServe(
        *(str(folder), "--dtype", "float32", "--served-model-name", "*", "--max-total-tokens", "131072")
    ) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log
