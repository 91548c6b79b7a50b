"""Adapters on tiny models against peft, through the real runner: chunks of prompts, then decodes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.models.adapters.read_adapter import read_adapter
from tests.model_runner.conftest import SeeingExecutor
from tests.model_runner.structures.families import NEMOTRON

from .peft_adapters import ALL_LINEAR, PHI3_LINEAR, make_adapter

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}
DELTA_LINEAR = ["in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj_a", "in_proj_ba", "out_proj"]
DELTA_NETS: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
}
MAMBA_LINEAR = ["in_proj", "out_proj", "input_linear", "output_linear"]
STATE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {**DELTA_NETS, **EXPERTS}),
    "qwen3_5": ("qwen3_5_text", DELTA_NETS),
    "granite": ("granitemoehybrid", MAMBA),
    "nemotron_h": ("nemotron_h", NEMOTRON),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 9},
    "patterns": {
        "rank_pattern": {"o_proj": 7, r"layers\.0\.mlp\.down_proj": 2},
        "alpha_pattern": {"o_proj": 3, "down_proj": 11},
        "layers_to_transform": [0],
    },
    "head": {"target_modules": ["o_proj", "lm_head"]},
    "embed": {"target_modules": ["embed_tokens", "o_proj"]},
}
TARGETS = {*ALL_LINEAR, *PHI3_LINEAR, *DELTA_LINEAR, *MAMBA_LINEAR, "embed_tokens", "lm_head"}
CASES = [*itertools.product(MODELS, KINDS), *((name, "plain") for name in STATE_MODELS)]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_those_of_peft(make_tiny_model, make_driver, tmp_path, name, kind):
    model_type, options = (MODELS | STATE_MODELS)[name]
    tiny = make_tiny_model(model_type, **options)
    linear = PHI3_LINEAR if name == "phi3" else ALL_LINEAR
    if name in STATE_MODELS:
        linear = [*(ALL_LINEAR[:4] if name == "qwen3_next" else ALL_LINEAR), *DELTA_LINEAR]
    if name == "nemotron_h":
        linear = [*ALL_LINEAR[:4], "up_proj", "down_proj", "in_proj"]
    if name == "granite":
        linear = [*ALL_LINEAR[:4], *MAMBA_LINEAR]
    if name == "qwen3_moe":
        linear = ALL_LINEAR[:4]
    adapter = make_adapter(
        tiny.reference, tmp_path / "adapter", **{"target_modules": linear, **KINDS[kind], "seed": 3}
    )
    spec = read_adapter(adapter.folder, "one", tiny.spec)
    driver = make_driver(tiny.spec, tiny.folder, adapter_slots=SlotSizes(2, 16, TARGETS))
    driver.runner.adapters.store.read(5, spec)
    seen = SeeingExecutor(driver)

    prompt = [5, 60, 33, 7, 71, 12, 44, 8, 90]
    with_adapter, base = driver.start(prompt, adapter_slot=2), driver.start(prompt[:3])
    driver.step([(with_adapter, 4), (base, 3)], adapter_loads=[(2, 5)])
    driver.step([(with_adapter, 5), (base, 1)])
    for _ in range(3):
        driver.step([(with_adapter, 1), (base, 1)])

    wanted = adapter.logits(with_adapter.tokens)[len(prompt) - 1 : -1]
    found = torch.stack([seen.logits[1][0], *(logits[0] for logits in seen.logits[2:])])
    assert_equal(found, wanted)
    assert (wanted - tiny_logits(tiny, with_adapter.tokens)[len(prompt) - 1 : -1]).abs().max() > 0.01
    assert_equal(
        torch.stack([seen.logits[0][0], *(logits[1] for logits in seen.logits[1:])]),
        tiny_logits(tiny, base.tokens)[2:-1],
    )


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Up to the rounding of float32."""
    assert (found - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))


@torch.inference_mode()
def tiny_logits(tiny: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = tiny.reference(torch.tensor([tokens])).logits[0].float()
    return logits
