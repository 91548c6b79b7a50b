"""Whether the layer that predicts further tokens is used, and what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from engine.launch.resolve.mtp import with_mtp
from engine.launch.resolve.prepare import Prepared, prepare
from engine.models.hf.hf_config import read_hf_spec
from engine.models.source import ModelSource
from engine.models.weight_files.needed_tensors import is_unused, needed_modules
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.errors import ConfigError

QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder without weights."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def prepared(folder: Path, **settings: Any) -> Prepared:
    return prepare(merge(from_arguments({"model": folder, "load_format": "dummy"} | settings)))


def test_its_modules_and_its_memory_are_those_of_a_layer(folder):
    plain, used = (prepared(folder, speculative=name).spec for name in ("suffix", "mtp"))
    names = {module.name for module in needed_modules(used)} - {
        module.name for module in needed_modules(plain)
    }
    assert {name for name in names if not name.startswith("mtp.layers.0.")} == {
        "mtp.fc",
        "mtp.norm",
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
    }
    assert {"mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.down_proj"} < names
    assert is_unused(plain, "mtp.fc.weight") and not is_unused(used, "mtp.fc.weight")
    layer_bytes, feature_bytes = 2 * 2 * 16 * 2, -(-(64 * 4 + 8) // 16)
    assert used.kv_bytes_per_token(2) == plain.kv_bytes_per_token(2) + layer_bytes + feature_bytes


def test_auto_takes_it_and_says_why(folder):
    found = prepared(folder, speculative="auto")
    assert found.config.scheduler.speculative == "mtp"
    assert found.notes["speculative"] == "the files have a layer that predicts further tokens"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 2}, "pp is 2, and stages need several steps in flight"),
        ({"model_impl": "transformers"}, "transformers' code computes the model"),
    ],
)
def test_what_is_against_it(folder, settings, message):
    spec = read_hf_spec(folder)
    config = merge(from_arguments({"model": folder, "speculative": "mtp", **settings})).config
    with pytest.raises(ConfigError, match=f"speculative is mtp, but {message}"):
        with_mtp(config, ModelSource("hf", str(folder), "test"), spec)


def test_a_model_without_it_is_refused(tiny_model):
    with pytest.raises(
        ConfigError, match="files of this llama model have no layer that predicts further tokens"
    ):
        prepared(tiny_model, speculative="mtp")


@pytest.mark.parametrize("prefix", ["", "model.language_model."])
def test_a_multimodal_folder_has_it_too(tmp_path, prefix):
    """Qwen3.5 is published so."""
    text = {**QWEN, "layer_types": ["full_attention"] * 4}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text, "vision_config": {}}))
    spec = read_hf_spec(tmp_path)
    assert spec.mtp is not None
    used = replace(spec, mtp=replace(spec.mtp, is_used=True))
    tensors = {f"{module.name}.{module.part}": torch.zeros(module.shape) for module in needed_modules(used)}
    stored = {name.replace("model.", prefix, 1) if prefix else name: x for name, x in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    assert prepared(tmp_path, speculative="auto", load_format="auto").config.scheduler.speculative == "mtp"
    del stored["mtp.fc.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    assert prepared(tmp_path, speculative="auto", load_format="auto").config.scheduler.speculative == "suffix"
    stored["mtp.fc.weight"] = torch.zeros(64, 64)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="mtp.fc.weight"):
        prepared(tmp_path, speculative="mtp", load_format="auto")
