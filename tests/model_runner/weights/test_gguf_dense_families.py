"""GGUF files of dense families as llama.cpp's converter writes them, and what of them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.weight_files.check_weights import check_gguf_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from tests.model_runner.structures.families import FAMILIES

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 96, 80)]


NEIGHBORS = ("smollm3", "mistral3", "granite", "xverse", "internlm2")
"""Their rows of q and k are stored with rotary pairs side by side."""


def write(path: Path, tiny: Any, arch: str, *, fused_qkv: bool = False) -> None:
    """Names, order of rows and keys as llama.cpp's converter has them."""
    config = tiny.reference.config
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {name: tensor.float().numpy() for name, tensor in tiny.reference.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if arch in NEIGHBORS:
        tensors = {name: _neighbors(name, array, config) for name, array in tensors.items()}
    for name, array in _with_fused_qkv(tensors).items() if fused_qkv else tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        stored = stored or name.replace("model.layers.", "blk.").replace("self_attn.qkv_proj", "attn_qkv")
        writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _neighbors(name: str, array: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    if "q_proj" not in name and "k_proj" not in name:
        return array
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _with_fused_qkv(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    fused = {}
    for name, array in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            fused[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            fused[name] = array
    return fused


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        eps = config.norm_epsilon if arch == "starcoder2" else config.layer_norm_eps
        writer.add_layer_norm_eps(eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(2)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch in ("mistral3", "glm4", "seed_oss", "ernie4_5"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("glm4", "chatglm", "stablelm"):
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if config.model_type in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def test_queries_keys_and_values_can_be_one_matrix(make_tiny_model, make_driver, unpack, tmp_path):
    tiny = make_tiny_model("glm", **FAMILIES["glm"].in_file)
    path = tmp_path / "tiny.gguf"
    write(path, tiny, "chatglm", fused_qkv=True)

    file = GGUFFile(path)
    spec = read_gguf_spec(file)
    check_gguf_weights(file, spec)
    driver = make_driver(spec, path, kind="gguf")

    assert spec.model_type == "glm"
    assert num_parameters(spec) == num_parameters(tiny.spec)
    req = driver.start(PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
    token, _, _ = unpack(driver.step([(req, len(PROMPT))]).prompt_logprobs[0])
    expected = tiny.logprobs(PROMPT)[torch.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(token, expected, atol=3e-4)


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("cohere2", "cohere2.logit_scale", 0.0, "logit_scale is 0.0, expected a number"),
        (
            "olmo3 yarn in full layers",
            "olmo2.attention.sliding_window_pattern",
            np.array([True]),
            "expected a truth value for each of 5",
        ),
        ("ministral3", "mistral3.attention.scale", 0.5, "another scale of the scores is not supported"),
        ("smollm3", "smollm3.expert_count", 4, "expert_count is 4, experts are not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(make_tiny_model, tmp_path, variant, key, value, message):
    row = FAMILIES[variant]
    assert row.gguf is not None
    path = tmp_path / "tiny.gguf"
    write(path, make_tiny_model(row.model_type, **row.in_file), row.gguf[0])
    file = GGUFFile(path)
    file.metadata = {**file.metadata, key: value}
    with pytest.raises(ConfigError, match=message):
        read_gguf_spec(file)


def test_a_granite_that_is_marked_as_not_finetuned_has_no_rotary(make_tiny_model, tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, make_tiny_model("granite", **FAMILIES["granite"].options), "granite")
    file = GGUFFile(path)
    assert read_gguf_spec(file).rope_layers == ()
    file.metadata = {**file.metadata, "granite.rope.scaling.finetuned": False}
    assert read_gguf_spec(file).rope_layers == (False, False)
