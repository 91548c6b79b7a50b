"""Dense families that are Llama's layers in other forms, against transformers; each variant is in published files."""

from __future__ import annotations

import json

import pytest

from engine.models.hf.hf_config import read_hf_spec
from engine.runtime.errors import ConfigError

from .families import FAMILIES


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*expected at least 5 numbers"),
        ("smollm3", {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu' is supported for smollm3"),
        (
            "olmo2",
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope_type is 'dynamic', which is not supported",
        ),
        (
            "olmo3 yarn in full layers",
            {"layer_types": ["chunked_attention"] * 5},
            "layer_types is .*expected a list of full_attention and sliding_attention",
        ),
        (
            "ministral3",
            {"rope_parameters": None},
            "rope_parameters is None, which transformers takes for yarn",
        ),
        ("glm4", {"partial_rotary_factor": 0.01, "rope_parameters": None}, "a part of each head must rotate"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, expected a number"),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act is 'relu', only 'gelu_pytorch_tanh'"),
        (
            "cohere",
            {"use_qk_norm": True},
            "use_qk_norm is True, norms of q and k with a weight for each head",
        ),
        ("cohere2", {"logit_scale": 0}, "logit_scale is 0, expected a number"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(make_tiny_model, variant, changes, message):
    row = FAMILIES[variant]
    tiny = make_tiny_model(row.model_type, **row.options)
    path = tiny.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        read_hf_spec(tiny.folder)
