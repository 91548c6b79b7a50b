"""`pair_settings`: the settings of an engine with `--disaggregation-mode`; a part of `prepare`."""

from __future__ import annotations

import dataclasses

from ....models.spec.model_spec import ModelSpec
from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import ConfigError


def pair_settings(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The configuration; a pair of a prefill and a decode engine in one server is two replicas.

    Raises:
        ConfigError: something cannot be handed over.
    """
    mode, parallel = config.scheduler.disaggregation_mode, config.parallel
    if mode == "null":
        return config
    if spec.state is not None:
        raise ConfigError(
            f"disaggregation_mode is {mode}, but layers of this model keep a state besides KV, which is not handed "
            "over; leave it out"
        )
    if spec.encoder is not None:
        raise ConfigError(
            f"disaggregation_mode is {mode}, but an encoder generates nothing after its prompt; leave it out"
        )
    for name, value, usual in (
        ("dp", parallel.dp, 1),
        ("nnodes", parallel.nnodes, 1),
        ("executor", parallel.executor, "local"),
    ):
        if value != usual:
            raise ConfigError(
                f"disaggregation_mode is {mode} with {name} {value}, but such an engine has one scheduler, and its "
                f"ranks are on one machine; leave --{name} out, and start several engines behind a router"
            )
    if mode != "both":
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, dp=2))
