"""Models with latent attention against transformers on tiny random models, through the real runner."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import FilesSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.runtime.errors import ConfigError

from ..weights.test_quantized import FORMS, PROMPT, prompt_logprobs, quantize_checkpoint
from .families import FAMILIES, LATENT, LATENT_EXPERTS, SPARSE
from .text_checks import tokens_of


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if "kv_lora_rank" in row.options])
def test_a_token_takes_one_row_of_each_layer(make_tiny_model, make_driver, name):
    tiny = make_tiny_model(FAMILIES[name].made_as, **FAMILIES[name].options)
    config = tiny.reference.config
    row = config.kv_lora_rank + config.qk_rope_head_dim
    kinds = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers)
    index_keys = kinds.count("full") * getattr(config, "index_head_dim", 0)

    assert tiny.spec.kv_bytes_per_token(2) == 2 * (config.num_hidden_layers * row + index_keys)
    pool = make_driver(tiny.spec, tiny.folder, page_size=4).runner.kv_pool
    assert pool.page_bytes == 4 * tiny.spec.kv_bytes_per_token(4)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_key_value_heads", 2, "expected num_attention_heads, 6"),
        ("moe_layer_freq", 2, "only 1 is supported"),
        ("hidden_act", "gelu", "only 'silu' is supported"),
        ("topk_method", "greedy", "only 'noaux_tc' is supported"),
        ("scoring_func", "softmax", "only 'sigmoid' is supported"),
        ("kv_lora_rank", None, "kv_lora_rank is missing"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "supported are: default, yarn"),
    ],
)
def test_other_fields_are_refused_by_name(make_tiny_model, field, value, rule):
    folder = make_tiny_model("deepseek_v3", **LATENT_EXPERTS, n_group=4).folder
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields.pop("rope_parameters")
    path.write_text(json.dumps({**fields, field: value}))

    with pytest.raises(ConfigError, match=rule) as error:
        read_hf_spec(folder)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("norm_topk_prob", True, "only false is supported"),
        ("mlp_bias", True, "only false is supported for a model with experts"),
        ("topk_method", "noaux_tc", "supported are: greedy, group_limited_greedy"),
        ("scoring_func", "sigmoid", "only 'softmax' is supported"),
    ],
)
def test_other_experts_of_v2_are_refused_by_name(make_tiny_model, field, value, rule):
    folder = make_tiny_model("deepseek_v2", **LATENT_EXPERTS).folder
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    with pytest.raises(ConfigError, match=rule) as error:
        read_hf_spec(folder)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("q_lora_rank", None, "the indexer needs the latents of queries"),
        ("index_head_dim", 8, "expected a whole number from 16"),
        ("indexer_types", ["full", "none", "full"], "expected a list of full and shared"),
        ("indexer_types", ["full", "shared"], "one for each of the 3 layers"),
        ("indexer_types", ["shared", "full", "full"], "full first"),
    ],
)
def test_other_indexers_are_refused_by_name(make_tiny_model, field, value, rule):
    folder = make_tiny_model("glm_moe_dsa", **SPARSE).folder
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    with pytest.raises(ConfigError, match=rule) as error:
        read_hf_spec(folder)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"index_topk_pattern": "FSF"}, (False, True, False)),
        ({"index_topk_pattern": ["full", "shared", "shared"]}, (False, True, True)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (False, True, False)),
        ({}, ()),
    ],
)
def test_layers_share_the_choice_of_an_earlier_one(make_tiny_model, fields, expected):
    folder = make_tiny_model("glm_moe_dsa", **SPARSE).folder
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("indexer_types")
    path.write_text(json.dumps({**config, **fields}))

    latent = read_hf_spec(folder).latent

    assert latent is not None and latent.index is not None
    assert latent.index.shared_layers == expected


def test_layers_that_predict_further_tokens_are_not_read(make_tiny_model, make_driver):
    tiny = make_tiny_model("deepseek_v3", **LATENT_EXPERTS, n_group=1, topk_group=1)
    path = tiny.folder / "model.safetensors"
    tensors = load_file(path)
    further = {
        name.replace("layers.2.", "layers.3."): each.clone()
        for name, each in tensors.items()
        if "layers.2." in name
    }
    further["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors | further, path, {"format": "pt"})
    prompt = tokens_of(30)

    check_folder_weights(tiny.folder, tiny.spec)
    assert make_driver(tiny.spec, tiny.folder).generate([prompt], num=4) == [tiny.greedy(prompt, 4)]
    without = msgspec.structs.replace(tiny.spec, files=FilesSpec())
    with pytest.raises(ConfigError, match="unexpected tensor 'model.layers.3"):
        check_folder_weights(tiny.folder, without)


def test_weights_in_8_bit_floats_with_a_scale_per_block(make_tiny_model, make_driver, unpack):
    """As published; the matrix of keys and values is dequantized."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "q_lora_rank": 32, "v_head_dim": 32}
    tiny = make_tiny_model("deepseek_v3", **{**LATENT, **sizes})
    quantize_checkpoint(tiny, *FORMS["fp8 per block"])
    spec = read_hf_spec(tiny.folder)

    check_folder_weights(tiny.folder, spec)
    found = prompt_logprobs(make_driver(spec, tiny.folder), unpack)

    expected = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(found, expected, atol=1e-3)
