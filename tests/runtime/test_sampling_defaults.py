"""Defaults from a model's files: every value that a request could have, and no other one."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from engine.runtime.errors import RequestError
from engine.runtime.sampling_defaults import (
    NAMES,
    OPENAI_DEFAULTS,
    SamplingDefaults,
    checked_defaults,
    effective_defaults,
)
from engine.runtime.sampling_params import SamplingParams

USABLE: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 0.6, 2.5, 100],
    "top_k": [-1, 0, 1, 50, 50.0],
    "top_p": [0, 0.1, 1, 1.0],
    "min_p": [0, 0.05, 1.0],
    "repetition_penalty": [0.5, 1, 1.1, 10],
}
UNUSABLE: dict[str, list[Any]] = {
    "temperature": [-1, 100.5, math.nan, math.inf, "0.6", True, [0.6], {}],
    "top_k": [-2, 2**31, 1.5, "50", False],
    "top_p": [-0.1, 1.5, "1", None, []],
    "min_p": [-0.1, 1.5, "0"],
    "repetition_penalty": [0, -1, 10.5, "1"],
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_the_tables_have_every_parameter():
    assert USABLE.keys() == UNUSABLE.keys() == set(NAMES)


@pytest.mark.parametrize(("name", "value"), pairs(USABLE))
def test_a_usable_value_is_one_that_a_request_may_have(name: str, value: Any):
    defaults = checked_defaults({name: value}, "m/f.json", "f.json")

    assert getattr(defaults.params(), name) == value
    assert defaults.source == "f.json"


@pytest.mark.parametrize(("name", "value"), pairs(UNUSABLE))
def test_an_unusable_value_is_left_out_with_a_warning(name: str, value: Any, caplog: Any):
    with caplog.at_level(logging.WARNING):
        assert checked_defaults({name: value}, "m/f.json", "f.json") == OPENAI_DEFAULTS

    if value is not None:  # null is no value
        [record] = caplog.records
        assert record.getMessage().startswith(f"m/f.json: {name} is ")
        assert record.getMessage().endswith("; the value is ignored")


def test_given_fields_have_precedence_even_with_a_value_without_effect():
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1)
    neutral: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }

    assert defaults.params() == SamplingParams(**defaults.values())
    assert defaults.params(neutral) == SamplingParams(**neutral)
    for name, value in neutral.items():
        assert defaults.params({name: value}) == SamplingParams(**(defaults.values() | {name: value}))


def test_a_given_field_is_checked():
    with pytest.raises(RequestError, match=r"top_p is 7, but it must lie in \[0, 1\]"):
        OPENAI_DEFAULTS.params({"top_p": 7})
    with pytest.raises(TypeError, match="no field 'tempreature'; did you mean 'temperature'"):
        OPENAI_DEFAULTS.params({"tempreature": 7})


def test_a_field_may_have_its_name_elsewhere():
    assert OPENAI_DEFAULTS.params({"max_tokens": 7}).max_new_tokens == 7
    of_model = SamplingDefaults(repetition_penalty=1.2, source="generation_config.json")
    assert of_model.params({"repeat_penalty": 1.1}).repetition_penalty == 1.1


def test_the_setting_chooses():
    of_model = SamplingDefaults(temperature=0.6, source="generation_config.json")

    assert effective_defaults("model", of_model) is of_model
    assert effective_defaults("openai", of_model) == OPENAI_DEFAULTS


def test_one_line_says_values_source_and_what_is_left_out():
    of_model = SamplingDefaults(temperature=0.6, top_k=20, source="f.json", not_taken=("max_new_tokens",))

    assert of_model.described() == "temperature=0.6 top_k=20 from f.json; not taken: max_new_tokens"
    assert OPENAI_DEFAULTS.described() == "OpenAI's defaults"
