"""What `--disaggregation-mode` refuses, and the two replicas of a pair in one server."""

from __future__ import annotations

from typing import Any

import pytest

from engine.launch.resolve.kind_settings import pair_settings
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from engine.scheduler.transfer.link.make_link import link_key

from .test_encoder_settings import MINILM
from .test_resolve import SPEC
from .test_state_sizes import SHORT

MODES: Any = ("prefill", "decode", "both")


def config(mode: Any, **groups: Any) -> EngineConfig:
    return EngineConfig(scheduler=SchedulerConfig(disaggregation_mode=mode), **groups)


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_one_engine_stays_as_it_is(mode: str) -> None:
    assert pair_settings(config(mode), SPEC) == config(mode)


def test_a_pair_is_two_replicas() -> None:
    assert pair_settings(config("both"), SPEC).parallel.dp == 2


@pytest.mark.parametrize("mode", MODES)
def test_each_engine_may_have_several_ranks(mode: Any) -> None:
    parallel = pair_settings(config(mode, parallel=ParallelConfig(tp=4)), SPEC).parallel
    assert (parallel.tp, parallel.dp) == (4, 2 if mode == "both" else 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("groups", "spec", "words"),
    [
        ({}, SHORT, "layers of this model keep a state besides KV"),
        ({}, MINILM, "an encoder generates nothing after its prompt"),
        ({"parallel": ParallelConfig(dp=2)}, SPEC, "with dp 2"),
        (
            {"parallel": ParallelConfig(tp=2, nnodes=2, dist_init_addr="h:1")},
            SPEC,
            "with nnodes 2, but such an engine has one scheduler, and its ranks are on one machine",
        ),
        ({"parallel": ParallelConfig(executor="ray")}, SPEC, "with executor ray"),
        ({"parallel": ParallelConfig(pp=2)}, SPEC, "with pp 2"),
        ({"cache": CacheConfig(radix_cache=False)}, SPEC, "without the prefix cache"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(mode: Any, groups: Any, spec: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pair_settings(config(mode, **groups), spec)


def test_a_prefill_engine_has_a_known_port() -> None:
    for mode in ("prefill", "both"):
        with pytest.raises(ConfigError, match="bootstrap_port is 0"):
            config(mode, server=ServerConfig(bootstrap_port=0))
    config("decode", server=ServerConfig(bootstrap_port=0))


def test_kv_crosses_a_network_with_a_key_only() -> None:
    assert link_key(config("decode")) is None
    with pytest.raises(ConfigError, match="name a file with --cluster-key-file"):
        link_key(config("decode", server=ServerConfig(host="0.0.0.0")))
