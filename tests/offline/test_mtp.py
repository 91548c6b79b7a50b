"""Drafts by the layer of a checkpoint that predicts further tokens: answers are those of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .test_drafts import LIVES, check
from .test_state_layers import save_tiny


def add_mtp(folder: Path, like: str, prefix: str = "mtp.layers.0", **names: str) -> None:
    """Add a layer that predicts further tokens: one like another layer, with other numbers, and what is around it."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)

    def random(shape: tuple[int, ...], spread: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    for name in [name for name in tensors if name.startswith(f"{like}.")]:
        shape = tuple(tensors[name].shape)
        tensors[prefix + name.removeprefix(like)] = random(shape, 0.4 if len(shape) > 1 else 0.1)
    size = tensors["model.embed_tokens.weight"].shape[1]
    for name in ("enorm", "hnorm", "norm"):
        tensors[names[name]] = random((size,), 0.1)
    tensors[names["projection"]] = random((size, 2 * size), 0.3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def qwen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 with such a layer."""
    folder = save_tiny(
        "qwen3_5_text",
        tiny_model,
        tmp_path_factory.mktemp("models") / "tiny-qwen",
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    add_mtp(
        folder,
        "model.layers.1",
        enorm="mtp.pre_fc_norm_embedding.weight",
        hnorm="mtp.pre_fc_norm_hidden.weight",
        norm="mtp.norm.weight",
        projection="mtp.fc.weight",
    )
    return folder


@pytest.fixture(scope="module")
def glm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GLM-4.5 with such a layer."""
    folder = save_tiny(
        "glm4_moe",
        tiny_model,
        tmp_path_factory.mktemp("models") / "tiny-glm",
        head_dim=8,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        num_nextn_predict_layers=1,
    )
    add_mtp(
        folder,
        "model.layers.1",
        "model.layers.4",
        enorm="model.layers.4.enorm.weight",
        hnorm="model.layers.4.hnorm.weight",
        norm="model.layers.4.shared_head.norm.weight",
        projection="model.layers.4.eh_proj.weight",
    )
    return folder


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("life", [life for life in LIVES if life != "swap"])
def test_answers_are_those_without(qwen: Path, life: str):
    """States are not swapped."""
    check(qwen, "mtp", **LIVES[life])


@pytest.mark.slow
@pytest.mark.parametrize("life", [life for life in LIVES if life != "int8 KV"])
def test_so_with_experts(glm: Path, life: str):
    """In an int8 pool drafts of any source change answers of this model: its sums are near the borders of integers."""
    check(glm, "mtp", **LIVES[life])


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_so_with_pages_of_other_sizes(qwen: Path, page_size: int):
    check(qwen, "mtp", page_size=page_size, chunked_prefill_size=5)


@pytest.mark.slow
def test_so_with_pages_from_a_disk(glm: Path, tmp_path: Path):
    check(glm, "mtp", kv_disk=str(tmp_path), kv_disk_size=1.0, max_total_tokens=200, max_model_len=160)
