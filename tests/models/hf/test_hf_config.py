"""Architecture facts from config.json: both spellings, and a refusal that names what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from engine.models.families.registry import FAMILIES
from engine.models.fields import Fields
from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.task import check_architectures
from engine.models.spec.layer_form import RopeScaling
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.errors import ConfigError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
PHI3: dict[str, Any] = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {"short_factor": [1.0, 1.0, 1.0, 1.5], "long_factor": [1, 2, 3, 4]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    """Read CONFIG with changes; a value of `...` removes the field."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_hf_spec(folder)


def test_all_facts_are_read(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelSpec(
        model_type="llama",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_the_spec_travels_in_a_message(tmp_path: Path) -> None:
    spec = read(tmp_path, rope_scaling={"rope_type": "llama3", **LLAMA3}, eos_token_id=[1, 2])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


def test_old_models_without_gqa_theta_and_dtype(tmp_path: Path) -> None:
    spec = read(tmp_path, num_key_value_heads=..., rope_theta=..., torch_dtype=..., tie_word_embeddings=...)
    assert (spec.num_kv_heads, spec.rope_theta, spec.torch_dtype) == (4, 10000.0, "float32")
    assert not spec.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_scaling": None}, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeScaling(kind="linear", factor=4.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, RopeScaling(kind="linear", factor=2.5)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeScaling(kind="llama3", factor=8.0, original_max_position=8192),
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
            RopeScaling(),
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeScaling(kind="llama3", factor=8.0, original_max_position=8192),
        ),
    ],
)
def test_rope_in_both_spellings(tmp_path: Path, changes: dict[str, Any], scaling: RopeScaling) -> None:
    spec = read(tmp_path, **changes)
    assert spec.rope_scaling == scaling
    assert spec.rope_theta == 500000.0


def test_what_transformers_writes_today(tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=100,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        dtype="float16",
        rope_parameters={"rope_theta": 1234.0, "rope_type": "linear", "factor": 2.0},
        eos_token_id=[5, 6],
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)

    spec = read_hf_spec(tmp_path)

    assert (spec.head_dim, spec.num_kv_heads, spec.num_layers) == (16, 1, 3)
    assert (spec.biases.qkv, spec.biases.mlp, spec.torch_dtype) == (True, True, "float16")
    assert (spec.rope_theta, spec.rope_scaling) == (1234.0, RopeScaling(kind="linear", factor=2.0))
    assert spec.eos_token_ids == (5, 6)


def test_yarn_as_qwen_adds_it_to_a_file(tmp_path: Path) -> None:
    spec = read(tmp_path, **QWEN2, rope_scaling=YARN)
    assert spec.rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_max_position=256, attention_factor=0.1 * math.log(4) + 1
    )
    assert spec.max_position_embeddings == 4 * 256


@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_longrope_in_the_old_spelling(tmp_path: Path, kind: str) -> None:
    spec = read(
        tmp_path, **PHI3, rope_scaling={"type": kind, **LONGROPE}, original_max_position_embeddings=64
    )
    assert spec.rope_scaling == RopeScaling(
        kind="longrope",
        factor=4.0,
        original_max_position=64,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(64)),
        short_factor=(1.0, 1.0, 1.0, 1.5),
        long_factor=(1.0, 2.0, 3.0, 4.0),
    )


def test_gemma_3_as_it_was_published(tmp_path: Path) -> None:
    """Transformers 4: a pattern, two bases at the top level, no word about tied heads."""
    spec = read(
        tmp_path,
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=7,
        hidden_activation="gelu_pytorch_tanh",
        head_dim=16,
        query_pre_attn_scalar=64,
        rope_theta=1e6,
        rope_local_base_freq=10000,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=512,
        sliding_window_pattern=6,
        tie_word_embeddings=...,
    )
    assert spec.windows is not None
    assert spec.windows.layers == (True, True, True, True, True, False, True)
    assert [spec.window_of(layer) for layer in (4, 5)] == [512, None]
    assert (spec.rope_theta, spec.windows.rope_theta, spec.attention.query_scale) == (1e6, 1e4, 0.125)
    assert spec.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert spec.tie_word_embeddings


def test_windows_that_are_switched_off_are_none(tmp_path: Path) -> None:
    spec = read(tmp_path, **QWEN2, use_sliding_window=False, sliding_window=131072, max_window_layers=1)
    assert spec.window_of(1) is None
    assert (spec.biases.qkv, spec.biases.attention_out) == (True, False)


def test_heads_of_qwen3_are_wide_by_default(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_end_tokens_of_both_files_count_once(tmp_path: Path) -> None:
    assert read(tmp_path, generation={"eos_token_id": [7, 2]}).eos_token_ids == (2, 7)
    assert read(tmp_path, generation={}, eos_token_id=None, bos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize("eos_token", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_the_end_of_a_turn_may_stand_in_the_tokenizer_only(tmp_path: Path, eos_token: object) -> None:
    added = {
        "5": {"content": "<|im_start|>"},
        "9": {"content": "<|im_end|>"},
        "999999": {"content": "<|im_end|>"},
    }
    tokenizer = {"eos_token": eos_token, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))

    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    "architectures",
    [
        *(
            None,
            [],
            ["LlamaForCausalLM"],
            ["LLaMAForCausalLM"],
            ["Llama_ForCausalLM"],
            ["AutoModelForCausalLM"],
        ),
        *(["LlamaForCausalLM", "AutoModelForCausalLM"], ["AutoModel", "LlamaForCausalLM"]),
    ],
    ids=str,
)
def test_one_class_has_several_spellings(tmp_path: Path, architectures: list[str] | None):
    assert read(tmp_path, architectures=architectures) == read(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "published"),
    [
        ("phimoe", "PhiMoEForCausalLM"),
        ("ernie4_5", "Ernie4_5_ForCausalLM"),
        ("lfm2", "LFM2ForCausalLM"),
        ("minimax_m2", "MiniMaxM2ForCausalLM"),
    ],
)
def test_classes_as_their_makers_spell_them(model_type: str, published: str):
    fields = Fields(Path("config.json"), {"architectures": [published]})
    check_architectures(fields, FAMILIES[model_type].classes("generate"), model_type)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ...}, "the field model_type is missing"),
        ({"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "only .'LlamaForCausalLM'"),
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures is 'LlamaForCausalLM', expected a list of names",
        ),
        (
            {"architectures": ["LlamaForQuestionAnswering"]},
            "architectures is .*only .'LlamaForCausalLM'",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq', which is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"hidden_size": ...}, "the field hidden_size is missing"),
        ({"hidden_size": None}, "the field hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected a whole number from 1 to"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a whole number from 1 to"),
        ({"vocab_size": True}, "vocab_size is True, expected a whole number"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000, expected a whole number from 1 to 4096",
        ),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, expected a whole number from 1 to 4"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 7}, "head_dim is 7, rotary position embedding needs an even number"),
        ({"rms_norm_eps": ...}, "the field rms_norm_eps is missing"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number from"),
        ({"rope_theta": -1.0}, r"rope_theta is -1.0, expected a number from 1 to"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 2}},
            "rope_scaling.rope_type is 'ntk', .*default, linear",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling.type is 'dynamic', which is not supp",
        ),
        ({"rope_scaling": {"type": "linear"}}, "the field rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8}},
            "the field rope_scaling.low_freq_factor is missing",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 0.5}},
            "high_freq_factor 0.5, it must not be below low_freq_factor 1",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object or null"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "a different rope for some"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, only 1.0"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "scores of Gemma 3 are not capped"),
        ({**GEMMA3, "final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0, expected a number"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "only attention to earlier tokens"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "1 layer types for 2 layers"),
        (
            {**GEMMA3, "layer_types": ["chunked_attention"] * 2},
            "layer_types is .*expected a list of full_att",
        ),
        (
            {
                **GEMMA3,
                "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            },
            "windowed layers must not be scaled",
        ),
        ({**GEMMA3, "hidden_activation": "silu"}, "hidden_activation is 'silu', only 'gelu_pytorch_tanh'"),
        ({**QWEN3_MOE, "num_experts_per_tok": 5}, "5 experts for each token, but there are only 4"),
        ({**QWEN3_MOE, "mlp_only_layers": [True]}, "mlp_only_layers is .*expected a list of whole numbers"),
        (
            {**PHI3, "rope_scaling": {"type": "longrope", **LONGROPE, "short_factor": [1.0]}},
            "holds 1 numbers, expected 4",
        ),
        (
            {**PHI3, "rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [0] * 4}},
            "numbers above 0",
        ),
        ({**PHI3, "partial_rotary_factor": 0.01}, "a part of each head must rotate"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64', which is not supported; .*bfloat16"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"eos_token_id": 128}, "eos_token_id is 128, expected token ids from 0 to 127"),
        ({"eos_token_id": [-1]}, r"eos_token_id is \[-1\], expected token ids"),
    ],
)
def test_a_refusal_names_file_field_and_rule(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "holds a JSON list, expected an object"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        read_hf_spec(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_hf_spec(tmp_path)


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1), ([3, 4], 3), (None, None), ([], None), (-1, None), (128, None)]
)
def test_a_bos_token_outside_of_the_vocabulary_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any, expected: int | None
) -> None:
    assert read(tmp_path, bos_token_id=value).bos_token_id == expected
    assert ("bos_token_id is" in caplog.text) is (value in (-1, 128))


def test_attention_in_both_directions_concerns_images_only(tmp_path: Path) -> None:
    gemma = GEMMA3 | {"use_bidirectional_attention": "vision"}
    assert read(tmp_path, **gemma) == read(tmp_path, **GEMMA3)
    with pytest.raises(ConfigError, match="use_bidirectional_attention is True, only attention to earlier"):
        read(tmp_path, **GEMMA3 | {"use_bidirectional_attention": True})


def test_the_limit_of_an_embedder_s_files_is_below_that_of_yarn(tmp_path: Path) -> None:
    scaling = {"rope_scaling": YARN}
    assert read(tmp_path, **scaling).known_positions == 1024

    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    spec = read(tmp_path, architectures=["LlamaModel"], **scaling)

    assert spec.pooling is not None
    assert (spec.known_positions, spec.max_position_embeddings, spec.tie_word_embeddings) == (100, 100, True)
