"""The readers of a `ModelSpec` agree: `load_spec`, and `read_model`, with which a server and an `LLM` start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.launch.resolve.model_resolution import read_model
from engine.models.hub.built_in.models import DEFAULT_MODEL
from engine.models.load_spec import load_spec
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.config.model_choice import TaskChoice
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS
from tests.models.gguf.test_gguf_config import METADATA

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


def test_a_gguf_file_embeds_if_the_user_says_so(make_gguf: MakeGGUF) -> None:
    source = ModelSource("gguf", str(make_gguf(METADATA)), "tiny")

    spec = load_spec(source, choice=TaskChoice("embed", "mean", any_dimensions=True))

    assert spec.pooling is not None
    assert (spec.pooling.pooling, spec.pooling.size, spec.pooling.normalize) == (
        "mean",
        spec.hidden_size,
        True,
    )
    assert spec.pooling.any_dimensions
    assert load_spec(source, choice=TaskChoice("generate")).pooling is None


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (TaskChoice("score"), "the task is score, but rerankers are read from folders only"),
        (TaskChoice("auto", "cls"), "pooling is cls, but the task is generate"),
    ],
)
def test_what_a_gguf_file_cannot_do_is_refused(make_gguf: MakeGGUF, choice: TaskChoice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(ModelSource("gguf", str(make_gguf(METADATA)), "tiny"), choice=choice)
