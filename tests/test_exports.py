"""The public names of the package `engine`. A new one is a decision: it stays for as long as users import it."""

from __future__ import annotations

import pytest

import engine

PUBLIC = {
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "LLM",
    "RequestError",
    "SamplingParams",
}


def test_the_exports_are_these():
    assert set(engine.__all__) == PUBLIC
    assert len(engine.__all__) == len(PUBLIC)


def test_each_export_is_the_object_of_that_name():
    for name in PUBLIC:
        assert getattr(engine, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="'Llm'"):
        engine.Llm  # noqa: B018
