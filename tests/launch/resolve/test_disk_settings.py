"""What `--kv-disk` refuses."""

from __future__ import annotations

from typing import Any

import pytest

from engine.launch.resolve.kind_settings import encoder_settings, state_settings
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.errors import ConfigError

from .test_encoder_settings import MINILM
from .test_state_sizes import SHORT

DISK = CacheConfig(kv_disk="folder")


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            {"parallel": ParallelConfig(tp=2, nnodes=2, dist_init_addr="10.0.0.1:5000")},
            "kv_disk is set with nnodes 2, .*; leave --kv-disk out, or --nnodes",
        ),
        ({"parallel": ParallelConfig(tp=2, executor="ray")}, "kv_disk is set with executor ray"),
        (
            {"scheduler": SchedulerConfig(disaggregation_mode="decode")},
            "kv_disk is set with disaggregation_mode decode, .*; leave --kv-disk out, or --disaggregation-mode",
        ),
    ],
)
def test_several_machines_and_half_an_engine(groups: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(cache=DISK, **groups)


def test_models_with_states_and_encoders() -> None:
    config, _ = state_settings(EngineConfig(cache=DISK), SHORT)
    assert config.cache.kv_disk == "folder"
    with pytest.raises(ConfigError, match=r"kv_disk is 'folder', .*is an encoder.*; omit --kv-disk"):
        encoder_settings(EngineConfig(cache=DISK), MINILM)


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_a_size_above_zero(size: float) -> None:
    with pytest.raises(ConfigError, match="kv_disk_size is .*, but it must be a number of GiB above 0"):
        CacheConfig(kv_disk_size=size)


def test_the_prefix_cache_must_be_on() -> None:
    with pytest.raises(ConfigError, match="kv_disk is set without the prefix cache"):
        CacheConfig(kv_disk="folder", radix_cache=False)


@pytest.mark.parametrize(
    ("fetch", "rule"),
    [
        ("timeout", ("timeout", None)),
        ("timeout:1500", ("timeout", 1.5)),
        ("best_effort", ("best_effort", None)),
        ("wait", ("wait", None)),
    ],
)
def test_kinds_of_loads(fetch: str, rule: tuple[str, float | None]) -> None:
    assert CacheConfig(kv_fetch=fetch).kv_fetch_rule() == rule


@pytest.mark.parametrize(
    "fetch",
    [
        "",
        "never",
        "wait:5",
        "timeout:",
        "timeout:0",
        "timeout:1.5",
        "timeout:600001",
        "timeout:" + "1" * 5000,
    ],
)
def test_other_kinds_of_loads_are_refused(fetch: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_fetch is '.*', but (it must be best_effort|the time must be)"):
        CacheConfig(kv_fetch=fetch)
