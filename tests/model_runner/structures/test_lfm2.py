"""LFM2 against transformers: states of short convolutions beside keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.weight_files.check_weights import check_gguf_weights
from engine.models.weight_files.weight_memory import num_parameters, weight_bytes
from engine.runtime.sampling_params import SamplingParams

from .test_architectures import tokens_of
from .text_checks import check_bfloat16, check_int8_cache, check_recording

if TYPE_CHECKING:
    from ..conftest import TinyModel

MOE = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
}
MOE_VARIANTS: dict[str, dict[str, Any]] = {
    "lfm2_moe": MOE,
    "tied, no bias, raw shares": {
        **MOE,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
        "tie_word_embeddings": True,
    },
}

LFM2 = {"num_hidden_layers": 5, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "lfm2": {**LFM2, "block_auto_adjust_ff_dim": False},
    "tied, ends with a convolution": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "full_attention", "conv"],
        "tie_word_embeddings": True,
        "block_multiple_of": 16,
    },
    "four taps, biases, 9/3": {
        **LFM2,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "conv_L_cache": 4,
        "conv_bias": True,
        "block_ffn_dim_multiplier": 1.3,
        "block_multiple_of": 8,
    },
    "six taps": {**LFM2, "conv_L_cache": 6, "block_multiple_of": 16, "hidden_size": 96},
    "two taps, first layer attends": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "conv", "conv"],
        "conv_L_cache": 2,
        "block_multiple_of": 16,
    },
    "only attention": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "block_multiple_of": 16,
    },
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.mark.fast_cases(4)
@variants
def test_prefill_and_decode_are_those_of_transformers(make_tiny_model, make_driver, unpack, options):
    tiny = make_tiny_model("lfm2", **options)
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = tokens_of(150)
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5))
    expected = tiny.logprobs(prompt)

    result = driver.step([(req, 150)])

    token, _, top = unpack(result.prompt_logprobs[0])
    np.testing.assert_allclose(token, expected[torch.arange(149), prompt[1:]], atol=2e-4)
    np.testing.assert_allclose(top, expected[:-1].topk(5).values, atol=2e-4)
    while len(req.output) < 12:
        driver.step([(req, 1)])
    assert tiny.logprobs(prompt + req.output)[149:-1].argmax(-1).tolist() == req.output


@pytest.mark.fast_cases(3)
@variants
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 60), (37, 1, 2, 24), (5, 3, 56), (64,)])
def test_chunks_beside_decodes_change_nothing(make_tiny_model, make_driver, unpack, options, chunks):
    tiny = make_tiny_model("lfm2", **options)
    driver = make_driver(tiny.spec, tiny.folder)
    decoding = [driver.start(tokens_of(length, seed=length)) for length in (1, 2, 9, 40)]
    driver.step([(req, len(req.tokens)) for req in decoding])
    prompt = tokens_of(64, seed=7)
    long = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found: list[float] = []

    for chunk in chunks:
        result = driver.step([(long, chunk), *((req, 1) for req in decoding)])
        found += unpack(result.prompt_logprobs[0])[0].tolist() if result.prompt_logprobs else []
    for _ in range(4):
        driver.step([(long, 1), *((req, 1) for req in decoding)])

    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(63), prompt[1:]], atol=2e-4)
    for req in (*decoding, long):
        predicted = tiny.logprobs(req.tokens)[req.prompt_len - 1 : -1].argmax(-1).tolist()
        assert predicted == req.output


def test_a_row_begins_without_the_state_of_the_request_before(make_tiny_model, make_driver):
    tiny = make_tiny_model("lfm2", **VARIANTS["lfm2"])
    driver = make_driver(tiny.spec, tiny.folder, rows=1)
    for seed in range(3):
        req = driver.start(tokens_of(20 + seed, seed=seed))
        driver.step([(req, len(req.tokens))])
        while len(req.output) < 5:
            driver.step([(req, 1)])
        assert req.output == tiny.greedy(req.tokens[: req.prompt_len], 5)
        driver.finish(req)


def test_decodes_are_recorded_and_prompts_are_programs(make_tiny_model, make_driver):
    tiny = make_tiny_model("lfm2", dtype="bfloat16", **VARIANTS["lfm2"], hidden_size=96)
    recorded, eager = (make_driver(tiny.spec, tiny.folder, dtype="bfloat16") for _ in range(2))
    check_recording(recorded, eager)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("variant", ["lfm2", "four taps, biases, 9/3", "six taps"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_tiny_model, make_driver, unpack, variant):
    tiny = make_tiny_model("lfm2", dtype="bfloat16", **VARIANTS[variant])
    check_bfloat16(tiny, make_driver(tiny.spec, tiny.folder, dtype="bfloat16"), unpack)


def test_an_int8_cache_changes_little(make_tiny_model, make_driver, unpack):
    tiny = make_tiny_model("lfm2", **VARIANTS["lfm2"])
    check_int8_cache(tiny, make_driver(tiny.spec, tiny.folder, kv_cache_dtype="int8"), unpack)


def test_deterministic_bits_do_not_depend_on_chunks(make_tiny_model, make_driver, unpack):
    tiny = make_tiny_model("lfm2", dtype="bfloat16", **VARIANTS["lfm2"], hidden_size=96)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", deterministic=True)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    found = []
    for chunks in ((64,), (37, 1, 26), (2, 62)):
        req = driver.start(tokens_of(64), params)
        parts = [driver.step([(req, chunk)]).prompt_logprobs[0] for chunk in chunks]
        found.append(np.concatenate([unpack(part)[0] for part in parts]))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@variants
def test_memory_is_what_the_checkpoint_has(make_tiny_model, options):
    tiny = make_tiny_model("lfm2", **options)
    config, spec = tiny.reference.config, tiny.spec

    assert num_parameters(spec) == sum(p.numel() for p in tiny.reference.parameters())
    assert weight_bytes(spec, 2) == 2 * num_parameters(spec)
    attending = config.layer_types.count("full_attention")
    head_dim = config.hidden_size // config.num_attention_heads
    assert spec.kv_bytes_per_token(2) == 4 * attending * config.num_key_value_heads * head_dim
    num_convs = config.num_hidden_layers - attending
    if num_convs:
        assert spec.state.slot_bytes(2) == 2 * num_convs * (config.conv_L_cache - 1) * config.hidden_size
    else:
        assert spec.state is None


@pytest.mark.parametrize("options", MOE_VARIANTS.values(), ids=MOE_VARIANTS.keys())
def test_a_mixture_is_that_of_transformers(make_tiny_model, make_driver, unpack, options):
    tiny = make_tiny_model("lfm2_moe", **options)
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = tokens_of(60)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found: list[float] = []
    for chunk in (17, 1, 42):
        result = driver.step([(req, chunk)])
        found += unpack(result.prompt_logprobs[0])[0].tolist()
    while len(req.output) < 6:
        driver.step([(req, 1)])

    np.testing.assert_allclose(found, tiny.logprobs(prompt)[torch.arange(59), prompt[1:]], atol=2e-4)
    assert tiny.logprobs(prompt + req.output)[59:-1].argmax(-1).tolist() == req.output
    assert num_parameters(tiny.spec) == sum(p.numel() for p in tiny.reference.state_dict().values()) - (
        tiny.spec.vocab_size * tiny.spec.hidden_size if tiny.spec.tie_word_embeddings else 0
    )


def write_gguf(path: Path, tiny: TinyModel, kind_name: str = "F32") -> None:
    """As llama.cpp's converter writes LFM2: heads of keys and values for each layer, and no axis of length 1."""
    import gguf

    config, state, spec = tiny.reference.config, tiny.reference.state_dict(), tiny.spec
    arch = gguf.MODEL_ARCH.LFM2
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[kind_name]
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = np.ascontiguousarray(tensor.float().squeeze().numpy())
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if array.ndim == 1 or array.shape[-1] % 32 or "conv.conv" in name:
            writer.add_tensor(target, array)
        else:
            writer.add_tensor(target, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("variant", ["lfm2", "tied, ends with a convolution"])
def test_a_gguf_file_is_the_same_model(make_tiny_model, make_driver, tmp_path, variant):
    tiny = make_tiny_model("lfm2", **VARIANTS[variant])
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny)
    file = GGUFFile(path)
    spec = read_gguf_spec(file)
    check_gguf_weights(file, spec)

    driver = make_driver(spec, path, kind="gguf")

    assert driver.generate([tokens_of(40)], num=12)[0] == tiny.greedy(tokens_of(40), 12)


def test_blocks_of_a_gguf_file_stay_quantized(make_tiny_model, make_driver, unpack, tmp_path):
    tiny = make_tiny_model("lfm2", **VARIANTS["lfm2"], hidden_size=96, intermediate_size=64)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, "Q8_0")
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.quantization is not None and spec.quantization.types["model.layers.0.conv.in_proj"] == "Q8_0"
    prompt, params = tokens_of(100), SamplingParams(temperature=0.0, prompt_logprobs=0)

    def logprobs(**options: Any) -> Any:
        driver = make_driver(spec, path, kind="gguf", **options)
        return unpack(driver.step([(driver.start(prompt, params), 100)]).prompt_logprobs[0])[0]

    exact = tiny.logprobs(prompt)[torch.arange(99), prompt[1:]].numpy()
    assert np.abs(logprobs(quantization="none") - exact).mean() < 0.1
    assert np.abs(logprobs(dtype="bfloat16") - exact).mean() < 0.2
