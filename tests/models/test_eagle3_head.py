"""EAGLE-3 heads: names and shapes of published ones, and errors for heads of other targets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.models.eagle3_head import Eagle3Spec, is_eagle3_head, needed_tensors, read_eagle3_head
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.errors import ConfigError

Shapes = dict[str, tuple[str, list[int]]]
_BYTES = {"BF16": 2, "I64": 8, "BOOL": 1}


def layer_shapes(name: str, hidden: int, inner: int, q: int, kv: int) -> Shapes:
    shapes = {
        "self_attn.q_proj": [q, 2 * hidden],
        "self_attn.k_proj": [kv, 2 * hidden],
        "self_attn.v_proj": [kv, 2 * hidden],
        "self_attn.o_proj": [hidden, q],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "hidden_norm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    return {f"{name}.{part}.weight": ("BF16", shape) for part, shape in shapes.items()}


def target(hidden: int, num_layers: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        model_type="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )


# AngelSlim/Qwen3-8B_eagle3: SpecForge's form without an embedding.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "draft_vocab_size": 32000,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3_8B_TENSORS: Shapes = {
    "d2t": ("I64", [32000]),
    "t2d": ("BOOL", [151936]),
    "fc.weight": ("BF16", [4096, 12288]),
    "norm.weight": ("BF16", [4096]),
    "lm_head.weight": ("BF16", [32000, 4096]),
    **layer_shapes("midlayer", 4096, 12288, 4096, 1024),
}
# lmsys/EAGLE3-gpt-oss-120b-bf16: layers by number in `eagle_config`, and heads of another size.
GPT_OSS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]},
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}
GPT_OSS_TENSORS: Shapes = {
    "d2t": ("I64", [32000]),
    "t2d": ("BOOL", [201088]),
    "fc.weight": ("BF16", [2880, 8640]),
    "norm.weight": ("BF16", [2880]),
    "lm_head.weight": ("BF16", [32000, 2880]),
    **layer_shapes("midlayer", 2880, 17280, 4096, 512),
}
# RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3: the form of speculators, with the target's embedding.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "norm_before_residual": False,
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "target_hidden_size": None,
    "transformer_layer_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "vocab_size": 128256,
    },
}
SPECULATORS_TENSORS: Shapes = {
    "d2t": ("I64", [32000]),
    "t2d": ("BOOL", [128256]),
    "embed_tokens.weight": ("BF16", [128256, 4096]),
    "fc.weight": ("BF16", [4096, 12288]),
    "norm.weight": ("BF16", [4096]),
    "lm_head.weight": ("BF16", [32000, 4096]),
    **layer_shapes("layers.0", 4096, 14336, 4096, 1024),
}
QWEN3_TARGET = target(4096, 36, 151936)


def write_head(folder: Path, config: Mapping[str, Any], tensors: Shapes) -> Path:
    """A folder with a file of the right size, which takes no room on the disk."""
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = _BYTES[dtype]
        for each in shape:
            size *= each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def read(
    folder: Path, model: ModelSpec = QWEN3_TARGET, tensors: Shapes | None = None, **changes: Any
) -> Eagle3Spec:
    """The head for Qwen3-8B, with changes; a value of `...` removes the field or tensor."""
    config = {name: value for name, value in (QWEN3_8B | changes).items() if value is not ...}
    whole: dict[str, Any] = {**QWEN3_8B_TENSORS, **(tensors or {})}
    found = {name: value for name, value in whole.items() if value is not ...}
    return read_eagle3_head(write_head(folder, config, found), model)


@pytest.mark.parametrize(
    ("config", "tensors", "model", "layers", "has_embedding", "name"),
    [
        (QWEN3_8B, QWEN3_8B_TENSORS, QWEN3_TARGET, (2, 18, 33), False, "midlayer"),
        (GPT_OSS, GPT_OSS_TENSORS, target(2880, 36, 201088), (2, 18, 34), False, "midlayer"),
        (SPECULATORS, SPECULATORS_TENSORS, target(4096, 32, 128256), (2, 16, 29), True, "model.layers.0"),
    ],
)
def test_published_heads(
    tmp_path: Path,
    config: dict[str, Any],
    tensors: Shapes,
    model: ModelSpec,
    layers: tuple[int, ...],
    has_embedding: bool,
    name: str,
) -> None:
    folder = write_head(tmp_path, config, tensors)
    assert is_eagle3_head(folder)
    spec = read_eagle3_head(folder, model)
    assert (spec.feature_layers, spec.has_embedding, spec.layer_name) == (layers, has_embedding, name)
    assert spec.has_head and spec.maps_tokens and spec.draft_vocab_size == 32000
    assert spec.num_features == 3 * model.hidden_size
    stored = {one.removeprefix("model.") for one, _ in needed_tensors(spec)}
    assert stored == set(tensors) - {"t2d"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=Eagle3Spec) == spec


def test_rope_of_the_layer_is_read(tmp_path: Path) -> None:
    folder = write_head(tmp_path, SPECULATORS, SPECULATORS_TENSORS)
    layer = read_eagle3_head(folder, target(4096, 32, 128256)).layer
    assert (layer.rope_theta, layer.rope_scaling.kind) == (500000.0, "llama3")


def test_a_list_at_the_top_names_inputs(tmp_path: Path) -> None:
    """vLLM takes the stream before layer n, SGLang that after it, as SpecForge writes it."""
    assert read(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 17, 32]).feature_layers == (1, 17, 32)


def test_names_with_a_prefix(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for name, entry in QWEN3_8B_TENSORS.items():
        if name not in ("d2t", "t2d", "lm_head.weight"):
            tensors |= {name: ..., f"model.{name}": entry}
    spec = read(tmp_path, tensors=tensors)
    assert (spec.body, spec.beside, spec.layer_name) == ("model.", "", "model.midlayer")


def test_a_head_without_its_own_output_uses_that_of_the_target(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lm_head.weight": ..., "d2t": ..., "t2d": ...}
    spec = read(tmp_path, tensors=changes, draft_vocab_size=...)
    assert not spec.has_head and spec.draft_vocab_size == 151936


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        (
            {},
            {"fc.weight": ("BF16", [4096, 8192])},
            "'fc.weight' has the shape .4096, 8192., but .* .4096, 12288.",
        ),
        ({}, {"midlayer.hidden_norm.weight": ...}, "'midlayer.hidden_norm.weight' is missing; download"),
        ({}, {"extra.weight": ("BF16", [4])}, "unexpected tensor 'extra.weight' .1 in all."),
        ({}, {"d2t": ...}, "draft_vocab_size is 32000 of 151936, but there is no tensor 'd2t'"),
        ({}, {"d2t": ("BF16", [32000])}, "'d2t' has the dtype BF16, but heads must have I32, I64"),
        ({}, {"midlayer.self_attn.q_proj.weight": ...}, "it is no EAGLE-3 head; .* --speculative draft"),
        ({"vocab_size": 151000}, {}, "vocab_size is 151000, but the target model has 151936"),
        ({"target_hidden_size": 5120}, {}, "the target's hidden size is 5120, but the target model has 4096"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, but only heads with one layer"),
        ({"model_type": "qwen3"}, {}, "model_type is 'qwen3', but only heads with a Llama layer"),
        ({"norm_before_fc": True}, {}, "norm_before_fc is True, which is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "EAGLE-1 and 2"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 99]}, {}, "whole numbers from 1 to 35"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [9, 3, 20]}},
            {},
            "ascending order, which has 36",
        ),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, tensors=tensors, **changes)


def test_other_folders_are_no_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    assert not is_eagle3_head(tmp_path)
    assert not is_eagle3_head(tmp_path / "none")
