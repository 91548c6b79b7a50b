"""Experts that are stored as one tensor per layer, in both layouts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.model_runner.weights.safetensors import SafetensorsStore
from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.layer_form import QK_NORMS
from engine.models.spec.model_spec import ModelSpec

NUM, INNER, SIZE = 3, 4, 6
SPEC = ModelSpec(
    model_type="qwen3_moe",
    vocab_size=8,
    hidden_size=SIZE,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=16,
    tie_word_embeddings=True,
    torch_dtype="float32",
    form=QK_NORMS,
    experts=ExpertsSpec(
        num_experts=NUM, intermediate_size=INNER, routing=Routing(num_active=1), dense_layers=(1,)
    ),
)
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_has_its_part(tmp_path: Path, transposed: bool, dtype: torch.dtype) -> None:
    gate_up, down = numbers(NUM, 2 * INNER, SIZE).to(dtype), numbers(NUM, SIZE, INNER).to(dtype)
    stored = {GATE_UP: gate_up, DOWN: down, "model.norm.weight": torch.ones(SIZE)}
    if transposed:
        stored |= {name: stored[name].transpose(1, 2).contiguous() for name in (GATE_UP, DOWN)}
    save_file(stored, tmp_path / "model.safetensors")

    store = SafetensorsStore(tmp_path, SPEC)

    assert len(store.names()) == 1 + 3 * NUM
    for expert in range(NUM):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        for name, expected in (
            ("gate_proj", gate_up[expert, :INNER]),
            ("up_proj", gate_up[expert, INNER:]),
            ("down_proj", down[expert]),
        ):
            assert store.shape(f"{prefix}{name}.weight", ()) == tuple(expected.shape)
            out = torch.empty(expected.shape, dtype=dtype)
            store.read(f"{prefix}{name}.weight", out)
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        (GATE_UP, numbers(NUM, INNER, SIZE)),
        (GATE_UP, numbers(NUM + 1, 2 * INNER, SIZE)),
        (GATE_UP, numbers(NUM, 2 * INNER, SIZE).to(torch.float8_e4m3fn)),
        ("model.layers.1.mlp.experts.gate_up_proj", numbers(NUM, 2 * INNER, SIZE)),
    ],
    ids=["half of it", "more experts", "quantized", "a dense layer"],
)
def test_what_is_no_such_stack_keeps_its_name(tmp_path: Path, name: str, stack: torch.Tensor) -> None:
    save_file({name: stack}, tmp_path / "model.safetensors")

    assert SafetensorsStore(tmp_path, SPEC).names() == {name}
    assert SafetensorsStore(tmp_path).names() == {name}
