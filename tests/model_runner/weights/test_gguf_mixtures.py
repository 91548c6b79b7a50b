"""Mixtures of experts from safetensors and from a GGUF file as llama.cpp's converter writes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.model_runner.kernels.blocks.native_blocks import NativeBlockLinear
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.weight_files.check_weights import check_gguf_weights
from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.structures.families import FAMILIES

from .test_gguf_architectures import PROMPT, _arch_id, _checkpoint, _neighbors

NEIGHBORS = ("llama", "granitemoe", "deepseek")
STACKED = ("gpt-oss", "llama4", "granitemoe", "deepseek", "step35")
ROWS_FIRST = ("deepseek", "step35")
"""Families with stacks that have outputs before inputs."""


def single_experts(
    item: tuple[str, np.ndarray[Any, Any]], arch: str
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The parts of a stack, and of Granite's shared expert, or another tensor as it is."""
    name, array = item
    if name.endswith("input_linear.weight"):
        gate, up = np.split(array, 2, axis=-2)
        stem = name.removesuffix("input_linear.weight")
        if stem.endswith(".shared_mlp."):
            stem = stem.replace(".shared_mlp.", ".mlp.shared_expert.")
            yield from ((f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up))
            return
        for expert in range(len(array)):
            yield f"{stem}experts.{expert}.w1.weight", gate[expert]
            yield f"{stem}experts.{expert}.w3.weight", up[expert]
        return
    head, _, part = name.partition(".experts.")
    if not part:
        yield item
        return
    kind = "bias" if part.endswith("_bias") else "weight"
    if kind == "weight" and arch not in ROWS_FIRST:
        array = array.swapaxes(1, 2)
    for expert, matrix in enumerate(array):
        if part.startswith("down"):
            yield f"{head}.experts.{expert}.down_proj.{kind}", matrix
            continue
        in_turn = arch == "gpt-oss"
        gate, up = (matrix[0::2], matrix[1::2]) if in_turn else np.split(matrix, 2)
        yield f"{head}.experts.{expert}.gate_proj.{kind}", gate
        yield f"{head}.experts.{expert}.up_proj.{kind}", up


def write(path: Path, tiny: Any, arch: str, experts_as: str | None = None) -> None:
    """Names, stacks of experts (in a format), order of rows and keys as llama.cpp's converter has them."""
    config = tiny.reference.config
    if arch == "step35":
        config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, config, arch)
    names = gguf.get_tensor_name_map(_arch_id(arch), config.num_hidden_layers)
    stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
    tensors = _checkpoint(tiny)
    if arch in STACKED:
        tensors = list(itertools.chain(*(single_experts(tensor, arch) for tensor in tensors)))
    for name, array in tensors:
        if ".experts." in name:
            head, _, rest = name.partition(".experts.")
            stacks.setdefault(f"{head}.experts.{rest.partition('.')[2]}", []).append(array)
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "step35" and name.endswith("norm.weight"):
            array = array + 1
        if arch in NEIGHBORS:
            array = _neighbors(name, array, config)
        if name.endswith((".sinks", ".attention_sink_bias")):
            name += ".weight"
        if name.endswith("e_score_correction_bias"):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            array = array.squeeze()
        if name.endswith("shared_expert_gate.weight"):
            array = array.squeeze()
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array)
        )
    for name, arrays in stacks.items():
        form = None
        stack = np.stack(arrays)
        if experts_as is not None and name.endswith(".weight"):
            form = gguf.GGMLQuantizationType[experts_as]
            stack = gguf.quants.quantize(stack, form)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stack, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    if arch == "mimo2":
        _write_mimo(writer, config)
    elif arch == "step35":
        _write_step(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_expert_used_count(config.moe_k if arch == "ernie4_5-moe" else config.num_experts_per_tok)
    writer.add_expert_count(
        config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
    )
    if getattr(config, "sliding_window", None) and arch != "mimo2":
        writer.add_sliding_window(config.sliding_window)
    if arch == "glm4moe":
        writer.add_rope_dimension_count(config.head_dim // 2)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if arch == "deepseek":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(1.0)
    if arch == "minimax-m2":
        writer.add_rope_dimension_count(config.rotary_dim)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "gpt-oss":
        rope = config.rope_parameters
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_expert_shared_feed_forward_length(getattr(config, "shared_intermediate_size", 0))
    if arch == "ernie4_5-moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if arch == "llama4":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        if config.rope_parameters["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", divisors(config.rope_parameters, config.head_dim))
    if arch == "qwen2moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_mimo(writer: gguf.GGUFWriter, config: Any) -> None:
    """The maker counts the tokens before the query's own one; a last block predicts further tokens."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_head_count_kv([(1 + has_window) * config.num_key_value_heads for has_window in windows])
    writer.add_sliding_window(config.sliding_window - 1)
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_rope_dimension_count(int(config.head_dim * 0.334))
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)


def _write_step(writer: gguf.GGUFWriter, config: Any) -> None:
    """The rotating part of heads is not said; the divisors are those of whole heads."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    numbers = config.num_attention_heads, config.num_sliding_attention_heads
    writer.add_head_count([numbers[has_window] for has_window in windows])
    writer.add_head_count_kv([config.num_key_value_heads] * len(windows))
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.share_expert_dim)
    writer.add_expert_weights_scale(config.moe_router_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_swiglu_clamp_exp([limit or 0.0 for limit in config.swiglu_limits])
    writer.add_swiglu_clamp_shexp([limit or 0.0 for limit in config.swiglu_limits_shared])
    of_part = divisors(config.rope_parameters["full_attention"], config.head_dim // 2)
    writer.add_tensor("rope_freqs.weight", np.append(of_part, np.ones_like(of_part)))


def divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Factors of frequencies, as the converter computes them; without a blend where both factors are equal."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns, low = rope["original_max_position_embeddings"] / wavelengths, rope["low_freq_factor"]
    kept = np.clip((turns - low) / max(rope["high_freq_factor"] - low, 1e-9), 0.0, 1.0)
    return np.asarray(1 / ((1 - kept) / rope["factor"] + kept), dtype=np.float32)


def test_experts_of_gpt_oss_keep_the_codes_of_the_file(make_tiny_model, make_driver, unpack, tmp_path):
    """In MXFP4: as 4 bits with biases and the clamped activation, and dequantized."""
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    tiny = make_tiny_model("gpt_oss", **{**FAMILIES["gpt_oss"].options, **sizes})
    path = tmp_path / "tiny.gguf"
    write(path, tiny, "gpt-oss", "MXFP4")
    file = GGUFFile(path)
    spec = read_gguf_spec(file)
    check_gguf_weights(file, spec)
    found, kept = {}, 0
    for quantization in (None, "none"):
        driver = make_driver(spec, path, kind="gguf", dtype="bfloat16", quantization=quantization)
        layers = [layer.mlp.experts for layer in driver.runner.model.layers]
        weights = [one for layer in layers for part in (layer._gate_up, layer._down) for one in part._weights]
        assert all(isinstance(one, NativeBlockLinear) == (quantization is None) for one in weights)
        if quantization is None:
            kept = sum(one.num_bytes for one in weights)
        req = driver.start(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
        found[quantization], _, _ = unpack(driver.step([(req, len(PROMPT))]).prompt_logprobs[0])
    assert np.abs(found[None] - found["none"]).mean() < 0.15
    numbers = 3 * 6 * 3 * 64 * 64
    assert weight_bytes(spec, 2, dequantized=True) - weight_bytes(spec, 2) == 2 * numbers - kept


def test_a_llama_4_without_chunks_is_refused(make_tiny_model, tmp_path):
    options = FAMILIES["llama4 as Scout"].in_file
    path = tmp_path / "tiny.gguf"
    write(path, make_tiny_model("llama4_text", **options), "llama4")
    file = GGUFFile(path)
    file.metadata = {**file.metadata, "llama4.attention.sliding_window": 0}
    with pytest.raises(ConfigError, match="sliding_window is 0, a model without chunks is not supported"):
        read_gguf_spec(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", ["x"] * 4),
        ("attention.head_count_kv", [1.5] * 4),
        ("attention.head_count_kv", [2, 2]),
        ("swiglu_clamp_exp", [[1.0]] * 4),
        ("swiglu_clamp_exp", [0.0, float("nan"), 0.0, 0.0]),
        ("swiglu_clamp_shexp", [0.0, -1.0, 0.0, 0.0]),
    ],
)
def test_damaged_lists_of_step_are_refused_by_name(make_tiny_model, tmp_path, key, value):
    path = tmp_path / "tiny.gguf"
    write(path, make_tiny_model("step3p5", **FAMILIES["step3p5"].options), "step35")
    file = GGUFFile(path)
    read_gguf_spec(file)
    file.metadata = {**file.metadata, f"step35.{key}": value}
    with pytest.raises(ConfigError, match=rf"step35\.{key} is .*expected a "):
        read_gguf_spec(file)


def test_a_file_with_more_active_experts_than_there_are_is_refused(make_tiny_model, tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, make_tiny_model("mixtral", **FAMILIES["mixtral"].options), "llama")
    file = GGUFFile(path)
    file.metadata = {**file.metadata, "llama.expert_used_count": 7}
    with pytest.raises(ConfigError, match="7 experts for each token, but there are only 6"):
        read_gguf_spec(file)
