"""MiMo-V2-Flash as its maker writes it: lists of numbers for the kinds of layers, and other names."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.runtime.errors import ConfigError

from .families import FAMILIES
from .text_checks import tokens_of

ROW = FAMILIES["mimo_v2_flash experts, as wide values"]
PUBLISHED = {
    "hybrid_layer_pattern": [0, 1, 0],
    "moe_layer_freq": [0, 1, 1],
    "sliding_window": 18,
    "sliding_window_size": 18,
    "attention_chunk_size": 18,
    "partial_rotary_factor": 0.334,
    "rope_theta": 1000.0,
    "swa_rope_theta": 100.0,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 24,
    "layernorm_epsilon": 1e-5,
    "routed_scaling_factor": None,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}


def published(make_tiny_model, **fields):
    tiny = make_tiny_model("mimo_v2_flash", **ROW.options)
    path, weights = tiny.folder / "config.json", tiny.folder / "model.safetensors"
    config = json.loads(path.read_text())
    for name in ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps"):
        config.pop(name)
    path.write_text(json.dumps(config | PUBLISHED | fields))
    tensors = {
        name.replace(".sinks", ".attention_sink_bias"): each for name, each in load_file(weights).items()
    }
    tensors["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(4, 8)  # predicts further tokens
    save_file(tensors, weights)
    return tiny


def test_published_files_are_the_same_model(make_tiny_model, make_driver):
    tiny = published(make_tiny_model)
    prompt = tokens_of(60)

    assert read_hf_spec(tiny.folder) == tiny.spec
    check_folder_weights(tiny.folder, tiny.spec)
    assert make_driver(tiny.spec, tiny.folder).generate([prompt], num=4) == [tiny.greedy(prompt, 4)]


@pytest.mark.parametrize(("part", "rotary_dim"), [(None, 8), (0.5, 12), (1.0, None)])
def test_the_part_of_a_head_that_rotates_may_be_all_of_it(make_tiny_model, part, rotary_dim):
    folder = published(make_tiny_model, partial_rotary_factor=part).folder
    assert read_hf_spec(folder).rotary_dim == rotary_dim


def test_all_layers_rotate_the_same_part_of_a_head(make_tiny_model):
    ropes = {"full_attention": {"partial_rotary_factor": 0.5}, "sliding_attention": None}
    folder = published(make_tiny_model, rope_parameters=ropes).folder
    with pytest.raises(ConfigError, match="expected the partial_rotary_factor of full_attention, 0.5"):
        read_hf_spec(folder)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("swa_head_dim", 16, "expected head_dim, 24"),
        ("swa_v_head_dim", 16, "expected v_head_dim, 24"),
        ("add_full_attention_sink_bias", True, "only False is supported"),
        ("hybrid_layer_pattern", [0, 1], "expected 0 or 1 for each of the 3 layers"),
        ("moe_layer_freq", [0, 1, 2], "from 0 to 1"),
    ],
)
def test_other_fields_are_refused_by_name(make_tiny_model, field, value, rule):
    folder = published(make_tiny_model, **{field: value}).folder

    with pytest.raises(ConfigError, match=rule) as error:
        read_hf_spec(folder)
    assert field in str(error.value)
