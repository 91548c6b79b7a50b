"""What a checkpoint says of how its weights are quantized: every form that is read, and every one that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.models.fields import Fields
from engine.models.hf.hf_quantization import read_quantization
from engine.models.spec.quantization import MIXER_NAMES, QuantizationSpec
from engine.runtime.errors import ConfigError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
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
    config = {"model_type": "llama", "quantization_config": description}
    return read_quantization(folder, Fields(folder / "config.json", config))


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
        (
            GPTQ | {"bits": 8, "dynamic": {"-:.*\\.gate": {}, "+:.*down": {"bits": 8, "group_size": 128}}},
            QuantizationSpec(
                method="gptq", bits=8, group_size=128, zeros_less_one=True, plain_modules=("re:.*\\.gate",)
            ),
        ),
        (AUTO_ROUND, QuantizationSpec(method="gptq", group_size=128, zeros_less_one=True)),
        (
            AUTO_ROUND
            | {
                "packing_format": "auto_round",
                "bits": 8,
                "act_bits": 16,
                "extra_config": {
                    "lm_head": {"bits": 16},
                    ".*down.*": {"bits": 32},
                    "mlp.up_proj": {"bits": 8},
                },
            },
            QuantizationSpec(
                method="gptq", bits=8, group_size=128, plain_modules=("lm_head", "re:.*(?:.*down.*)")
            ),
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
            QuantizationSpec(method="awq", group_size=128),
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
        ({"quant_method": "fp8", "fmt": "float8_e4m3fn"}, QuantizationSpec(method="fp8")),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            QuantizationSpec(method="fp8", plain_modules=("lm_head",)),
        ),
        *[
            ({key: value for key, value in named.items() if key != "quant_method"}, expected)
            for named, expected in (
                (GPTQ, QuantizationSpec(method="gptq", group_size=128, zeros_less_one=True)),
                (AWQ, QuantizationSpec(method="awq", group_size=128)),
                (FP8_CHANNEL, QuantizationSpec(method="fp8", plain_modules=("lm_head", "re:.*mlp\\.gate$"))),
                ({"weight_block_size": [128, 128]}, QuantizationSpec(method="fp8", block=(128, 128))),
                ({"quant_algo": "FP8"}, QuantizationSpec(method="fp8")),
            )
        ],
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


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    description = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*.0.mlp*"],
    }
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": description}))

    found = read(tmp_path, None)

    assert found is not None and found.method == "fp8" and found.block is None
    names = [
        "lm_head",
        "model.layers.0.mlp.up_proj",
        "model.layers.10.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
    ]
    assert [found.is_plain(name) for name in names] == [True, True, False, False]

    path.write_text(json.dumps({"quantization": description | {"quant_algo": "NVFP4", "group_size": 16}}))
    nvfp4 = read(tmp_path, None)
    assert nvfp4 == structs.replace(found, method="nvfp4") and nvfp4.is_in_blocks
    path.write_text(json.dumps({"quantization": description | {"quant_algo": "NVFP4_SVD"}}))
    with pytest.raises(
        ConfigError,
        match=r"hf_quant_config.json: quantization.quant_algo is 'NVFP4_SVD', supported of modelopt are FP8, ",
    ):
        read(tmp_path, None)
    path.write_text(json.dumps({"quantization": None}))
    with pytest.raises(ConfigError, match="quantization is None, expected an object"):
        read(tmp_path, None)


def test_the_older_name_of_the_description_and_files_of_mlx(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_quantization(tmp_path, Fields(path, {"compression_config": FP8_CHANNEL})) == read(
        tmp_path, FP8_CHANNEL
    )
    with pytest.raises(ConfigError, match="quantization_config is .*, but compression_config is"):
        read_quantization(
            tmp_path, Fields(path, {"compression_config": FP8_CHANNEL, "quantization_config": AWQ})
        )
    mlx = {"group_size": 64, "bits": 4}
    found = read_quantization(tmp_path, Fields(path, {"quantization": mlx, "quantization_config": mlx}))
    assert found == read_quantization(tmp_path, Fields(path, {"quantization": mlx}))
    assert found == QuantizationSpec(method="mlx", bits=4, group_size=64)


@pytest.mark.parametrize("empty", [None, {}, {"config_groups": {}}])
def test_an_empty_transform_is_none(tmp_path: Path, empty: Any) -> None:
    assert read(tmp_path, FP8_CHANNEL | {"transform_config": empty}) == read(tmp_path, FP8_CHANNEL)


def test_a_field_of_another_method_with_the_same_meaning_is_no_second_one(tmp_path: Path) -> None:
    plain = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert read(tmp_path, plain | {"quant_algo": "FP8", "load_in_4bit": False}) == read(tmp_path, plain)


def test_two_descriptions_must_agree(tmp_path: Path) -> None:
    own = tmp_path / "hf_quant_config.json"
    own.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    assert read(tmp_path, MODELOPT) == QuantizationSpec(method="fp8")

    with pytest.raises(
        ConfigError, match=r"hf_quant_config.json: describes fp8, but .*config.json describes awq, gr"
    ):
        read(tmp_path, AWQ)
    layers = {"model.layers.0.mlp": {"quant_algo": "NVFP4"}}
    own.write_text(
        json.dumps({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}})
    )
    with pytest.raises(ConfigError, match=r"hf_quant_config.json: describes mixed, but .* describes fp8"):
        read(tmp_path, {"quant_method": "fp8"})


MIXED = MODELOPT | {"quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"]}


def test_modelopt_names_the_form_of_each_layer(tmp_path: Path) -> None:
    layers = {
        "model.language_model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.language_model.layers.1.mlp.experts.0.up_proj": {
            "quant_algo": "W4A16_NVFP4",
            "group_size": 16,
        },
        "model.language_model.layers.1.mlp.experts.1.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "MXFP8"},
    }
    found = read(tmp_path, MIXED | {"quantized_layers": layers})
    assert found is not None and found.method == "mixed" and found.is_in_blocks and found.may_have_head
    found = structs.replace(found, renamed=(("model.", "model.language_model."),))

    def form(name: str) -> Any:
        part = found.part_of(name)
        return part and (part.method, part.block)

    assert form("model.layers.0.linear_attn.out_proj") == ("fp8", None)
    assert form("model.layers.0.mlp.experts.3.down_proj") == ("nvfp4", None)
    assert form("model.layers.1.mlp.experts.7.up_proj") == ("nvfp4", None)
    assert form("model.layers.1.mlp.experts.0.down_proj") is None
    assert form("lm_head") == ("fp8", (1, 32))
    assert form("mtp.layers.0.mlp.experts.0.up_proj") is None
    # On a CPU the 4-bit floats are kept, 8-bit ones are not; on a GPU it is the other way round.
    sizes = [
        found.bytes_of(name, 64, 32, on_cpu=on_cpu)
        for on_cpu in (True, False)
        for name in ("model.layers.0.linear_attn.out_proj", "model.layers.0.mlp.experts.0.up_proj")
    ]
    assert sizes == [None, 64 * 18, 64 * 32 + 64 * 4, None]


def test_the_names_of_single_blocks_are_found(tmp_path: Path) -> None:
    layers = {
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        "backbone.layers.1.mixer.experts.0.up_proj": {"quant_algo": "NVFP4"},
    }
    found = read(tmp_path, MIXED | {"quantized_layers": layers, "ignore": ["backbone.layers.2.*"]})
    assert found is not None
    found = structs.replace(found, renamed=MIXER_NAMES)
    assert found.part_of("model.layers.0.mamba.in_proj") == QuantizationSpec(method="fp8")
    assert found.part_of("model.layers.1.mlp.experts.5.up_proj") == QuantizationSpec(method="nvfp4")
    assert found.is_plain("model.layers.2.self_attn.q_proj") and not found.is_plain(
        "model.layers.0.mamba.in_proj"
    )


def floats(layout: str, **weights: Any) -> dict[str, Any]:
    settings = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    } | weights
    return FP8_CHANNEL | {
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
    }


NVFP4 = floats("nvfp4-pack-quantized", strategy="tensor_group", group_size=16)
MXFP8 = floats("mxfp8-quantized", num_bits=8)


@pytest.mark.parametrize(
    ("description", "form"),
    [
        (NVFP4, QuantizationSpec(method="nvfp4")),
        (floats("mxfp4-pack-quantized"), QuantizationSpec(method="mxfp4")),
        (MXFP8, QuantizationSpec(method="fp8", block=(1, 32), weights_only=True)),
    ],
)
def test_floats_of_compressed_tensors(
    tmp_path: Path, description: dict[str, Any], form: QuantizationSpec
) -> None:
    found = read(tmp_path, description)
    assert found == structs.replace(form, plain_modules=tuple(FP8_CHANNEL["ignore"]))


INTS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
            },
        }
    },
    "ignore": ["lm_head"],
}


def int_group(**fields: Any) -> dict[str, Any]:
    return INTS | {"config_groups": {"group_0": INTS["config_groups"]["group_0"] | fields}}


def ints(**changes: Any) -> dict[str, Any]:
    return int_group(weights=INTS["config_groups"]["group_0"]["weights"] | changes)


@pytest.mark.parametrize(
    ("description", "form"),
    [
        (
            INTS,
            QuantizationSpec(
                method="compressed-tensors", bits=4, group_size=128, symmetric=True, packed=True
            ),
        ),
        (
            ints(num_bits=8, strategy="channel", group_size=None, symmetric=False),
            QuantizationSpec(method="compressed-tensors", bits=8, group_size=0, symmetric=False, packed=True),
        ),
        (
            ints(num_bits=8, strategy="tensor") | {"format": "int-quantized"},
            QuantizationSpec(method="compressed-tensors", bits=8, group_size=0, symmetric=True, packed=False),
        ),
        (
            int_group(format="int-quantized", input_activations={"num_bits": 8, "dynamic": True})
            | {"format": "mixed-precision"},
            QuantizationSpec(
                method="compressed-tensors", bits=4, group_size=128, symmetric=True, packed=False
            ),
        ),
    ],
    ids=["group", "channel", "tensor", "mixed"],
)
def test_integers_of_compressed_tensors(tmp_path: Path, description: Any, form: QuantizationSpec) -> None:
    found = read(tmp_path, description)

    assert found == structs.replace(form, plain_modules=("lm_head",))
    assert found.part_of("lm_head") is None and found.part_of("model.layers.0.mlp.gate") is None
    assert found.part_of("model.layers.0.mlp.up_proj") == found


def test_several_groups_name_their_modules(tmp_path: Path) -> None:
    """A group that names modules has precedence over one for all linear layers, as in vLLM."""
    eight = ints(num_bits=8, strategy="channel")["config_groups"]["group_0"]
    groups = INTS["config_groups"] | {"group_1": eight | {"targets": ["re:.*down_proj$", "lm_head"]}}

    found = read(tmp_path, INTS | {"config_groups": groups, "ignore": ["re:.*layers.0.*"]})

    assert found is not None
    names = ["layers.0.mlp.down_proj", "layers.1.mlp.down_proj", "layers.1.mlp.up_proj"]
    assert [form and form.bits for form in (found.part_of(f"model.{name}") for name in names)] == [
        None,
        8,
        4,
    ]


@pytest.mark.parametrize(
    ("actorder", "reordered"),
    [(None, False), ("weight", False), ("static", False), ("group", True), (True, True)],
)
def test_only_the_order_of_groups_moves_inputs(tmp_path: Path, actorder: Any, reordered: bool) -> None:
    found = read(tmp_path, ints(actorder=actorder))

    assert found is not None and found.reordered == reordered and found.is_in_blocks != reordered


HADAMARD = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"]}]}}}


def group_with(**fields: Any) -> dict[str, Any]:
    return FP8_CHANNEL | {"config_groups": {"group_0": FP8_CHANNEL["config_groups"]["group_0"] | fields}}


def weights_of_group(**changes: Any) -> dict[str, Any]:
    group = FP8_CHANNEL["config_groups"]["group_0"]
    return FP8_CHANNEL | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("awq", "quantization_config is 'awq', expected an object"),
        ({}, r"quantization_config.quant_method is missing"),
        (
            {"quant_method": "hqq"},
            r"quant_method is 'hqq'.*supported are: fp8 .*awq .*gptq",
        ),
        ({"group_size": 64, "bits": 4}, "quant_method is missing"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is False, but load_in_8bit is False"),
        (
            MODELOPT | {"quant_algo": "NVFP4_SVD"},
            "quant_algo is 'NVFP4_SVD', supported of modelopt are FP8, ",
        ),
        (AWQ | {"w_bit": 8}, "bits is 4, but w_bit is 8, another name"),
        (AWQ | {"q_group_size": 64}, "group_size is 128, but q_group_size is 64"),
        (
            GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"},
            "checkpoint_format is 'gptq', but format is",
        ),
        (
            {"quant_method": "fp8", "ignored_layers": ["a"], "modules_to_not_convert": ["b"]},
            "modules_to_not_convert is .*'b'.*, but ignored_layers is .*'a'",
        ),
        (MODELOPT | {"ignore": ["a"], "exclude_modules": ["b"]}, "ignore is .*, but exclude_modules is"),
        (AWQ | {"bits": 8}, "bits is 8, only 4 bits"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', only gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"group_size": 48}, "group_size is 48, supported are -1 and 32, 64"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head', expected a list"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', only gptq and gptq_v2"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, r"dynamic is .*\+:.*only one setting"),
        (GPTQ | {"dynamic": {".*down": False}}, "dynamic is .*only one setting"),
        (GPTQ | {"dynamic": {"-:(down": {}}}, "dynamic is .*regular expression that cannot be read"),
        (GPTQ | {"dynamic": ["-:.*down"]}, "dynamic is .*expected an object"),
        (GPTQ | {"bits": 3}, "bits is 3, only 4 and 8 bits"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:fp8_static"},
            "packing_format is .*fp8_static'.*supported",
        ),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type is 'mx_fp', only int"),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits is 8, quantized inputs"),
        (
            AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 4}}},
            "extra_config is .*lm_head.*only one setting",
        ),
        (AUTO_ROUND | {"extra_config": {"mlp": {"bits": 8}}}, "extra_config is .*mlp.*only one setting"),
        (
            AUTO_ROUND | {"extra_config": {"(mlp": {"bits": 16}}},
            "extra_config is .*regular expression that cannot be read",
        ),
        (AUTO_ROUND | {"rotation_config": {"a": 1}}, "rotation_config is .*rotated"),
        (AUTO_ROUND | {"extra_config": ["mlp"]}, "extra_config is .*expected an object"),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "bits": 8}, "bits is 8, only 4 bits"),
        (GPTQ | {"lm_head": True}, "lm_head is True"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', only e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .128., expected two"),
        (FP8_CHANNEL | {"format": "pack-quantized"}, "format is 'pack-quantized', floats are supported in"),
        (floats("nvfp4-pack-quantized"), "strategy is 'group', only 'tensor_group' is supported in this"),
        (floats("mxfp4-pack-quantized", group_size=16), "group_size is 16, only 32 is supported"),
        (floats("mxfp8-quantized"), "num_bits is 4, only 8-bit float weights"),
        (floats("mxfp8-quantized", num_bits=8, strategy="channel"), "strategy is 'channel', only 'group'"),
        (floats("nvfp4-pack-quantized", type="float8"), "type is 'float8', only 'float'"),
        (floats("mxfp4-pack-quantized", symmetric=False), "symmetric is False, only symmetric floats"),
        (MIXED, "quantized_layers is None, expected the modules and their quant_algo"),
        (
            MIXED | {"quantized_layers": {"a": {"quant_algo": "INT4_AWQ"}}},
            "a.quant_algo is 'INT4_AWQ', supported",
        ),
        (
            MIXED
            | {
                "quantized_layers": {
                    "m.experts.0.a": {"quant_algo": "FP8"},
                    "m.experts.1.a": {"quant_algo": "NVFP4"},
                }
            },
            "m.experts.1.a.quant_algo is 'NVFP4', which is FP8 for another expert",
        ),
        (FP8_CHANNEL | {"format": "marlin-24"}, "format is 'marlin-24', supported are pack-quantized, int-q"),
        (FP8_CHANNEL | {"config_groups": {}}, "config_groups is .*expected at least one group"),
        (weights_of_group(num_bits=4), "group_0.weights.num_bits is 4, only 8-bit"),
        (weights_of_group(type="int"), "group_0.format is 'float-quantized', integers are supported in"),
        (INTS | {"format": "float-quantized"}, "group_0.format is 'float-quantized', integers are supported"),
        (ints(num_bits=3), "group_0.weights.num_bits is 3, integers of 4 and 8 bits"),
        (ints(strategy="tensor_group"), "weights.strategy is 'tensor_group', only tensor, channel and group"),
        (ints(strategy="group", group_size=0), "weights.group_size is 0"),
        (int_group(targets=[]), "group_0.targets is .*expected the modules of the group"),
        (int_group(targets=["LlamaMLP"]), "targets is .*'LlamaMLP'.*of classes only Linear"),
        (
            INTS | {"config_groups": INTS["config_groups"] | {"b": FP8_CHANNEL["config_groups"]["group_0"]}},
            "config_groups.b.format is 'pack-quantized', floats are supported",
        ),
        (
            FP8_CHANNEL
            | {"format": "naive-quantized"}
            | {"config_groups": FP8_CHANNEL["config_groups"] | {"b": INTS["config_groups"]["group_0"]}},
            "config_groups is .*only one group can be for all linear layers",
        ),
        (weights_of_group(strategy="group"), "strategy is 'group', only tensor, channel and block"),
        (FP8_CHANNEL | {"ignore": ["re:("]}, "ignore is .*regular expression that cannot be read"),
        (FP8_CHANNEL | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not"),
        (FP8_CHANNEL | {"transform_config": HADAMARD}, "transform_config is .*hadamard.*are not supported"),
        (FP8_CHANNEL | {"smoothing": {"alpha": 0.5}}, "smoothing is .*this setting is not known"),
        (group_with(output_activations={"num_bits": 8}), r"output_activations is .*quantized outputs"),
        (group_with(format="pack-quantized"), "group_0.format is 'pack-quantized', floats are supported in"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "quant_algo": "NVFP4"},
            "quant_algo is 'NVFP4', which is of modelopt, but quant_method is fp8; two methods at once",
        ),
        (
            {"quant_method": "fp8", "quantized_layers": {"model.layers.0": {"quant_algo": "NVFP4"}}},
            "quantized_layers is .*, which is of modelopt, but quant_method is fp8",
        ),
        (GPTQ | {"zero_point": True}, "zero_point is True, which is of awq, but quant_method is gptq"),
        ({"quant_method": "mxfp4"}, "mxfp4', which is not supported for llama, only for gpt_oss"),
    ],
    ids=str,
)
def test_what_is_refused_and_by_which_name(tmp_path: Path, description: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, description)
