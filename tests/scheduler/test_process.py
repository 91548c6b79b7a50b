"""The start of the scheduler's process: what must be known before the weights are loaded."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, cast

import pytest

from engine.launch.child.child import Child
from engine.runtime.config.engine_config import EngineConfig, SchedulerConfig
from engine.runtime.config.server_config import LogConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from engine.scheduler import process


def test_a_log_that_cannot_be_written_is_known_before_the_weights_are_loaded(tmp_path: Path, monkeypatch):
    def load(*_args: Any) -> None:
        raise AssertionError("the weights were loaded first")

    monkeypatch.setattr(process, "load_model_runner", load)
    monkeypatch.setattr(process, "capacity_of", lambda _config, _spec: Capacity(128, 16, 16, 4, 97))
    for name in ("Inbox", "Outbox"):
        monkeypatch.setattr(process, name, lambda *_args, **_kwargs: None)
    settings = types.SimpleNamespace(
        config=EngineConfig(
            scheduler=SchedulerConfig(chunked_prefill_size=8),
            log=LogConfig(decision_log=str(tmp_path / "no" / "such" / "folder")),
        ),
        spec=types.SimpleNamespace(eos_token_ids=[0]),
        endpoints=types.SimpleNamespace(scheduler="", detokenizer=""),
        source=None,
    )

    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        process.main(cast(Child, types.SimpleNamespace(settings=settings)))
