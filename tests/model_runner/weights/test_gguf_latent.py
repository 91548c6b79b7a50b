"""A tiny model with latent attention from safetensors and from GGUF files as llama.cpp's converters wrote them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.weight_files.check_weights import check_gguf_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError

from .test_gguf_architectures import PROMPT, _checkpoint

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "first_k_dense_replace": 2,
}
EXPERTS: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.75,  # also a float32
}
SPARSE: dict[str, Any] = {
    **EXPERTS,
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = [
    ("deepseek_v2", EXPERTS),
    ("deepseek_v3", {**EXPERTS, "n_group": 4, "topk_group": 2}),
    ("glm_moe_dsa", SPARSE),
    ("glm_moe_dsa", {**SPARSE, "indexer_types": ["full", "shared", "full"]}),
]
DENSE = [
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "rope_parameters": YARN}),
]


def write(
    path: Path,
    tiny: Any,
    *,
    split: bool,
    form: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    changes: dict[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    """A file of today (`split`), or of before the conversion split keys and values.

    Args:
        form: of the matrix from latents to keys and values.
        changes: other tensors by their names in the file; an empty one is left out.
    """
    config = tiny.reference.config
    arch = gguf.MODEL_ARCH.GLM_DSA if config.model_type == "glm_moe_dsa" else gguf.MODEL_ARCH.DEEPSEEK2
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_metadata(writer, config, split=split)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] = {}
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, array in _checkpoint(tiny):
        if ".experts." in name:
            head, rest = name.split(".experts.")
            experts.setdefault(f"{head}.experts.{rest.split('.', 1)[1]}", []).append(array)
            continue
        if name.endswith("e_score_correction_bias"):
            tensors[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = array, gguf.GGMLQuantizationType.F32
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if not split or not name.endswith("kv_b_proj.weight"):
            tensors[stored] = array, form if "kv_b" in name else gguf.GGMLQuantizationType.F32
            continue
        by_head = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        tensors[stored.replace("kv_b", "k_b")] = keys.transpose(0, 2, 1), gguf.GGMLQuantizationType.F32
        tensors[stored.replace("kv_b", "v_b")] = values, form
    for name, arrays in experts.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        tensors[stored] = np.stack(arrays), gguf.GGMLQuantizationType.F32
    for name, array in (changes or {}).items():
        tensors[name] = array, gguf.GGMLQuantizationType.F32
    for name, (array, kind) in tensors.items():
        if array.size:
            data = gguf.quants.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, config: Any, *, split: bool) -> None:
    rank, rotary_dim = config.kv_lora_rank, config.qk_rope_head_dim
    key_length = config.qk_nope_head_dim + rotary_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if split else config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(rank + rotary_dim if split else key_length)
    writer.add_value_length(rank if split else config.v_head_dim)
    if split:
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(config.v_head_dim)
    if config.first_k_dense_replace < config.num_hidden_layers:
        is_v3 = config.model_type != "deepseek_v2"
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(bool(is_v3))
        if is_v3:
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "glm_moe_dsa":
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
        kinds = getattr(config, "indexer_types", None)
        if kinds is not None:  # by a later version of the package
            writer.add_array("glm-dsa.attention.indexer.types", [kind == "full" for kind in kinds])
    if config.rope_parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("model_type", "options"), [*DENSE, *MODELS])
def test_a_file_gives_the_logprobs_of_the_folder(
    make_tiny_model, make_driver, unpack, tmp_path, model_type, options, split
):
    tiny = make_tiny_model(model_type, **options)
    path = tmp_path / "model.gguf"
    write(path, tiny, split=split)
    spec = read_gguf_spec(GGUFFile(path))

    found = [
        make_driver(spec, path, kind="gguf").generate([PROMPT], num=8),
        make_driver(tiny.spec, tiny.folder).generate([PROMPT], num=8),
    ]

    assert found[0] == found[1] == [tiny.greedy(PROMPT, 8)]
    if spec.experts is not None:
        assert spec.experts == tiny.spec.experts
    assert spec.latent == tiny.spec.latent and spec.rope_scaling == tiny.spec.rope_scaling
    assert spec.attention.query_scale is not None
    assert math.isclose(spec.score_scale, tiny.spec.score_scale, rel_tol=1e-6)
    assert num_parameters(spec) == num_parameters(tiny.spec)
    check_gguf_weights(GGUFFile(path), spec)


@pytest.mark.parametrize("split", [True, False])
def test_quantized_keys_and_values_are_dequantized(make_tiny_model, make_driver, tmp_path, split):
    tiny = make_tiny_model("deepseek_v2", **LATENT)
    path = tmp_path / "model.gguf"
    write(path, tiny, split=split, form=gguf.GGMLQuantizationType.Q8_0)
    spec = read_gguf_spec(GGUFFile(path))

    outputs = make_driver(spec, path, kind="gguf").generate([PROMPT], num=4)

    check_gguf_weights(GGUFFile(path), spec)
    assert outputs == [tiny.greedy(PROMPT, 4)]


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        ("blk.1.attn_v_b.weight", (0,), "'blk.1.attn_v_b.weight' is missing"),
        (
            "blk.0.attn_k_b.weight",
            (6, 16, 32),
            r"has the shape \[6, 16, 32\], but the metadata asks for \[6, 32, 16\]",
        ),
    ],
)
def test_a_damaged_file_is_refused(make_tiny_model, tmp_path, name, shape, rule):
    path = tmp_path / "model.gguf"
    write(
        path,
        make_tiny_model("deepseek_v2", **LATENT),
        split=True,
        changes={name: np.ones(shape, dtype=np.float32)},
    )
    file = GGUFFile(path)

    with pytest.raises(ConfigError, match=rule):
        check_gguf_weights(file, read_gguf_spec(file))
