"""The same tiny model from safetensors and from a GGUF file as llama.cpp's converter writes it, by architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from engine.model_runner.kernels.blocks.native_blocks import NativeBlockLinear
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.kernels.plain import LoopedExperts
from engine.model_runner.weights.gguf import GGUFStore
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.spec.streams_spec import LAYER_TABLE
from engine.models.weight_files.weight_memory import weight_bytes
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.structures.families import FAMILIES

MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
)
"""Those whose files `write` makes."""
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 96, 80)]
MOE = {
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
GEMMA3 = {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16}


def write(
    path: Path,
    tiny: Any,
    arch: str,
    experts_as: Mapping[str, str] | None = None,
    quantized: Mapping[str, str] | None = None,
) -> None:
    """Names, order of rows, offsets of norms and stacks of experts as llama.cpp's converter has them.

    Args:
        experts_as: formats of the stacks of `gate`, `up` and `down`; None: float32.
        quantized: formats of tensors by Hugging Face's names; others are float32.
    """
    config = tiny.reference.config
    if arch == "gemma4":
        config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    names = gguf.get_tensor_name_map(_arch_id(arch), config.num_hidden_layers)
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, array in _checkpoint(tiny):
        if name.endswith("router.scale") or "per_expert_scale" in name:  # as gemma4's converter names them
            part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.scale", array)
            continue
        if ".experts." in name and arch == "gemma4":
            writer.add_tensor(names.get_name(f"{name}.weight", try_suffixes=(".weight",)), array)
            continue
        if ".experts." in name:
            head, rest = name.split(".experts.")
            merged = f"{head}.experts.{rest.split('.', 1)[1]}"
            experts.setdefault(merged, []).append(array)
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.startswith("model.altup_"):
            name = f"model.{name.split('.')[1]}.weight"
            stacks.setdefault(name, []).append(array)
            continue
        if name.endswith(("layer_scalar", "correct_output_scale")):
            name += ".weight"
        if arch == "llama":
            array = _neighbors(name, array, config)
        if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + 1
        form = gguf.GGMLQuantizationType[quantized[name]] if quantized and name in quantized else None
        if form is not None:
            array = gguf.quants.quantize(array, form)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            np.ascontiguousarray(array),
            raw_dtype=form,
        )
    for name, arrays in stacks.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.stack(arrays))
    for name, arrays in experts.items():
        stack = np.stack(arrays)
        part = name.removesuffix("_proj.weight").rpartition(".")[2]
        form = gguf.GGMLQuantizationType[experts_as[part]] if experts_as else None
        if form is not None:
            stack = gguf.quants.quantize(stack, form)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stack, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arch_id(arch: str) -> gguf.MODEL_ARCH:
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)


def _checkpoint(tiny: Any) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors as they are in the safetensors file, experts by their number."""
    from safetensors import safe_open

    def key(name: str) -> list[Any]:
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]

    with safe_open(tiny.folder / "model.safetensors", "np") as file:
        return [(name, file.get_tensor(name)) for name in sorted(file.keys(), key=key)]


def _neighbors(name: str, array: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    if "q_proj" not in name and "k_proj" not in name:
        return array
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    """The keys that llama.cpp's converter (that of llama-cpp-python 0.3.36) writes for them, except the tokenizer's."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(_widths(config))
    writer.add_head_count(config.num_attention_heads)
    if not getattr(config, "attention_k_eq_v", False):
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(2)
    if arch in ("llama", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if arch == "phi3":  # also of models that are not scaled or have no window
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 4096))
        writer.add_sliding_window(config.sliding_window or 0)
    elif getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch in ("gemma3n", "gemma4"):
        _write_streams(writer, config, arch)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        for key, tensor in ((("long_factor"), "rope_factors_long"), ("short_factor", "rope_factors_short")):
            writer.add_tensor(f"{tensor}.weight", np.array(rope[key], dtype=np.float32))


def _widths(config: Any) -> Any:
    """The width of the MLP, or of that of each layer."""
    width = config.intermediate_size
    if not getattr(config, "use_double_wide_mlp", False):
        return width
    first = config.num_hidden_layers - config.num_kv_shared_layers
    return [width * (1 + (layer >= first)) for layer in range(config.num_hidden_layers)]


def _write_streams(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    """The keys of models with inputs of layers."""
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(windows)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if arch == "gemma3n":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        normal = torch.distributions.normal.Normal(0, 1)
        writer.add_activation_sparsity_scale(
            [normal.icdf(torch.tensor(one)).item() for one in config.activation_sparsity_pattern]
        )
        return
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    full = config.per_layer_config[windows.index(False)]
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    if config.attention_k_eq_v:
        numbers = [config.num_key_value_heads if window else full.num_key_value_heads for window in windows]
        writer.add_head_count_kv(numbers)
    turning = full.head_dim // 8  # a quarter of the pairs
    divisors = [1.0] * turning + [1e30] * (full.head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0"])
def test_the_table_of_layers_inputs_stays_in_blocks(make_tiny_model, make_driver, unpack, tmp_path, form):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    tiny = make_tiny_model("gemma4_text", **FAMILIES["gemma4, shared keys, wide MLPs"].options)
    path = tmp_path / "tiny.gguf"
    write(path, tiny, "gemma4", quantized={f"{LAYER_TABLE}.weight": form})
    spec = read_gguf_spec(GGUFFile(path))
    found, rows = {}, {}
    for quantization in (None, "none"):
        driver = make_driver(spec, path, kind="gguf", dtype="bfloat16", quantization=quantization)
        table = driver.runner.model.inputs._table
        assert isinstance(getattr(table._take.func, "__self__", None), NativeBlockLinear) == (
            quantization is None
        )
        rows[quantization] = table(torch.arange(96))
        req = driver.start(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
        found[quantization], _, _ = unpack(driver.step([(req, len(PROMPT))]).prompt_logprobs[0])
    torch.testing.assert_close(rows[None], rows["none"], rtol=2**-7, atol=1e-3)
    assert np.abs(found[None] - found["none"]).mean() < 0.05

    num_bytes = {"Q8_0": 96 * 34, "Q4_0": 96 * 18}[form]
    assert weight_bytes(spec, 2, dequantized=True) - weight_bytes(spec, 2) == 2 * 96 * 32 - num_bytes


STACKS = {
    "Q4_0": {"gate": "Q4_0", "up": "Q4_0", "down": "Q4_0"},
    "Q8_0": {"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"},
    "MXFP4": {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4"},
    "several": {"gate": "Q4_0", "up": "Q8_0", "down": "Q4_1"},
}


@pytest.fixture
def write_mixture(make_tiny_model: Any, tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Of two layers with four experts each, 64 x 32."""
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))

    def make(stacks: Mapping[str, str]) -> Path:
        tiny = make_tiny_model(
            "qwen3_moe", **{**MOE, "head_dim": 16, "hidden_size": 64, "moe_intermediate_size": 32}
        )
        path = tmp_path / "tiny.gguf"
        write(path, tiny, "qwen3moe", stacks)
        return path

    return make


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("stacks", STACKS)
def test_experts_keep_the_numbers_of_the_file(write_mixture, make_driver, unpack, stacks):
    path = write_mixture(STACKS[stacks])
    spec = read_gguf_spec(GGUFFile(path))
    found, num_bytes = {}, 0
    for quantization in (None, "none"):
        driver = make_driver(spec, path, kind="gguf", dtype="bfloat16", quantization=quantization)
        layers = [layer.mlp.experts for layer in driver.runner.model.layers]
        kept = [one for layer in layers for part in (layer._gate_up, layer._down) for one in part._weights]
        assert all(isinstance(one, NativeBlockLinear) == (quantization is None) for one in kept)
        if quantization is None:
            num_bytes = sum(one.num_bytes for one in kept)
        req = driver.start(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
        found[quantization], _, _ = unpack(driver.step([(req, len(PROMPT))]).prompt_logprobs[0])
    # Activations are rounded to 8 bits, too, which now and then sends a token to another expert.
    assert np.abs(found[None] - found["none"]).mean() < 0.1

    saved = weight_bytes(spec, 2, dequantized=True) - weight_bytes(spec, 2)
    assert saved == 2 * (2 * 4 * 3 * 64 * 32) - num_bytes


def test_experts_that_cannot_be_one_product_are_looped_over_and_said(write_mixture, make_driver, caplog):
    path = write_mixture({"gate": "F32", "up": "Q8_0", "down": "Q8_0"})
    spec = read_gguf_spec(GGUFFile(path))
    driver = make_driver(spec, path, kind="gguf", dtype="bfloat16")
    assert isinstance(driver.runner.model.layers[0].mlp.experts, LoopedExperts)
    assert caplog.text.count("experts are computed one after the other") == 1
    with pytest.raises(ConfigError, match="a layer's experts are not multiplied by the engine's own kernel"):
        make_driver(spec, path, kind="gguf", dtype="bfloat16", deterministic=True)
    make_driver(spec, path, kind="gguf", dtype="bfloat16", deterministic=True, quantization="none")


def test_a_stack_with_another_number_of_experts_is_refused(write_mixture):
    path = write_mixture(STACKS["Q4_0"])
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.experts is not None
    spec = msgspec.structs.replace(spec, experts=msgspec.structs.replace(spec.experts, num_experts=5))
    with pytest.raises(ConfigError, match="ffn_gate_exps.weight holds 4 experts, .* says 5"):
        GGUFStore(path, spec)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gemma3.final_logit_softcapping", -30.0, "final_logit_softcapping is -30.0, expected a number"),
        (
            "gemma3.attention.sliding_window_pattern",
            0,
            "sliding_window_pattern is 0, expected a whole number",
        ),
    ],
)
def test_what_a_gemma_cannot_have_is_refused(make_tiny_model, tmp_path, key, value, message):
    tiny = make_tiny_model("gemma3_text", **GEMMA3)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    _write_metadata(writer, tiny.reference.config, "gemma3")
    (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((96, 48), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=message):
        read_gguf_spec(GGUFFile(path))
