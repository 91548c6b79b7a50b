"""The shape of SmolLM2-135M with random weights, for benchmarks without model files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from engine.model_runner.memory.kv_pool import KVPool
    from engine.models.spec.model_spec import ModelSpec

HIDDEN: Final = 576
INNER: Final = 1536
HEADS: Final = 9
KV_HEADS: Final = 3
HEAD_DIM: Final = 64
LAYERS: Final = 30
VOCAB: Final = 49_152
PAGE_SIZE: Final = 16


def model_spec(num_layers: int) -> ModelSpec:
    """The spec of SmolLM2-135M, with so many layers."""
    from engine.models.spec.model_spec import ModelSpec

    return ModelSpec(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )


def make_kv_pool(num_layers: int, num_pages: int, dtype: torch.dtype) -> KVPool:
    """A KV pool with random keys and values in all pages."""
    import torch

    from engine.model_runner.memory.kv_pool import KVPool

    pool = KVPool(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for numbers in (*pool.k, *pool.v):
        numbers.normal_() if dtype.is_floating_point else numbers.random_(-127, 128)
    for scales in (*pool.k_scale, *pool.v_scale):
        scales.fill_(1 / 127)
    return pool
