"""Nemotron-H, whose layers are single blocks, against transformers: prompts, decodes, chunks, memory, GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights

from .families import NEMOTRON, NEMOTRON_EXPERTS
from .text_checks import check_gguf_file, tokens_of

if TYPE_CHECKING:
    from ..conftest import TinyModel


variants = pytest.mark.parametrize("options", [NEMOTRON, NEMOTRON_EXPERTS], ids=["dense", "experts"])


@variants
def test_only_attention_has_a_cache_and_only_mamba_a_state(make_tiny_model, options):
    spec = make_tiny_model("nemotron_h", **options).spec
    assert spec.num_kv_layers == 1 and spec.state.num_layers == 2


def test_older_files_are_the_same_model(make_tiny_model, make_driver):
    """With a pattern of letters, older names of fields and tensors, and layers that predict further tokens."""
    tiny = make_tiny_model("nemotron_h", **NEMOTRON)
    path, weights = tiny.folder / "config.json", tiny.folder / "model.safetensors"
    config = json.loads(path.read_text())
    for name in ("layers_block_type", "layer_types", "n_groups"):
        config.pop(name, None)
    path.write_text(json.dumps(config | {"hybrid_override_pattern": "M-*-M", "mamba_n_groups": 2}))
    body = {
        "backbone." + name.removeprefix("model.").removeprefix("backbone."): tensor
        for name, tensor in load_file(weights).items()
        if not name.startswith("lm_head")
    }
    head = {"lm_head.weight": tiny.reference.lm_head.weight.detach()}
    save_file(body | head | {"mtp.layers.0.norm.weight": torch.ones(48)}, weights)
    assert read_hf_spec(tiny.folder) == tiny.spec
    check_folder_weights(tiny.folder, tiny.spec)
    prompt = tokens_of(9)
    assert make_driver(tiny.spec, tiny.folder).generate([prompt], num=3) == [tiny.greedy(prompt, 3)]


def write_gguf(path: Path, tiny: TinyModel) -> None:
    """As llama.cpp's converter (conversion/nemotron.py) writes a model."""
    import gguf

    config, arch, sparse = tiny.reference.config, gguf.MODEL_ARCH.NEMOTRON_H, tiny.spec.experts is not None
    kinds = config.layers_block_type
    inner = config.intermediate_size
    if sparse:
        arch, inner = gguf.MODEL_ARCH.NEMOTRON_H_MOE, config.moe_intermediate_size
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(kinds))
    writer.add_feed_forward_length([inner * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_eos_token_id(2)
    if sparse:
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)
    names = gguf.get_tensor_name_map(arch, len(kinds))
    for name, tensor in tiny.reference.state_dict().items():
        name = name.replace("model.", "backbone.", 1)
        if name.endswith("A_log"):
            tensor = -tensor.exp()[:, None]
        elif name.endswith("mixer.D"):
            tensor = tensor[:, None]
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif name.endswith("mixer.norm.weight"):
            tensor = tensor.view(config.n_groups, -1)
        elif ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.") + ".weight"
        elif name.endswith("e_score_correction_bias"):
            name = name.replace("correction_bias", "correction.bias")
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(tensor.squeeze(1) if "conv1d.w" in name else tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(NEMOTRON, marks=pytest.mark.slow),
        {
            **NEMOTRON_EXPERTS,
            "layers_block_type": NEMOTRON_EXPERTS["layers_block_type"][:3],
            "num_hidden_layers": 3,
            "n_group": 1,
        },
        pytest.param(
            {
                **NEMOTRON_EXPERTS,
                "layers_block_type": NEMOTRON_EXPERTS["layers_block_type"][:3],
                "num_hidden_layers": 3,
                "n_group": 1,
                "moe_latent_size": 20,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dense", "experts", "experts of latents"],
)
def test_a_gguf_file_is_the_same_model(make_tiny_model, make_driver, tmp_path, options):
    tiny = make_tiny_model("nemotron_h", **options)
    write_gguf(tmp_path / "tiny.gguf", tiny)
    check_gguf_file(tiny, tmp_path / "tiny.gguf", make_driver)
