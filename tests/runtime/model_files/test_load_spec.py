"""The readers of a `ModelSpec` agree: `load_spec`, and `read_model`, with which a server and an `LLM` start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.model_files.built_in.models import DEFAULT_MODEL
from engine.runtime.model_files.load_spec import load_spec
from engine.runtime.model_files.model_spec import ModelSpec
from engine.runtime.model_files.source import ModelSource
from engine.runtime.resolve.model_resolution import read_model
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS
from tests.runtime.model_files.gguf.test_gguf_config import METADATA

MakeGGUF = Callable[..., Path]


def start_spec(source: ModelSource) -> ModelSpec:
    """The spec that a server starts with."""
    return read_model(ModelConfig(load_format="dummy"), source).spec


@pytest.mark.parametrize("read", [load_spec, start_spec])
def test_the_default_model_has_the_sampling_of_its_card(
    make_gguf: MakeGGUF, read: Callable[[ModelSource], ModelSpec]
) -> None:
    path = str(make_gguf(METADATA))

    assert read(ModelSource("gguf", path, DEFAULT_MODEL.name)).sampling_defaults == DEFAULT_MODEL.sampling
    assert read(ModelSource("gguf", path, "another")).sampling_defaults == OPENAI_DEFAULTS


@pytest.mark.parametrize("read", [load_spec, start_spec])
def test_sampling_in_the_file_has_precedence_over_the_card(
    make_gguf: MakeGGUF, read: Callable[[ModelSource], ModelSpec]
) -> None:
    path = str(make_gguf(METADATA | {"general.sampling.temp": 0.5}))

    assert read(ModelSource("gguf", path, DEFAULT_MODEL.name)).sampling_defaults.temperature == 0.5
