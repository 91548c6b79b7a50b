"""A GGUF file's `general.sampling.*` and `decision.temperature.*`: defaults of requests without their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_sampling
from engine.runtime.decision_calibration import calibration_of
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults

MakeGGUF = Callable[..., Path]


def read(make_gguf: MakeGGUF, **values: Any) -> SamplingDefaults:
    return read_gguf_sampling(GGUFFile(make_gguf({f"general.sampling.{k}": v for k, v in values.items()})))


def test_every_value_and_its_source(make_gguf: MakeGGUF):
    found = read(make_gguf, temp=0.6, top_k=20, top_p=0.95, min_p=0.05, penalty_repeat=1.1)

    assert found == SamplingDefaults(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        source="general.sampling.* of the GGUF file",
    )


def test_a_file_without_the_keys_has_openais_defaults(make_gguf: MakeGGUF):
    assert read(make_gguf) == OPENAI_DEFAULTS


@pytest.mark.parametrize(
    ("values", "name", "value"),
    [
        ({"temp": 0.0}, "temperature", 0.0),
        ({"temp": -1.0}, "temperature", 0.0),  # greedy in llama.cpp
        ({"top_k": 0}, "top_k", -1),
        ({"penalty_repeat": 1.5, "penalty_last_n": 0}, "repetition_penalty", None),
        ({"penalty_repeat": 1.5, "penalty_last_n": 64}, "repetition_penalty", 1.5),
    ],
)
def test_llama_cpps_meaning_of_a_value(make_gguf: MakeGGUF, values: dict[str, Any], name: str, value: Any):
    assert getattr(read(make_gguf, **values), name) == value


def test_what_is_not_taken_is_named(make_gguf: MakeGGUF):
    found = read(make_gguf, temp=0.5, mirostat=2, xtc_probability=0.5, penalty_last_n=64)
    assert found.not_taken == ("general.sampling.mirostat", "general.sampling.xtc_probability")
    assert read(make_gguf, mirostat=0, xtc_probability=0.0).not_taken == ()


def test_the_keys_of_a_gguf_file(make_gguf: MakeGGUF, caplog: Any):
    values = {"predicate": 1.3, "choice.4": 0.7, "score": -1.0, "mood": 1.0}
    file = GGUFFile(make_gguf({f"decision.temperature.{name}": value for name, value in values.items()}))

    assert calibration_of(file.metadata, "decision.temperature.", file.path) == {
        "predicate": 1.3,
        "choice.4": 0.7,
    }
    assert "'score' is -1.0, but it must be a number above 0" in caplog.text
    assert "'mood' is no type of question" in caplog.text
