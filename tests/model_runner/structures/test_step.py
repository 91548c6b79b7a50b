"""Step-3.5 and Step-3.7 as their maker writes them: numbers for each layer, stacks of experts, and other names."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.runtime.errors import ConfigError

from .families import FAMILIES, FULL, LOCAL
from .text_checks import tokens_of

ROW = FAMILIES["step3p5"]
GONE = ("mlp_layer_types", "rope_parameters", "num_sliding_attention_heads", "per_layer_config")
RENAMED = {
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "num_key_value_heads": "num_attention_groups",
}
PUBLISHED = {
    "architectures": ["Step3p5ForCausalLM"],
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "layer_types": [FULL, LOCAL, LOCAL, FULL, LOCAL],
    "moe_layers_enum": "2,3,4",
    "moe_router_activation": "sigmoid",
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "rope_theta": [1000.0, 100.0, 100.0, 1000.0, 100.0],
    "swiglu_limits": [0.0, 0.0, 0.6, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.8, 0.9, 0.0, 0.0],
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "yarn_only_types": ["full_attention"],
}


def published(make_tiny_model, one_by_one=False, **fields):
    """The folder of a tiny model with published names; `one_by_one`: experts are tensors of their own."""
    tiny = make_tiny_model("step3p5", **ROW.options)
    path, weights = tiny.folder / "config.json", tiny.folder / "model.safetensors"
    config = {RENAMED.get(name, name): each for name, each in json.loads(path.read_text()).items()}
    path.write_text(json.dumps({n: each for n, each in config.items() if n not in GONE} | PUBLISHED | fields))
    tensors = {}
    for name, tensor in load_file(weights).items():
        if name.endswith("gate_up_proj"):
            stem = name.replace("mlp.experts.gate_up_proj", "moe")
            for part, stack in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                tensors[f"{stem}.{part}.weight"] = stack.contiguous()
        elif name.endswith("experts.down_proj"):
            tensors[name.replace("mlp.experts.down_proj", "moe.down_proj.weight")] = tensor
        elif name.endswith("e_score_correction_bias"):
            tensors[name.replace("mlp.gate.e_score_correction_bias", "moe.router_bias")] = tensor
        else:
            name = name.replace(".mlp.gate.", ".moe.gate.")
            tensors[name.replace(".mlp.shared_experts.", ".share_expert.")] = tensor
    if one_by_one:
        for name in [name for name, tensor in tensors.items() if tensor.ndim == 3]:
            stem, part = name.split(".moe.")
            for n, tensor in enumerate(tensors.pop(name)):
                tensors[f"{stem}.moe.experts.{n}.{part}"] = tensor.contiguous()
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(4, 8)  # predicts further tokens
    save_file(tensors, weights)
    return tiny


@pytest.mark.parametrize("one_by_one", [False, True], ids=["stacks", "one by one"])
def test_published_files_are_the_same_model(make_tiny_model, make_driver, one_by_one):
    tiny = published(make_tiny_model, one_by_one)
    prompt = tokens_of(60)

    spec = read_hf_spec(tiny.folder)
    check_folder_weights(tiny.folder, spec)

    assert spec.windows == tiny.spec.windows and spec.rope_scaling == tiny.spec.rope_scaling
    assert make_driver(spec, tiny.folder).generate([prompt], num=4) == [tiny.greedy(prompt, 4)]


def test_the_bias_of_the_router_chooses_experts_and_is_no_part_of_their_shares(make_tiny_model, make_driver):
    tiny = published(make_tiny_model)
    path = tiny.folder / "model.safetensors"
    tensors, bias = load_file(path), torch.linspace(-2.0, 2.0, 6)
    for layer in (2, 3):
        tiny.reference.model.layers[layer].mlp.gate.e_score_correction_bias.copy_(bias)
        tensors[f"model.layers.{layer}.moe.router_bias"] = bias.clone()
    save_file(tensors, path)

    found = make_driver(read_hf_spec(tiny.folder), tiny.folder).generate([tokens_of(60)], num=6)

    assert found == [tiny.greedy(tokens_of(60), 6)]


def test_shares_are_normalized_unless_the_file_says_no(make_tiny_model):
    normalize = []
    for given in (True, False, None):
        experts = read_hf_spec(published(make_tiny_model, norm_expert_weight=given).folder).experts
        assert experts is not None
        normalize.append(experts.routing.normalize)

    assert normalize == [True, False, True]


def test_a_folder_of_step_3_7_is_read_for_its_text(make_tiny_model, make_driver):
    tiny = published(make_tiny_model)
    path, weights = tiny.folder / "config.json", tiny.folder / "model.safetensors"
    text = {name: each for name, each in json.loads(path.read_text()).items() if name != "architectures"}
    outer = {"model_type": "step3p7", "architectures": ["Step3p7ForConditionalGeneration"]}
    path.write_text(json.dumps({**outer, "text_config": text, "vision_config": {"width": 32}}))
    tensors = load_file(weights) | {
        "vision_model.conv1.weight": torch.zeros(4, 4),
        "vit_large_projector.weight": torch.zeros(4, 4),
    }
    save_file(tensors, weights)

    spec = read_hf_spec(tiny.folder)
    _, summary = check_folder_weights(tiny.folder, spec)

    assert summary.num_ignored == 2 and spec.files.language_of == "step3p7"
    found = make_driver(spec, tiny.folder).generate([tokens_of(60)], num=4)
    assert found == [tiny.greedy(tokens_of(60), 4)]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("attention_other_setting", {"head_dim": 32}, "only 16 is supported"),
        ("attention_other_setting", {"attention_type": "full_attention"}, "only 'sliding_attention' is supp"),
        ("layer_types", [FULL, LOCAL], "one for each of the 4 layers"),
        ("layer_types", [FULL, LOCAL, "linear", FULL], "full_attention or sliding_attention for each layer"),
        ("moe_layers_enum", "2,x", "expected the numbers of the layers with experts"),
        ("moe_router_activation", "softmax", "only 'sigmoid' is supported"),
        (
            "per_layer_config",
            {"1": {"num_attention_heads": 8}},
            "expected num_attention_heads 6 for each layer",
        ),
        (
            "partial_rotary_factors",
            [0.5, 1.0, 0.5, 0.5],
            "the same for all layers of the kind sliding_attent",
        ),
        ("partial_rotary_factors", [0.01, 1.0, 1.0, 0.01], "a part of each head must rotate"),
        ("rope_parameters", {"rope_theta": 1.0}, "expected an object with one for full_attention"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 0.5}, "a number from 1"),
        ("swiglu_limits", [0.0, 0.0, -1.0, 0.0], "expected a limit above 0 for each layer"),
        ("swiglu_limits", [0.0, float("nan"), 0.0, 0.0], "expected a limit above 0 for each layer"),
        ("swiglu_limits_shared", [0.0, float("inf"), 0.0, 0.0], "expected a limit above 0 for each layer"),
        ("use_rope_layers", [True, False, True, True], "all layers must rotate"),
        ("yarn_only_types", None, "windowed layers must not be scaled"),
        ("yarn_only_types", ["all"], "expected a list of full_attention and sliding_attention"),
    ],
)
def test_other_fields_are_refused_by_name(make_tiny_model, field, value, rule):
    folder = published(make_tiny_model, **{field: value}).folder

    with pytest.raises(ConfigError, match=rule) as error:
        read_hf_spec(folder)
    assert field in str(error.value) or field == "yarn_only_types"
