"""The language model in the configuration of a multimodal folder, and the names of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.multimodal_types import MULTIMODAL
from engine.models.spec.layer_form import RopeScaling
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.safetensors_header import usual_names
from engine.runtime.config.model_choice import TaskChoice
from engine.runtime.errors import ConfigError

TEXT: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def read(
    folder: Path, model_type: str = "gemma3", *, choice: TaskChoice | None = None, **fields: Any
) -> ModelSpec:
    """Read a folder; a value of `...` removes the field."""
    config = {"model_type": model_type, "vision_config": {}, "text_config": TEXT, **fields}
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_hf_spec(folder) if choice is None else read_hf_spec(folder, choice)


def test_fields_that_older_files_leave_out_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """google/gemma-3-4b-it has nothing else in its `text_config`."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = read(tmp_path, text_config=inner, torch_dtype="bfloat16", eos_token_id=[1, 106])

    assert (spec.model_type, spec.files.language_of) == ("gemma3_text", "gemma3")
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262_208, 8, 4, 256)
    assert spec.windows is not None
    assert (spec.num_layers, spec.windows.size, spec.max_position_embeddings) == (34, 1024, 131_072)
    assert (spec.rope_scaling, spec.rope_theta) == (RopeScaling(kind="linear", factor=8.0), 1e6)
    assert (spec.tie_word_embeddings, spec.torch_dtype, spec.eos_token_ids) == (True, "bfloat16", (1, 106))


def test_a_folder_of_llama_4_scout(tmp_path: Path) -> None:
    """What its `text_config` has beside the defaults, of which the sizes are left out here."""
    inner = {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": 4,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "use_qk_norm": True,
    }
    spec = read(tmp_path, "llama4", text_config=inner)

    assert (spec.num_layers, spec.hidden_size, spec.head_dim, spec.vocab_size) == (48, 5120, 128, 202_048)
    assert spec.windows is not None
    assert spec.rope_layers == spec.windows.layers == (True, True, True, False) * 12
    assert (spec.windows.size, spec.attention.chunked, spec.form.unit_qk_norm) == (8192, True, True)
    tuning = spec.attention.temperature
    assert tuning is not None
    assert (tuning.scale, tuning.length, tuning.offset) == (0.1, 8192, 1)
    assert spec.experts is not None and spec.experts.dense_layers == ()
    assert (spec.experts.num_experts, spec.experts.intermediate_size, spec.experts.shared_size) == (
        16,
        8192,
        8192,
    )
    assert spec.rope_scaling.kind == "llama3" and spec.rope_scaling.high_freq_factor == 1.0


def test_a_model_that_is_a_part_has_the_fields_of_its_part_and_of_the_whole(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        "qwen2_5_omni",
        architectures=["Qwen2_5OmniModel"],
        thinker_config={"text_config": TEXT | {"model_type": "qwen2_5_omni_text"}},
        text_config=...,
        torch_dtype="bfloat16",
        eos_token_id=7,
    )
    assert (spec.model_type, spec.torch_dtype, spec.eos_token_ids) == ("qwen2", "bfloat16", (7,))
    with pytest.raises(ConfigError, match="thinker_config is None, expected an object"):
        read(tmp_path, "qwen2_5_omni", text_config=...)
    with pytest.raises(ConfigError, match=r"thinker_config\.text_config is 3, expected an object"):
        read(tmp_path, "qwen2_5_omni", thinker_config={"text_config": 3}, text_config=...)
    text = TEXT | {"rms_norm_eps": "small"}
    with pytest.raises(ConfigError, match=r"thinker_config\.text_config\.rms_norm_eps"):
        read(tmp_path, "qwen2_5_omni", thinker_config={"text_config": text}, text_config=...)


def test_end_tokens_and_dtype_may_be_on_either_level(tmp_path: Path) -> None:
    inner = TEXT | {"eos_token_id": 5, "bos_token_id": 3, "dtype": "float16"}

    spec = read(tmp_path, text_config=inner, eos_token_id=[7, 5])
    assert (spec.eos_token_ids, spec.bos_token_id, spec.torch_dtype) == ((7, 5), 3, "float16")

    spec = read(tmp_path, text_config=inner, torch_dtype="bfloat16", bos_token_id=4)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.torch_dtype) == ((5,), 3, "bfloat16")


def test_quantization_stands_beside_the_language_model(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32}

    spec = read(tmp_path, quantization_config=config)

    assert spec.quantization is not None and spec.quantization.method == "awq"


@pytest.mark.parametrize(
    "plain",
    [
        ["vision_tower", "language_model.model.layers.0.mlp.up_proj"],
        ["visual", "model.language_model.layers.0.mlp.up_proj"],
        ["layers.0.mlp.up_proj"],
        ["re:vision_tower.*", r"re:.*layers\.0\.mlp\.up_proj"],
        [r"re:language_model\.model\.layers\.0\.mlp\.up.*"],
    ],
)
def test_plain_modules_have_the_folder_s_names(tmp_path: Path, plain: list[str]) -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": plain}

    found = read(tmp_path, quantization_config=config).quantization

    assert found is not None
    assert [found.is_plain(f"model.layers.{layer}.mlp.up_proj") for layer in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": ...}, "text_config is None, expected an object with the language model's fields"),
        ({"text_config": "llama"}, "text_config is 'llama', expected an object"),
        (
            {"architectures": ["Gemma3ForSequenceClassification"]},
            "architectures is .*Gemma3ForConditionalGen",
        ),
        ({"model_type": "seer"}, "model_type is 'seer' with a text_config: .* text only of: gemma3"),
        ({"model_type": "seer", "text_config": ...}, "model_type is 'seer' with a vision_config"),
        (
            {"text_config": TEXT | {"hidden_size": 0}},
            r"text_config.hidden_size is 0, expected a whole number",
        ),
        (
            {"text_config": TEXT | {"use_bidirectional_attention": True}},
            "text_config.use_bidirectional_attention is True, only attention to earlier tokens",
        ),
    ],
    ids=str,
)
def test_refused_folders(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **fields)


def test_the_text_can_be_embedded(tmp_path: Path) -> None:
    spec = read(tmp_path, choice=TaskChoice("embed"), architectures=["Gemma3ForConditionalGeneration"])

    assert spec.pooling is not None and spec.files.language_of == "gemma3"


@pytest.mark.parametrize(
    ("stored", "usual"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.encoder.layers.0.mlp.up_proj.weight", None),
        ("model.vision_tower.encoder.layers.0.mlp.up_proj.weight", None),
        ("multi_modal_projector.linear.weight", None),
        ("novel.weight", "novel.weight"),
    ],
)
def test_names_of_tensors(stored: str, usual: str | None) -> None:
    assert usual_names([stored], "gemma3") == ({} if usual is None else {stored: usual})


@pytest.mark.parametrize("outer", MULTIMODAL)
def test_a_module_s_other_names_are_those_of_its_tensor(outer: str) -> None:
    kind = MULTIMODAL[outer]
    for name in ("model.layers.0.mlp.up_proj", "model.embed_tokens", "lm_head"):
        others = [new + name.removeprefix(old) for old, new in kind.renamed if name.startswith(old)]
        assert others
        for other in others:
            assert kind.usual_name(f"{other}.weight") == f"{name}.weight"


def test_one_tensor_under_two_names_is_refused() -> None:
    names = ["model.language_model.norm.weight", "language_model.model.norm.weight"]
    with pytest.raises(ConfigError, match="are both 'model.norm.weight'; remove one"):
        usual_names(names, "gemma3")
