"""Families with mixtures of experts, against transformers; each variant is in published files."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.models.spec.quantization import QuantizationSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.sampling_params import SamplingParams

from .families import ERNIE, FAMILIES
from .text_checks import check_prefill_and_decode, tokens_of

ONE_OF_EACH = (
    "mixtral",
    "qwen2_moe",
    "olmoe",
    "phimoe",
    "glm4_moe",
    "gpt_oss",
    "llama4 as Scout",
    "granitemoeshared tied, biases",
    "ernie4_5_moe",
    "minimax_m2 all experts",
)


WHOLE_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_decodes_are_recorded_and_repeat_the_eager_ones(make_tiny_model, make_driver, variant):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    row = FAMILIES[variant]
    tiny = make_tiny_model(row.model_type, dtype="bfloat16", **row.options | WHOLE_HEADS)
    prompts = [tokens_of(20), tokens_of(31, seed=1)]
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
    found = driver.generate(prompts, num=8)
    assert driver.native.reason_against == ""
    assert driver.native.recorded_sizes == [2] and driver.native.num_replayed > 4
    driver.run_eagerly()
    assert driver.generate(prompts, num=8) == found


WHOLE_BLOCKS = {
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "olmoe": {"intermediate_size": 64},
    "phimoe": {"intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64},
    "glm4_moe": {"moe_intermediate_size": 64, "intermediate_size": 96, "first_k_dense_replace": 0},
    "llama4 as Scout": {"intermediate_size": 64},
    "granitemoeshared tied, biases": {"intermediate_size": 64, "shared_intermediate_size": 96},
    "ernie4_5_moe": {"moe_intermediate_size": 64, "moe_layer_start_index": 0},
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("variant", WHOLE_BLOCKS)
def test_quantized_experts_take_their_planned_memory(make_tiny_model, make_driver, unpack, variant):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    row = FAMILIES[variant]
    sizes = row.options | WHOLE_HEADS | WHOLE_BLOCKS[variant]
    tiny = make_tiny_model(row.model_type, dtype="bfloat16", **sizes)
    prompt = tokens_of(60)
    exact = tiny.logprobs(prompt)[torch.arange(59), prompt[1:]].numpy()
    held: dict[str, int] = {}
    methods: tuple[tuple[Literal["int8", "int4"], float], ...] = (("int8", 0.25), ("int4", 0.8))
    for method, tolerance in methods:
        driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", quantization=method)
        req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
        ours, _, _ = unpack(driver.step([(req, 60)]).prompt_logprobs[0])
        assert np.abs(ours - exact).mean() < tolerance
        spec = structs.replace(tiny.spec, quantization=QuantizationSpec(method=method, stored=False))
        experts = [layer.mlp.experts for layer in driver.runner.model.layers]
        parts = [part for layer in experts for part in (layer._gate_up, layer._down)]
        held[method] = sum(one.num_bytes for part in parts for one in part._weights)
        without = structs.replace(spec, experts=structs.replace(spec.experts, num_experts=3))
        size, inner = tiny.spec.hidden_size, spec.experts.intermediate_size
        biases = spec.experts.routing.has_bias + spec.experts.has_bias * (1 + 2 * inner + size)
        beside = 3 * (size + biases) * tiny.spec.num_layers * 2  # of the router, and biases
        assert weight_bytes(spec, 2) - weight_bytes(without, 2) - beside == held[method] // 2
    assert held["int4"] < held["int8"]


def test_layers_of_ernie_that_predict_further_tokens_are_not_read(make_tiny_model, make_driver, unpack):
    tiny = make_tiny_model("ernie4_5_moe", **ERNIE)
    tensors = load_file(tiny.folder / "model.safetensors")
    tensors["model.mtp_block.0.mlp.gate_proj.weight"] = torch.ones(2, 2)
    tensors["model.mtp_emb_norm.0.weight"] = torch.ones(2)
    save_file(tensors, tiny.folder / "model.safetensors")
    check_folder_weights(tiny.folder, tiny.spec)
    check_prefill_and_decode(tiny, make_driver(tiny.spec, tiny.folder), unpack, length=20)


def test_weights_need_no_checkpoint(make_tiny_model, make_driver):
    spec = make_tiny_model("qwen2_moe", **FAMILIES["qwen2_moe"].options).spec
    found = make_driver(spec).generate([tokens_of(20)], num=4)
    assert found == make_driver(spec).generate([tokens_of(20)], num=4)
