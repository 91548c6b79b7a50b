"""Qwen3-Next and Qwen3.5 against transformers: states of gated delta nets beside keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.kernels.plain import OneDNNLinear, PlainLinear
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.runtime.sampling_params import SamplingParams

from ..kernels.cpu.test_native_blocks import quantized
from .families import FAMILIES
from .text_checks import check_gguf_file, tokens_of

if TYPE_CHECKING:
    from ..conftest import TinyModel

families = pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])


@families
def test_states_take_the_sizes_of_the_heads(make_tiny_model, name):
    options = FAMILIES[name].options
    spec = make_tiny_model(name, **options).spec
    heads, keys = options["linear_num_value_heads"], options["linear_num_key_heads"]
    conv = (options.get("linear_conv_kernel_dim", 4) - 1) * (2 * 16 * keys + 24 * heads)
    assert spec.state.slot_bytes(2) == 3 * (2 * conv + 4 * heads * 16 * 24)


def test_layers_that_predict_further_tokens_are_not_read(make_tiny_model, make_driver):
    tiny = make_tiny_model("qwen3_next", **FAMILIES["qwen3_next"].options)
    path = tiny.folder / "model.safetensors"
    further = {"mtp.fc.weight": torch.zeros(48, 96), "mtp.layers.0.mlp.gate.weight": torch.zeros(8, 48)}
    save_file({**load_file(path), **further}, path)
    check_folder_weights(tiny.folder, tiny.spec)
    prompt = tokens_of(9)
    assert make_driver(tiny.spec, tiny.folder).generate([prompt], num=3) == [tiny.greedy(prompt, 3)]


def write_gguf(
    path: Path, tiny: TinyModel, kind_name: str = "F32", nextn: Mapping[str, torch.Tensor] | None = None
) -> None:
    """As llama.cpp's converter (conversion/qwen.py) writes them, with a layer that predicts further tokens.

    `nextn`: the tensors of this layer beside its block, which is the last one of the model; None: a part of one.
    """
    import gguf

    config, spec = tiny.reference.config, tiny.spec
    arch = {
        "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
        "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
        "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    }[spec.model_type]
    further = 0 if spec.model_type == "qwen3_next" and nextn is None else 1
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + further)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(spec.rotary_dim or spec.head_dim)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    if further:
        writer.add_nextn_predict_layers(further)
    if spec.model_type != "qwen3_5_moe_text":
        writer.add_feed_forward_length(config.intermediate_size)
    if spec.experts is not None:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers + further)
    kind = gguf.GGMLQuantizationType[kind_name]

    def add(name: str, tensor: torch.Tensor) -> None:
        array = np.ascontiguousarray(tensor.float().numpy())
        if array.ndim == 1 or "conv1d" in name or array.shape[-1] % 32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)

    for name, tensor in tiny.reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for stored, part in _as_stored(name, tensor.squeeze(), config):
            target = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            assert target is not None, stored
            add(target, part)
    for name, tensor in (nextn or {"enorm": torch.ones(config.hidden_size)}).items() if further else ():
        add(f"blk.{config.num_hidden_layers}.nextn.{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_stored(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Its tensors before they are renamed."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim, shared = config.linear_key_head_dim, config.linear_value_head_dim, values // keys

    def tiled(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Value heads by their number within a key head, of Qwen3.5 only."""
        if config.model_type == "qwen3_next":
            return x
        split = torch.unflatten(x, dim, (keys, shared, -1))
        return split.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if name.endswith("A_log"):
        yield name, tiled(-tensor.exp())
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tiled(tensor)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, tensor + 1
    elif "conv1d" in name or "in_proj_qkv." in name:
        yield name, torch.cat((tensor[: 2 * keys * key_dim], tiled(tensor[2 * keys * key_dim :])))
    elif "in_proj_qkvz" in name:
        rows = (key_dim, key_dim, shared * value_dim, shared * value_dim)
        *qkv, z = (part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split(rows, dim=1))
        yield name.replace("qkvz", "qkv"), torch.cat(qkv)
        yield name.replace("qkvz", "z"), z
    elif name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")):
        yield name, tiled(tensor)
    elif "linear_attn.out_proj" in name:
        yield name, tiled(tensor, dim=1)
    elif name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


IN_FILES: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_value_head_dim": 32,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "attention_bias": False,
    "linear_num_key_heads": 2,
}


@pytest.mark.fast_cases(1)
@families
def test_a_gguf_file_is_the_same_model(make_tiny_model, make_driver, tmp_path, name):
    options = FAMILIES[name].options
    changes = {
        field: value
        for field, value in IN_FILES.items()
        if field in options or field == "linear_num_key_heads"
    }
    tiny = make_tiny_model(name, **(options | changes))
    write_gguf(tmp_path / "tiny.gguf", tiny)
    check_gguf_file(tiny, tmp_path / "tiny.gguf", make_driver)


def round_inputs(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Make the linear layers of a kind round their inputs to 8 bits, as kernels of blocks do."""
    multiply = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda self, x, bias=None: multiply(self, quantized(x).to(x.dtype), bias)
    )


def test_blocks_of_a_gguf_file_stay_quantized(make_tiny_model, make_driver, unpack, tmp_path, monkeypatch):
    options = FAMILIES["qwen3_5_text"].options
    sizes = {"hidden_size": 96, "intermediate_size": 64, "layer_types": IN_FILES["layer_types"]}
    heads = {"linear_num_key_heads": 2, "linear_value_head_dim": 32, "num_attention_heads": 6}
    # Of the seeds 0 to 7 the one whose logits the rounding to blocks changes least: 0.9989 (others: 0.985 to 0.996).
    tiny = make_tiny_model("qwen3_5_text", **(options | sizes | heads | {"seed": 1}))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, "Q8_0")
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.quantization is not None
    assert spec.quantization.types["model.layers.0.linear_attn.out_proj"] == "Q8_0"
    prompt, params = tokens_of(100), SamplingParams(temperature=0.0, prompt_logprobs=0)

    def logprobs(**kinds: Any) -> Any:
        driver = make_driver(spec, path, kind="gguf", **kinds)
        return unpack(driver.step([(driver.start(prompt, params), 100)]).prompt_logprobs[0])[0]

    exact = tiny.logprobs(prompt)[torch.arange(99), prompt[1:]].numpy()
    plain, kept = logprobs(quantization="none"), logprobs(dtype="bfloat16")
    assert np.corrcoef(plain, exact)[0, 1] > 0.99
    # Kernels of blocks round the inputs, too, to 8 bits: 0.9986 from `plain`, 0.9981 from what does the same.
    for form in (PlainLinear, OneDNNLinear):
        round_inputs(monkeypatch, form)
    assert np.corrcoef(kept, logprobs(quantization="none"))[0, 1] > 0.99
