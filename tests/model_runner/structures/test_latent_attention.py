"""Models with latent attention against transformers on tiny random models, through the real runner."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import FilesSpec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters, weight_bytes
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams

from ..weights.test_quantized import FORMS, PROMPT, prompt_logprobs, quantize_checkpoint
from .test_architectures import YARN, tokens_of

LATENT = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 8,
}
SPARSE = {
    **LATENT,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
LITE = {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", LATENT),
    "v2 biases, latent queries, tied": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": 20, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "v2 yarn": ("deepseek_v2", {**LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 20}),
    "v3 yarn, sharper scores": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 20,
            "num_hidden_layers": 3,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "v3 halves rotate, values wider than keys": (
        "deepseek_v3",
        {**LATENT, "rope_interleave": False, "qk_nope_head_dim": 8, "v_head_dim": 40, "kv_lora_rank": 48},
    ),
    "v2 experts": ("deepseek_v2", SPARSE),
    "v2 experts in groups": (
        "deepseek_v2",
        {**SPARSE, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "v3 experts in groups": ("deepseek_v3", {**SPARSE, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}),
    "v3 experts, raw shares": (
        "deepseek_v3",
        {**SPARSE, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 1},
    ),
    "glm experts": (
        "glm4_moe_lite",
        {
            **{name: value for name, value in SPARSE.items() if name != "first_k_dense_replace"},
            "q_lora_rank": 28,
            "n_shared_experts": 1,
        },
    ),
    "glm": (
        "glm4_moe_lite",
        {**LITE, "q_lora_rank": 28, "mlp_layer_types": ["dense", "dense"], "rms_norm_eps": 1e-2},
    ),
}
variants = pytest.mark.parametrize(("model_type", "options"), VARIANTS.values(), ids=VARIANTS.keys())


@pytest.mark.fast_cases(4)
@variants
def test_prefill_and_decode_are_those_of_transformers(
    make_tiny_model, make_driver, unpack, model_type, options
):
    tiny = make_tiny_model(model_type, **options)
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = tokens_of(150)
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
    expected = tiny.logprobs(prompt)

    result = driver.step([(req, 150)])

    token, top_ids, top = unpack(result.prompt_logprobs[0])
    np.testing.assert_allclose(token, expected[torch.arange(149), prompt[1:]], atol=2e-4)
    np.testing.assert_allclose(top, expected[:-1].topk(5).values, atol=2e-4)
    assert (top_ids == expected[:-1].topk(5).indices.numpy()).mean() > 0.99
    while len(req.output) < 12:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[149:-1].argmax(-1).tolist() == req.output


@pytest.mark.fast_cases(2)
@variants
def test_chunks_prefixes_and_mixed_steps_change_nothing(
    make_tiny_model, make_driver, unpack, model_type, options
):
    """A long prompt in chunks beside decodes of many lengths, then a second request behind its cached prefix."""
    tiny = make_tiny_model(model_type, **options)
    driver = make_driver(tiny.spec, tiny.folder)
    decoding = [driver.start(tokens_of(length, seed=length)) for length in (1, 9, 40, 90)]
    driver.step([(req, len(req.tokens)) for req in decoding])
    prompt = tokens_of(150, seed=7)
    long = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found = []

    for chunk in (37, 1, 80, 32):
        result = driver.step([(long, chunk), *((req, 1) for req in decoding)])
        found += unpack(result.prompt_logprobs[0])[0].tolist()
    behind = driver.start(prompt[:100] + tokens_of(30, seed=8), prefix=(long, 100))
    driver.step([(behind, 30), (long, 1), *((req, 1) for req in decoding)])

    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(149), prompt[1:]], atol=2e-4)
    for req in (*decoding, long, behind):
        predicted = tiny.logprobs(req.tokens)[req.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == req.output


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("variant", ["v2", "v3 yarn, sharper scores", "v3 experts in groups", "glm"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_model, make_driver, unpack, variant):
    model_type, options = VARIANTS[variant]
    tiny = make_tiny_model(model_type, dtype="bfloat16", **options)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16")
    prompt = tokens_of(120)
    theirs = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()
    tiny.reference.float()
    exact = tiny.logprobs(prompt)[torch.arange(119), prompt[1:]].numpy()

    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    ours, _, _ = unpack(driver.step([(req, 120)]).prompt_logprobs[0])

    assert np.abs(ours - exact).mean() < 1.25 * np.abs(theirs - exact).mean() + 1e-3


@pytest.mark.fast_cases(4)
@variants
def test_memory_is_what_the_checkpoint_has(make_tiny_model, make_driver, model_type, options):
    tiny = make_tiny_model(model_type, **options)
    numbers = [*tiny.reference.parameters()]
    numbers += [buffer for name, buffer in tiny.reference.named_buffers() if name.endswith("correction_bias")]
    parameters = sum(each.numel() for each in numbers)
    config = tiny.reference.config
    row = config.kv_lora_rank + config.qk_rope_head_dim

    assert num_parameters(tiny.spec) == parameters
    assert weight_bytes(tiny.spec, 2) == 2 * parameters
    assert tiny.spec.kv_bytes_per_token(2) == 2 * config.num_hidden_layers * row
    check_folder_weights(tiny.folder, tiny.spec)
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
    folder = make_tiny_model("deepseek_v3", **SPARSE, n_group=4).folder
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
    folder = make_tiny_model("deepseek_v2", **SPARSE).folder
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    with pytest.raises(ConfigError, match=rule) as error:
        read_hf_spec(folder)
    assert field in str(error.value)


def test_layers_that_predict_further_tokens_are_not_read(make_tiny_model, make_driver):
    tiny = make_tiny_model("deepseek_v3", **SPARSE, n_group=1, topk_group=1)
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


def test_kimi_k2_is_read_as_deepseek_v3(make_tiny_model, make_driver):
    tiny = make_tiny_model("deepseek_v3", **LATENT)
    path = tiny.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    driver = make_driver(read_hf_spec(tiny.folder), tiny.folder)
    prompt = tokens_of(40)

    assert driver.generate([prompt], num=6) == [tiny.greedy(prompt, 6)]
