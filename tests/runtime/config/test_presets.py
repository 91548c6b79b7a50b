"""Presets: a layer right above the defaults, whose values are legal and not the defaults already."""

from __future__ import annotations

import pytest

from engine.runtime.config.config_fields import config_fields
from engine.runtime.config.config_sources import (
    from_arguments,
    from_flags,
    from_yaml_file,
    merge,
)
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.config.presets import PRESETS, preset_reasons
from engine.runtime.errors import ConfigError


def value_of(config: EngineConfig, name: str) -> object:
    return getattr(getattr(config, config_fields()[name].group), name)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_exactly_its_table(preset):
    merged = merge(from_arguments({"preset": preset}))

    for name, field in config_fields().items():
        if name == "preset":
            assert (value_of(merged.config, name), merged.origins[name]) == (preset, "argument preset")
        elif name in PRESETS[preset]:
            assert value_of(merged.config, name) == PRESETS[preset][name].value
            assert merged.origins[name] == f"preset {preset}"
        else:
            assert value_of(merged.config, name) == field.default
            assert merged.origins[name] == "default"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_value_has_the_type_of_its_setting_and_a_reason(preset):
    for name, chosen in PRESETS[preset].items():
        assert config_fields()[name].check(chosen.value) == chosen.value
        assert chosen.reason


def test_whatever_else_sets_a_value_wins_over_the_preset(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("preset: latency\nmax_queued_requests: 7\n")
    merged = merge(from_yaml_file(path), from_flags({"max_num_seqs": "3"}))

    assert merged.config.scheduler.max_queued_requests == 7
    assert merged.config.scheduler.max_running_requests == 3
    assert merged.config.scheduler.phases == "decode-first"
    assert merged.origins["max_queued_requests"] == f"{path}:2"
    assert merged.origins["max_running_requests"] == "--max-num-seqs"


def test_a_later_layer_chooses_another_preset_and_may_choose_none(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("preset: latency\n")

    merged = merge(from_yaml_file(path), from_flags({"preset": "rag"}))
    assert merged.config.scheduler.schedule_policy == "lpm"
    assert merged.config.scheduler.phases == "mixed"
    assert merge(from_yaml_file(path), from_arguments({"preset": None})).config == EngineConfig()


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="--preset is 'chatt', but it must be one of .*did you mean 'chat'"):
        from_flags({"preset": "chatt"})


def test_reasons_are_told_of_what_the_preset_still_sets():
    merged = merge(from_arguments({"preset": "chat", "phases": "mixed"}))
    reasons = preset_reasons("chat", merged.origins)
    assert reasons == {name: value.reason for name, value in PRESETS["chat"].items() if name != "phases"}
    assert preset_reasons(None, merge().origins) == {}
