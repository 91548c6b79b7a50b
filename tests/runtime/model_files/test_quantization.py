"""What a checkpoint says of how its weights are quantized: every form that is read, and every one that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.runtime.errors import ConfigError
from engine.runtime.model_files.fields import Fields
from engine.runtime.model_files.model_spec import ModelSpec
from engine.runtime.model_files.quantization import (
    QuantizationSpec,
    QuantMethod,
    read_quantization,
)
from engine.runtime.model_files.quantization_choice import with_quantization
from engine.runtime.resolve.memory_budget import plan_memory

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8_CHANNEL: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
}


def read(folder: Path, description: Any) -> QuantizationSpec | None:
    return read_quantization(folder, Fields(folder / "config.json", {"quantization_config": description}))


def spec(**changes: Any) -> ModelSpec:
    facts: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return ModelSpec(**(facts | changes))


@pytest.mark.parametrize("activations", [None, {}], ids=["null", "missing"])
def test_weights_may_be_all_that_is_quantized(tmp_path: Path, activations: Any) -> None:
    group = dict(FP8_CHANNEL["config_groups"]["group_0"])
    group["input_activations"] = activations
    if activations is not None:
        del group["input_activations"]

    found = read(tmp_path, FP8_CHANNEL | {"config_groups": {"group_0": group}})

    assert found is not None and found.weights_only
    whole = read(tmp_path, FP8_CHANNEL)
    assert whole is not None and not whole.weights_only


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (AWQ, QuantizationSpec(method="awq", group_size=128)),
        (
            AWQ | {"version": "GEMM", "group_size": -1, "modules_to_not_convert": ["mlp.gate"]},
            QuantizationSpec(method="awq", plain_modules=("mlp.gate",)),
        ),
        (GPTQ, QuantizationSpec(method="gptq", group_size=128, zeros_less_one=True)),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True, "group_size": 32},
            QuantizationSpec(method="gptq", group_size=32, reordered=True),
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, QuantizationSpec(method="fp8")),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            QuantizationSpec(method="fp8", block=(128, 128)),
        ),
        (
            {"quant_method": "fp8", "ignored_layers": ["model.layers.0.mlp.down_proj"]},
            QuantizationSpec(method="fp8", plain_modules=("model.layers.0.mlp.down_proj",)),
        ),
        (
            {
                "quant_method": "fbgemm_fp8",
                "activation_scale_ub": 1200.0,
                "modules_to_not_convert": ["q_proj"],
            },
            QuantizationSpec(method="fp8", activation_bound=1200.0, plain_modules=("q_proj",)),
        ),
        (FP8_CHANNEL, QuantizationSpec(method="fp8", plain_modules=("lm_head", "re:.*mlp\\.gate$"))),
        (None, None),
    ],
    ids=str,
)
def test_forms_that_are_read(tmp_path: Path, description: Any, expected: QuantizationSpec | None) -> None:
    assert read(tmp_path, description) == expected


@pytest.mark.parametrize(
    ("name", "description", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, "awq"),
    ],
)
def test_older_exports_have_a_file_of_their_own(
    tmp_path: Path, name: str, description: dict[str, Any], method: str
) -> None:
    (tmp_path / name).write_text(json.dumps(description))

    found = read(tmp_path, None)

    assert found is not None and (found.method, found.group_size) == (method, 64)


def weights_of_group(**changes: Any) -> dict[str, Any]:
    group = FP8_CHANNEL["config_groups"]["group_0"]
    return FP8_CHANNEL | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("awq", "quantization_config is 'awq', expected an object"),
        ({}, r"quantization_config.quant_method is missing"),
        (
            {"quant_method": "bitsandbytes"},
            r"quant_method is 'bitsandbytes'.*supported are: fp8 .*awq .*gptq",
        ),
        (AWQ | {"bits": 8}, "bits is 8, only 4 bits"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', only gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"group_size": 48}, "group_size is 48, supported are -1 and 32, 64"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head', expected a list"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', only gptq and gptq_v2"),
        (GPTQ | {"dynamic": {"-:.*down": {}}}, "dynamic is .*only one setting"),
        (GPTQ | {"lm_head": True}, "lm_head is True"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', only e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .128., expected two"),
        (FP8_CHANNEL | {"format": "pack-quantized"}, "format is 'pack-quantized', only float-quantized"),
        (FP8_CHANNEL | {"config_groups": {}}, "config_groups is .*exactly one group"),
        (weights_of_group(num_bits=4), "group_0.weights.num_bits is 4, only 8-bit"),
        (weights_of_group(type="int"), "only 8-bit float weights"),
        (weights_of_group(strategy="group"), "strategy is 'group', only tensor, channel and block"),
        (FP8_CHANNEL | {"ignore": ["re:("]}, "ignore is .*regular expression that cannot be read"),
        (FP8_CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not"),
    ],
    ids=str,
)
def test_what_is_refused_and_by_which_name(tmp_path: Path, description: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, description)


def test_modules_that_stay_plain_are_matched_in_whole_components() -> None:
    found = QuantizationSpec(method="awq", plain_modules=("gate_up", "layers.1", "re:.*v_proj"))

    assert [
        found.is_plain(name)
        for name in (
            "model.layers.1.mlp.down_proj",
            "model.layers.0.self_attn.v_proj",
            "model.layers.0.mlp.gate",  # the router of experts, whether or not the checkpoint says so
            "model.layers.11.mlp.down_proj",
            "model.layers.0.mlp.gate_up_proj",
            "model.layers.0.mlp.gate_proj",
        )
    ] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("stored", "asked", "message"),
    [
        (QuantizationSpec(method="awq"), "fp8", "quantization is fp8, but the checkpoint's weights are awq"),
        (None, "gptq", "quantization is gptq, but .*not quantized, and only fp8, int8, int4 can be"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint(
    stored: QuantizationSpec | None, asked: QuantMethod, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_quantization(spec(quantization=stored), asked)


def test_a_flag_that_agrees_changes_nothing_and_fp8_can_be_made_of_plain_weights() -> None:
    awq = spec(quantization=QuantizationSpec(method="awq", group_size=64))
    assert with_quantization(awq, "awq") is awq
    assert with_quantization(spec(), None) == spec()

    made = with_quantization(spec(), "fp8")

    assert made.quantization == QuantizationSpec(method="fp8", stored=False)
    assert with_quantization(made, "fp8") is made
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=ModelSpec) == made


def test_memory_of_quantized_weights() -> None:
    linears = {"q": (256, 256), "k": (128, 256), "v": (128, 256), "o": (256, 256)}
    linears |= {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}
    in_linears = 3 * sum(rows * columns for rows, columns in linears.values())
    rest = 2 * (spec().num_parameters - in_linears)

    fp8 = spec(quantization=QuantizationSpec(method="fp8"))
    assert fp8.weight_bytes(2) == rest + in_linears + 3 * 4 * sum(rows for rows, _ in linears.values())
    assert fp8.weight_bytes(2, dequantized=True) == spec().weight_bytes(2)

    awq = spec(quantization=QuantizationSpec(method="awq", group_size=64, plain_modules=("mlp",)))
    attention = [linears[name] for name in "qkvo"]
    quantized = 3 * sum(rows * columns // 2 + 3 * rows * columns // 64 for rows, columns in attention)
    plain = 2 * (spec().num_parameters - 3 * sum(rows * columns for rows, columns in attention))
    assert awq.weight_bytes(2) == quantized + plain


def test_memory_is_planned_for_what_the_device_keeps() -> None:
    def weights(**device: Any) -> int:
        budget = plan_memory(
            spec(quantization=QuantizationSpec(method="gptq", group_size=128), tie_word_embeddings=False),
            usable_bytes=1 << 30,
            dtype="bfloat16",
            fraction=0.5,
            step_tokens=16,
            max_model_len=64,
            max_running_requests=2,
            **device,
        )
        return budget.weights_bytes

    assert weights(on_cpu=True) == spec().weight_bytes(2)  # dequantized while loading
    assert weights(on_cpu=False) < 0.6 * spec().weight_bytes(2)
