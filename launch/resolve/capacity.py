"""`capacity_of`: the sizes that a scheduler has with a resolved configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...models.spec.sizes import GIB, checkpoint_pages, kv_dtype_of, kv_token_bytes, num_checkpoints
from ...runtime.feasibility import Capacity

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.engine_config import EngineConfig


def capacity_of(config: EngineConfig, spec: ModelSpec) -> Capacity:
    """What a scheduler with this resolved configuration can hold."""
    max_model_len, max_total_tokens = config.model.max_model_len, config.cache.max_total_tokens
    max_running_requests = config.scheduler.max_running_requests
    assert isinstance(max_model_len, int), "the configuration is not resolved"
    assert isinstance(max_total_tokens, int), "the configuration is not resolved"
    assert isinstance(max_running_requests, int), "the configuration is not resolved"
    assert config.cache.swap_space != "auto", "the configuration is not resolved"
    assert config.model.dtype != "auto", "the configuration is not resolved"
    dtype, page_size = config.model.dtype, config.cache.page_size
    token_bytes = kv_token_bytes(spec, kv_dtype_of(config.cache.kv_cache_dtype, config.model.dtype))
    return Capacity(
        max_model_len=max_model_len,
        num_pages=max_total_tokens // config.cache.page_size,
        page_size=config.cache.page_size,
        max_running_requests=max_running_requests,
        vocab_size=spec.vocab_size,
        num_host_pages=int(config.cache.swap_space * GIB) // (token_bytes * config.cache.page_size),
        kv_token_bytes=token_bytes,
        num_adapter_slots=config.scheduler.max_loras_per_batch if config.adapters.is_enabled else 0,
        num_checkpoints=(
            num_checkpoints(spec, dtype, token_bytes, max_total_tokens // page_size, page_size)
            if config.cache.radix_cache
            else 0
        ),
        checkpoint_pages=checkpoint_pages(spec, dtype, token_bytes, page_size),
        num_stages=config.parallel.pp,
    )
