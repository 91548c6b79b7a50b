"""Derived figures of ModelSpec, against a real model of the same configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.weight_memory import num_parameters, weight_bytes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_number_of_parameters(tmp_path: Path, tied: bool, bias: bool) -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    spec = read_hf_spec(tmp_path)

    assert num_parameters(spec) == sum(p.numel() for p in model.parameters())
    assert weight_bytes(spec, 2) == 2 * num_parameters(spec)
    # Keys and values, 3 layers, 1 head of 16, 4 bytes each.
    assert spec.kv_bytes_per_token(4) == 2 * 3 * 1 * 16 * 4
