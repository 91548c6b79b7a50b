"""`state_settings`: the settings that serve a model with state layers; a part of `resolve`.

Such a layer keeps one state of a request, which is exact at the last computed token only. KV that returns from the host
would need the state at its end, which is not copied. Settings for that are refused if a user gave them; defaults are
changed with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ....runtime.errors import ConfigError

if TYPE_CHECKING:
    from ....models.spec.model_spec import ModelSpec
    from ....runtime.config.engine_config import EngineConfig


def state_settings(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, Mapping[str, str]]:
    """The configuration with the values that state layers need, and setting -> reason for those that were changed.

    Raises:
        ConfigError: a setting asks for something that is not implemented for state layers.
    """
    assert spec.state is not None
    scheduler, cache = config.scheduler, config.cache
    for name, contradicts, why, way_out in (
        (
            "preemption_mode is swap",
            scheduler.preemption_mode == "swap",
            "states are not copied to the host",
            "omit --preemption-mode",
        ),
        (
            f"swap_space is {cache.swap_space}",
            cache.swap_space not in ("auto", 0.0),
            "states are not copied to the host",
            "omit --swap-space",
        ),
        (
            "model_impl is transformers",
            config.model.model_impl == "transformers",
            "only the engine's own model keeps its states",
            "omit --model-impl",
        ),
    ):
        if contradicts:
            raise ConfigError(f"{name}, but {spec.model_type} has layers with a state: {why}; {way_out}")
    notes = {
        "preemption_mode": "states are not copied to the host",
        "swap_space": "states are not copied to the host",
    }
    return replace(
        config,
        cache=replace(cache, swap_space=0.0),
        scheduler=replace(scheduler, preemption_mode="recompute"),
    ), notes
