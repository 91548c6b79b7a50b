"""Facts about architectures that the engine has no model for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError

CONFIG: dict[str, Any] = {
    "architectures": ["NovelForCausalLM"],
    "model_type": "novel",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": None,
}


def read(folder: Path, base: dict[str, Any] = CONFIG, **changes: Any) -> ModelSpec:
    """Read a configuration with changes; a value of `...` removes the field."""
    config = {key: value for key, value in (base | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_hf_spec(folder)


def test_the_common_names(tmp_path: Path) -> None:
    spec = read(tmp_path, head_dim=16)

    assert (spec.model_type, spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (
        "novel",
        128,
        32,
        48,
    )
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 16)
    assert (spec.max_position_embeddings, spec.torch_dtype, spec.eos_token_ids) == (256, "bfloat16", (2,))
    assert (spec.windows, spec.experts) == (None, None)


def test_the_names_of_older_configurations(tmp_path: Path) -> None:
    spec = read(tmp_path, GPT2)

    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (32, 3, 4, 4)
    assert (spec.head_dim, spec.max_position_embeddings, spec.intermediate_size) == (8, 256, 128)
    assert read(tmp_path, GPT2, multi_query=True).num_kv_heads == 1


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 20}, (20, 20, 20)),
        ({"sliding_window": 20, "use_sliding_window": False}, (None, None, None)),
        ({"sliding_window": 0}, (None, None, None)),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 3}, (None, None, None)),
        (
            {
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
    ],
)
def test_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    spec = read(tmp_path, **changes)
    assert tuple(spec.window_of(layer) for layer in range(3)) == windows


def test_experts_count_in_the_memory_plan(tmp_path: Path) -> None:
    spec = read(tmp_path, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)

    assert spec.experts == ExpertsSpec(
        num_experts=8, intermediate_size=16, routing=Routing(num_active=2, normalize=False)
    )
    one_of_them = num_parameters(read(tmp_path, intermediate_size=16))
    assert num_parameters(spec) - one_of_them == 3 * (7 * (3 * 32 * 16) + 8 * 32)  # and the routers
    assert read(tmp_path, num_local_experts=1).experts is None


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"],
)
def test_a_missing_fact_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: the field {name} is missing"):
        read(tmp_path, {**CONFIG, name: ...})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True, a decoder without an encoder is needed"),
        ({"alibi": True}, "alibi is True, position biases"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi', position biases"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512, latent attention"),
        ({"use_bidirectional_attention": True}, "only attention to earlier tokens"),
        (
            {"vision_config": {"depth": 2}},
            "model_type is 'novel' with a vision_config: a model of images or sound",
        ),
        (
            {"architectures": ["NovelForMaskedLM"]},
            "architectures is .*expected one that ends with ForCausalLM",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
            "layer_types is .*expected a list of full_attention and sliding_attention",
        ),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


def test_facts_of_no_matter_may_have_false_values(tmp_path: Path) -> None:
    spec = read(
        tmp_path, alibi=False, kv_lora_rank=None, is_encoder_decoder=False, position_embedding_type="rope"
    )
    assert spec == read(tmp_path)
