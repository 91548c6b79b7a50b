"""Fields that are null mean another thing than fields that a file lacks: both as transformers reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.errors import ConfigError
from tests.model_runner.structures.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
Value = Callable[[Any], object]


def windows(config: Any) -> object:
    """The window of each layer by transformers' configuration."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def window_of(spec: ModelSpec) -> object:
    return [spec.window_of(layer) for layer in range(spec.num_layers)]


def head_dim(config: Any) -> object:
    return config.head_dim or config.hidden_size // config.num_attention_heads


CASES: list[tuple[str, str, Value, Callable[[ModelSpec], object]]] = [
    (
        "minicpm3",
        "scale_depth",
        lambda config: config.scale_depth / math.sqrt(config.num_hidden_layers),
        lambda spec: spec.form.residual_scale,
    ),
    (
        "minicpm3",
        "dim_model_base",
        lambda config: config.dim_model_base / config.hidden_size,
        lambda spec: spec.form.logits_scale,
    ),
    (
        "mimo_v2_flash",
        "attention_value_scale",
        lambda config: 1.0 if config.attention_value_scale is None else config.attention_value_scale,
        lambda spec: spec.attention.value_scale,
    ),
    ("seed_oss", "head_dim", head_dim, lambda spec: spec.head_dim),
    ("ernie4_5", "head_dim", head_dim, lambda spec: spec.head_dim),
    ("mistral", "sliding_window", windows, window_of),
]


@pytest.mark.parametrize("is_null", [True, False], ids=["null", "missing"])
@pytest.mark.parametrize(
    ("name", "field", "wanted", "found"), CASES, ids=[f"{one[0]}-{one[1]}" for one in CASES]
)
def test_null_and_missing_fields_are_read_as_transformers_does(
    tmp_path: Path, name: str, field: str, wanted: Value, found: Callable[[ModelSpec], object], is_null: bool
) -> None:
    row = FAMILIES[name]
    options = {key: value for key, value in (SIZES | row.options).items() if key != field}
    if is_null:
        options[field] = None
    config = CONFIG_MAPPING[name](**options)
    (tmp_path / "config.json").write_text(json.dumps({**options, "model_type": name}))

    assert found(read_hf_spec(tmp_path)) == wanted(config)


@pytest.mark.parametrize("model_type", ["exaone4", "ministral"])
def test_files_without_a_window_have_the_default_and_those_with_null_have_none(
    tmp_path: Path, model_type: str
) -> None:
    """transformers fails with null in these two, of which files were published by their makers."""
    path, options = tmp_path / "config.json", {**SIZES, "model_type": model_type}
    path.write_text(json.dumps(options))
    assert window_of(read_hf_spec(tmp_path)) == windows(CONFIG_MAPPING[model_type](**options))
    path.write_text(json.dumps({**options, "sliding_window": None}))
    assert window_of(read_hf_spec(tmp_path)) == [None] * 5


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"model_type": "kimi_linear"}, "model_type is 'kimi_linear', whose layers have states of a kind"),
        (
            {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}, "vision_config": {}},
            "text_config.model_type is 'kimi_linear', whose layers have states of a kind",
        ),
        (
            {
                "model_type": "minimax_m3_vl",
                "text_config": {"sparse_attention_config": {"sparse_topk_blocks": 16}},
            },
            "text_config.sparse_attention_config is .* sparse attention, which chooses blocks",
        ),
        (
            {"model_type": "other_vl", "text_config": {"model_type": "llama"}, "vision_config": {}},
            "a model of images or sound, and the engine serves the text only of",
        ),
    ],
)
def test_the_deepest_reason_is_named(tmp_path: Path, config: dict[str, Any], rule: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **config}))
    with pytest.raises(ConfigError, match=rule):
        read_hf_spec(tmp_path)
