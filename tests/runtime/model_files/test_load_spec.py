"""Sampling defaults by the name and the file of a model: the same for `load_spec` and for a start of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.model_files.default_model import DEFAULT_MODEL_NAME, DEFAULT_MODEL_SAMPLING
from engine.runtime.model_files.load_spec import load_spec
from engine.runtime.model_files.source import ModelSource
from engine.runtime.resolve.model_resolution import read_model
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from tests.runtime.model_files.gguf.test_gguf_config import METADATA

OF_THE_FILE = SamplingDefaults(temperature=0.5, source="general.sampling.* of the GGUF file")


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        (DEFAULT_MODEL_NAME, {}, DEFAULT_MODEL_SAMPLING),
        (DEFAULT_MODEL_NAME, {"general.sampling.temp": 0.5}, OF_THE_FILE),
        ("tiny", {}, OPENAI_DEFAULTS),
        ("tiny", {"general.sampling.temp": 0.5}, OF_THE_FILE),
    ],
)
def test_sampling_defaults_of_a_gguf_file(
    make_gguf: Callable[..., Path], name: str, keys: dict[str, Any], expected: SamplingDefaults
) -> None:
    source = ModelSource("gguf", str(make_gguf(METADATA | keys)), name)

    assert load_spec(source).sampling_defaults == expected
    assert read_model(ModelConfig(load_format="dummy"), source).spec.sampling_defaults == expected
