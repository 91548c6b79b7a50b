"""One server with the default model, for the clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.runtime.model_files.default_model import cached_default_model

from ..serving import EngineServe


@pytest.fixture(scope="session")
def default_serve() -> Iterator[EngineServe]:
    """A server of the default model that takes any model name: agents send names of their own."""
    if cached_default_model() is None:
        pytest.skip("the default model is not in the cache")
    with EngineServe("--served-model-name", "*", "--max-total-tokens", "32768", "--deterministic") as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log
