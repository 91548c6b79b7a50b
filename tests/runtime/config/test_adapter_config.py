"""`AdapterConfig`: ranges, and settings that need each other."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.config.adapter_config import AdapterConfig
from engine.runtime.config.config_sources import from_arguments, from_flags, merge
from engine.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": ("sql",)}, "lora is 'sql', but it must be NAME=PATH, such as sql=./adapters/sql"),
        ({"lora": ("=x",)}, "lora is '=x', but it must be NAME=PATH"),
        ({"lora": ("a=",)}, "lora is 'a=', but it must be NAME=PATH"),
        ({"lora": ("a=x", "a=y")}, "lora names 'a' twice; give each adapter a name of its own"),
        (
            {"lora": ("a=x", "b=y"), "max_loaded_loras": 1},
            "lora has 2 adapters, but max_loaded_loras is 1; raise it",
        ),
        ({"max_loaded_loras": 0}, "max_loaded_loras is 0, but it must be at least 1"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0, but it must be at least 1"),
        ({"max_lora_rank": 513}, "max_lora_rank is 513, but it must be at most 512"),
        ({"allow_runtime_lora": True}, "allow_runtime_lora is on, but lora_root is not set"),
    ],
)
def test_values_that_do_not_fit(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        AdapterConfig(**settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "enabled", "more"),
    [
        ({}, False, False),
        ({"lora": ("a=x",)}, True, False),
        ({"enable_lora": True}, True, True),
        ({"allow_runtime_lora": True, "lora_root": "."}, True, True),
        ({"lora_root": "."}, False, False),
        ({"lora": ("a=x",), "enable_lora": True}, True, True),
    ],
)
def test_what_needs_memory_for_adapters(settings: dict[str, Any], enabled: bool, more: bool):
    config = AdapterConfig(**settings)
    assert (config.is_enabled, config.can_load_more) == (enabled, more)


def test_a_path_may_have_further_equal_signs():
    assert AdapterConfig(lora=("a=x=y", "b=/z")).named_paths == [("a", "x=y"), ("b", "/z")]


def test_flags_are_repeated_and_have_the_names_of_other_engines():
    flags = from_flags({"lora": ["a=x", "b=y"], "max_lora_rank": "auto", "lora_target_modules": ["q_proj"]})
    config = merge(flags).config.adapters
    assert config.lora == ("a=x", "b=y")
    assert (config.max_lora_rank, config.lora_target_modules) == ("auto", ("q_proj",))
    config = merge(from_arguments({"lora_modules": ["a=x"], "max_cpu_loras": 3})).config.adapters
    assert (config.lora, config.max_loaded_loras) == (("a=x",), 3)
