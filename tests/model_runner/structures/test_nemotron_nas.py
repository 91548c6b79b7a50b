"""Llama Nemotron: layers with no attention, no MLP, or a smaller one, against a Llama with zeros there."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError

from .test_families import prompt_logprobs, reference_logprobs
from .text_checks import tokens_of

WIDE, NARROW, NONE = {"ffn_mult": 10.0}, {"ffn_mult": 1.0}, {"no_op": True}
HEADS = {"n_heads_in_group": 3}
BLOCKS = [(HEADS, NARROW), (NONE, WIDE), (HEADS, NONE), (NONE, NONE), (HEADS, WIDE)]
WIDTHS = {id(WIDE): 512, id(NARROW): 256}


@pytest.fixture
def tiny(make_tiny_model):
    """Layers of widths 512 and 256; a block that the file does not have is 0 in the reference."""
    tiny = make_tiny_model("llama", num_hidden_layers=len(BLOCKS), intermediate_size=512)
    path, weights = tiny.folder / "config.json", tiny.folder / "model.safetensors"
    tensors = load_file(weights)
    with torch.no_grad():
        for number, (attention, mlp) in enumerate(BLOCKS):
            layer, name = tiny.reference.model.layers[number], f"model.layers.{number}."
            if attention is NONE:
                layer.self_attn.o_proj.weight.zero_()
            if mlp is NONE:
                layer.mlp.down_proj.weight.zero_()
            unused = [f"{name}self_attn.", f"{name}input_layernorm."] * (attention is NONE)
            unused += [f"{name}mlp.", f"{name}post_attention_layernorm."] * (mlp is NONE)
            tensors = {key: each for key, each in tensors.items() if not key.startswith(tuple(unused) or "-")}
            if mlp is NARROW:
                layer.mlp.down_proj.weight[:, 256:].zero_()
                down = tensors[f"{name}mlp.down_proj.weight"]
                tensors[f"{name}mlp.down_proj.weight"] = down[:, :256].contiguous()
                for part in ("gate_proj", "up_proj"):
                    tensors[f"{name}mlp.{part}.weight"] = tensors[f"{name}mlp.{part}.weight"][
                        :256
                    ].contiguous()
    save_file(tensors, weights)
    blocks = [{"attention": attention, "ffn": mlp} for attention, mlp in BLOCKS]
    write(path, model_type="nemotron-nas", architectures=["DeciLMForCausalLM"], block_configs=blocks)
    write(path, num_key_value_heads=None, intermediate_size=None)
    return tiny


def write(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_layers_may_have_less(tiny, make_driver, unpack):
    spec = read_hf_spec(tiny.folder)
    check_folder_weights(tiny.folder, spec)

    driver = make_driver(spec, tiny.folder)
    found = prompt_logprobs(driver, unpack, 80)

    np.testing.assert_allclose(found, reference_logprobs(tiny, 80), atol=2e-4)
    prompts = [tokens_of(40), tokens_of(7, seed=1)]
    assert driver.generate(prompts, num=6) == [tiny.greedy(prompt, 6) for prompt in prompts]
    assert num_parameters(spec) == sum(
        each.numel() for each in load_file(tiny.folder / "model.safetensors").values()
    )
    assert spec.kv_bytes_per_token(2) == 3 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("blocks", "rule"),
    [
        ([], "expected an object for each of the 5 layers"),
        ([{"attention": NONE, "ffn": WIDE}] * 5, "expected layers with attention"),
        (
            [{"attention": NONE, "ffn": NONE}, *[{"attention": HEADS, "ffn": WIDE}] * 4],
            "a block in the first one",
        ),
        (
            [{"attention": {**HEADS, "replace_with_linear": True}, "ffn": WIDE}] * 5,
            "replace_with_linear is True",
        ),
        ([{"attention": HEADS}] * 5, r"block_configs\[0\].ffn is None, expected an object"),
    ],
)
def test_other_blocks_are_refused_by_name(tiny, blocks, rule):
    write(tiny.folder / "config.json", block_configs=blocks)

    with pytest.raises(ConfigError, match=rule):
        read_hf_spec(tiny.folder)
