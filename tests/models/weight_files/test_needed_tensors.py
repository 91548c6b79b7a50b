"""The tensors that a model needs have all of its parameters, and each name once."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import structs

from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.layer_form import FOUR_NORMS, QK_NORMS, Biases
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.needed_tensors import needed_modules
from engine.models.weight_files.weight_memory import num_parameters

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS = ExpertsSpec(num_experts=5, intermediate_size=24, routing=Routing(num_active=2), dense_layers=(1,))


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, 38_880),
        ({"tie_word_embeddings": True}, 35_680),
        ({"biases": Biases(qkv=True, attention_out=True, mlp=True)}, 39_744),
        ({"model_type": "qwen3", "form": QK_NORMS}, 38_976),
        ({"model_type": "qwen3_moe", "form": QK_NORMS, "experts": EXPERTS}, 53_120),
        ({"model_type": "gemma3_text", "form": structs.replace(FOUR_NORMS, qk_norm=True)}, 39_168),
        ({"model_type": "phi3"}, 38_880),
    ],
    ids=str,
)
def test_they_have_all_parameters(changes: dict[str, Any], weights: int) -> None:
    spec = ModelSpec(**LLAMA | changes)
    modules = list(needed_modules(spec))
    assert len({module.name for module in modules}) == len(modules)
    biases = sum(module.shape[0] for module in modules if module.has_bias)
    assert sum(math.prod(module.shape) for module in modules) + biases == weights == num_parameters(spec)


def test_linear_layers_are_those_of_the_layers() -> None:
    linear = [
        module.name for module in needed_modules(ModelSpec(**LLAMA | {"num_layers": 1})) if module.is_linear
    ]
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert linear == [f"model.layers.0.{part}" for part in parts]
