"""Layers of Mamba 2 (Granite 4) against transformers: prompts, decodes, chunks, states of requests, and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.hf.hf_config import read_hf_spec
from engine.runtime.sampling_params import SamplingParams

from .families import FAMILIES, MAMBA, MAMBA_EXPERTS
from .text_checks import check_gguf_file, tokens_of

if TYPE_CHECKING:
    from ..conftest import TinyModel

DENSE, SPARSE = (
    FAMILIES[name].options for name in ("mamba2 dense, no rotary", "mamba2 experts, groups, rotary, biases")
)


def test_time_steps_have_bounds(make_tiny_model, make_driver, unpack):
    """In prompts, as in transformers; it has none for decodes."""
    tiny = make_tiny_model("granitemoehybrid", **DENSE, time_step_limit=(0.5, 1.0))
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = tokens_of(60)
    req = driver.start(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    found = [unpack(driver.step([(req, chunk)]).prompt_logprobs[0])[0] for chunk in (13, 1, 46)]
    expected = tiny.logprobs(prompt)[torch.arange(59), prompt[1:]]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-4)


@pytest.mark.parametrize("options", [DENSE, SPARSE], ids=["dense", "experts"])
def test_states_take_the_sizes_of_the_heads(make_tiny_model, options):
    spec = make_tiny_model("granitemoehybrid", **options).spec
    groups = options.get("mamba_n_groups", 1)
    conv = (options.get("mamba_d_conv", 4) - 1) * (96 + 2 * groups * options["mamba_d_state"])
    assert spec.state.slot_bytes(2) == 3 * (2 * conv + 4 * 96 * options["mamba_d_state"])


def test_layers_have_two_names_in_published_files(make_tiny_model):
    tiny = make_tiny_model("granitemoehybrid", **DENSE)
    path = tiny.folder / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    config["layers_block_type"] = ["mamba", "mamba", "attention", "mamba"]
    path.write_text(json.dumps(config))
    assert read_hf_spec(tiny.folder) == tiny.spec


def write_gguf(path: Path, tiny: TinyModel, kind_name: str = "F32") -> None:
    """As llama.cpp's converter (conversion/granite.py, conversion/mamba.py) writes a hybrid model."""
    import gguf

    config, kind = tiny.reference.config, gguf.GGMLQuantizationType[kind_name]
    arch = gguf.MODEL_ARCH.GRANITE_HYBRID
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    attends = [one == "full_attention" for one in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * one for one in attends])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok if config.num_local_experts else 0)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in load_file(tiny.folder / "model.safetensors").items():
        for stored, part in _as_stored(name, tensor, config):
            array = np.ascontiguousarray(part.float().numpy())
            target = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            assert target is not None, stored
            if array.shape[-1] % 32 or min(array.shape) < 4 or "ssm_norm" in target:
                writer.add_tensor(target, array)
            else:
                writer.add_tensor(target, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_stored(name: str, tensor: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Its tensors before they are renamed."""
    layer = name.partition(".mamba.")[0]
    if name.endswith("A_log"):
        yield name, -tensor.exp()[:, None]
    elif name.endswith("mamba.D"):
        yield name, tensor[:, None]
    elif name.endswith("mamba.dt_bias"):
        yield f"{layer}.mamba.dt_proj.bias", tensor
    elif name.endswith("mamba.norm.weight"):
        yield name, tensor.view(config.mamba_n_groups, -1)
    elif name.endswith("conv1d.weight"):
        yield name, tensor.squeeze()
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = tensor.view(heads, 2, -1, tensor.shape[1])
        yield name, halves.transpose(1, 2).reshape(tensor.shape)
    elif name.endswith("input_linear.weight"):
        stem = name.removesuffix(".input_linear.weight")
        end = ""
        if stem.endswith("shared_mlp"):
            stem = stem.replace("shared_mlp", "mlp.shared_expert" if config.num_local_experts else "mlp")
        else:
            stem, end = stem.replace("block_sparse_moe", "mlp.experts"), ""
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"{stem}.{part}_proj.weight{end}", half
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
    else:
        yield name, tensor


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**DENSE, "mamba_n_groups": 2}, marks=pytest.mark.slow),
        {**MAMBA, **MAMBA_EXPERTS, "position_embedding_type": "rope", "mamba_n_groups": 2},
    ],
    ids=["dense", "experts, rotary"],
)
def test_a_gguf_file_is_the_same_model(make_tiny_model, make_driver, tmp_path, options):
    tiny = make_tiny_model("granitemoehybrid", **options)
    write_gguf(tmp_path / "tiny.gguf", tiny)
    check_gguf_file(tiny, tmp_path / "tiny.gguf", make_driver)


def test_blocks_of_a_gguf_file_stay_quantized(make_tiny_model, make_driver, unpack, tmp_path):
    tiny = make_tiny_model("granitemoehybrid", **DENSE, hidden_size=64)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, "Q8_0")
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.quantization is not None
    assert spec.quantization.types["model.layers.0.mamba.in_proj"] == "Q8_0"
    prompt, params = tokens_of(100), SamplingParams(temperature=0.0, prompt_logprobs=0)

    def logprobs(**kinds: Any) -> Any:
        driver = make_driver(spec, path, kind="gguf", **kinds)
        return unpack(driver.step([(driver.start(prompt, params), 100)]).prompt_logprobs[0])[0]

    exact = tiny.logprobs(prompt)[torch.arange(99), prompt[1:]].numpy()
    plain, kept = logprobs(quantization="none"), logprobs(dtype="bfloat16")
    assert np.corrcoef(plain, exact)[0, 1] > 0.99 and np.corrcoef(kept, plain)[0, 1] > 0.99
