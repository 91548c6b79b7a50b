"""What a model with latent attention can be served with, and the memory of its tokens."""

from __future__ import annotations

import msgspec
import pytest

from engine.launch.resolve.memory_budget import capacity_of
from engine.launch.resolve.rank_spec import rank_spec
from engine.launch.resolve.resolve import resolve
from engine.models.spec.layer_form import AttentionForm, IndexSpec, LatentSpec
from engine.runtime.errors import ConfigError

from .test_resolve import GPU_HOST, HOST, SPEC, config

LATENT = LatentSpec(
    q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
LATENT_SPEC = msgspec.structs.replace(
    SPEC,
    model_type="deepseek_v2",
    num_heads=16,
    num_kv_heads=1,
    head_dim=576,
    rotary_dim=64,
    latent=LATENT,
    attention=AttentionForm(query_scale=192**-0.5),
)


def test_a_token_has_one_row_in_each_layer():
    capacity = capacity_of(resolve(config(), LATENT_SPEC, HOST).config, LATENT_SPEC)

    assert capacity.kv_token_bytes == 30 * 576 * 2
    ranks = rank_spec(LATENT_SPEC, 4)
    assert (ranks.num_heads, ranks.num_kv_heads, ranks.head_dim) == (4, 1, 576)


@pytest.mark.parametrize(
    ("settings", "host", "rule"),
    [
        ({"kv_cache_dtype": "int8"}, HOST, "kv_cache_dtype is int8, but deepseek_v2 has latent attention"),
        ({"kv_cache_dtype": "fp8", "device": "cuda"}, GPU_HOST, "kv_cache_dtype is fp8, but deepseek_v2"),
        ({"model_impl": "transformers"}, HOST, "model_impl is transformers, but deepseek_v2 has latent"),
    ],
)
def test_other_pools_are_refused_by_name(settings, host, rule):
    with pytest.raises(ConfigError, match=rule):
        resolve(config(**settings), LATENT_SPEC, host)


def test_sparse_attention_is_computed_on_cpus_and_in_any_order():
    index = IndexSpec(num_heads=4, head_dim=128, top_k=64)
    latent = msgspec.structs.replace(LATENT, index=index)
    spec = msgspec.structs.replace(LATENT_SPEC, head_dim=latent.row_size, latent=latent)

    assert capacity_of(resolve(config(), spec, HOST).config, spec).kv_token_bytes == 30 * (576 + 128) * 2
    with pytest.raises(ConfigError, match="device is cuda, but deepseek_v2 has sparse attention"):
        resolve(config(), spec, GPU_HOST)
    with pytest.raises(ConfigError, match="deterministic is on, but deepseek_v2 has sparse attention"):
        resolve(config(deterministic=True), spec, HOST)
