"""Tiny random EAGLE-3 heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, DRAFTED = 32, 4, 2, 16, 20


def write_head(folder: Path, vocab_size: int, *, layer: str = "midlayer", **changes: Any) -> Path:
    """A random head over every fourth token of a target with hidden size 32, without an embedding."""
    folder.mkdir()
    own_embedding = changes.pop("embedding", False)
    draft_ids = changes.pop("draft_ids", torch.arange(DRAFTED) * 4 + 2)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "draft_vocab_size": len(draft_ids),
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        scale = 1.0 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        return torch.randn(*shape, generator=generator) * scale

    width = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    tensors = {
        f"{layer}.self_attn.{part}_proj.weight": random(rows, 2 * HIDDEN) for part, rows in width.items()
    }
    tensors |= {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        f"{layer}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": random(48, HIDDEN),
        f"{layer}.mlp.up_proj.weight": random(48, HIDDEN),
        f"{layer}.mlp.down_proj.weight": random(HIDDEN, 48),
        f"{layer}.input_layernorm.weight": random(HIDDEN),
        f"{layer}.hidden_norm.weight": random(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": random(len(draft_ids), HIDDEN),
        "d2t": draft_ids - torch.arange(len(draft_ids)),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool),
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = random(vocab_size, HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    return folder
