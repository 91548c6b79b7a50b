"""The settings of a replica on a given device: those of `engine serve`, every "auto" replaced by an estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..launch.resolve.pool_size import MAX_AUTO_RUNNING, TOKENS_PER_REQUEST
from ..launch.resolve.resolve import CPU_MEM_FRACTION, CUDA_MEM_FRACTION
from ..launch.resolve.step_settings import (
    CPU_CHUNK_TOKENS,
    CPU_TARGET_STEP_MS,
    CUDA_CHUNK_TOKENS,
    CUDA_LARGE_CHUNK_TOKENS,
)
from ..runtime.config.engine_config import EngineConfig
from ..runtime.errors import ConfigError
from ..runtime.feasibility import Capacity
from .facts import DeviceFacts, ModelFacts
from .sim_request import VOCAB_SIZE
from .simulated_engine import ReplicaSettings

GIB: Final = 1 << 30
WORKSPACE_BYTES: Final = 4 * GIB
"""Workspace of a GPU: activations, logits, graphs, libraries."""
MAX_CPU_RUNNING: Final = 64  # the value of `resolve` for up to four threads
SWAP_SPACE_GIB: Final = 4.0  # of host memory, per GPU replica
MAX_AUTO_LEN: Final = 32_768
"""Longer contexts need host memory for each row of each simulated replica; --max-model-len raises it."""


def replica_settings(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, num_stages: int = 1
) -> ReplicaSettings:
    """Replace every "auto" as `serve` would on that device, with a coarser estimate of its memory.

    Args:
        device: of each pipeline stage.

    Raises:
        ConfigError: the model does not fit on the devices, or there are more stages than layers.
    """
    if not 1 <= num_stages <= model.num_layers:
        raise ConfigError(
            f"--pp is {num_stages}, but it must lie in [1, {model.num_layers}], the layers of {model.name}"
        )
    cache, scheduler = config.cache, config.scheduler
    page_size = cache.page_size
    asked_len = config.model.max_model_len
    auto_len = min(model.max_position_embeddings, MAX_AUTO_LEN)
    max_len = asked_len if isinstance(asked_len, int) else auto_len
    num_pages = _kv_tokens(config, model, device, num_stages) // page_size
    if num_pages < 1:
        raise ConfigError(f"max_total_tokens is {cache.max_total_tokens}, less than one page of {page_size}")
    by_memory = max(1, num_pages * page_size // TOKENS_PER_REQUEST)
    auto_running = min(MAX_AUTO_RUNNING if device.is_gpu else MAX_CPU_RUNNING, by_memory)
    asked_running = scheduler.max_running_requests
    max_running = asked_running if isinstance(asked_running, int) else auto_running
    auto_swap = SWAP_SPACE_GIB if device.is_gpu and scheduler.preemption_mode != "recompute" else 0.0
    swap_gib = cache.swap_space if cache.swap_space != "auto" else auto_swap
    page_bytes = page_size * model.kv_token_bytes
    capacity = Capacity(
        max_model_len=max_len,
        num_pages=num_pages,
        page_size=page_size,
        max_running_requests=max_running,
        vocab_size=VOCAB_SIZE,
        num_host_pages=int((swap_gib + cache.kv_host_size) * GIB) // page_bytes,
        kv_token_bytes=model.kv_token_bytes,
        num_stages=num_stages,
    )
    return ReplicaSettings(
        replace(
            scheduler,
            chunked_prefill_size=_chunk_size(config, device),
            target_step_ms=_target_step_ms(config, device),
            max_running_requests=max_running,
        ),
        replace(cache, max_total_tokens=max(2, num_pages * page_size), swap_space=swap_gib),
        capacity,
        hop_token_s=model.hidden_size * model.dtype_bytes / device.network_bandwidth,
    )


def context_note(config: EngineConfig, model: ModelFacts) -> str:
    """Note that the simulation holds less context than the model; "" if it does not."""
    known = model.max_position_embeddings
    if config.model.max_model_len != "auto" or known <= MAX_AUTO_LEN:
        return ""
    return (
        f"The simulation holds {MAX_AUTO_LEN:,} tokens of context, and {model.name} knows {known:,}: longer requests "
        f"were refused; --max-model-len {known} simulates them."
    )


def _kv_tokens(config: EngineConfig, model: ModelFacts, device: DeviceFacts, num_stages: int) -> int:
    if config.cache.max_total_tokens != "auto":
        return config.cache.max_total_tokens
    fraction = config.cache.mem_fraction
    if fraction == "auto":
        fraction = CUDA_MEM_FRACTION if device.is_gpu else CPU_MEM_FRACTION
    workspace = WORKSPACE_BYTES if device.is_gpu else GIB
    left = num_stages * (device.memory_bytes - workspace) - model.weight_bytes
    tokens = int(max(0, left) * fraction) // model.kv_token_bytes
    if tokens < config.cache.page_size:
        machines = f"{num_stages} stages of {device.name}" if num_stages > 1 else device.name
        memory, weights = num_stages * device.memory_bytes / GIB, model.weight_bytes / GIB
        raise ConfigError(
            f"{model.name} does not fit on {machines}: {memory:.0f} GiB less {weights:.0f} GiB of weights and "
            f"{num_stages * workspace / GIB:.0f} GiB of workspace leave no KV memory; raise --tp or --pp, or use a "
            f"larger --device or a smaller model"
        )
    return tokens


def _chunk_size(config: EngineConfig, device: DeviceFacts) -> int:
    asked, page_size = config.scheduler.chunked_prefill_size, config.cache.page_size
    if asked == -1:
        return -1
    if asked != "auto":
        chunk = asked
    elif device.is_gpu:
        gib = device.memory_bytes / GIB
        chunk = next((size for below, size in CUDA_CHUNK_TOKENS if gib < below), CUDA_LARGE_CHUNK_TOKENS)
    else:
        chunk = CPU_CHUNK_TOKENS
    return max(page_size, chunk // page_size * page_size)


def _target_step_ms(config: EngineConfig, device: DeviceFacts) -> float:
    asked = config.scheduler.target_step_ms
    if asked != "auto":
        return asked
    scheduler = config.scheduler
    has_none = scheduler.chunked_prefill_size == -1 or scheduler.phases == "prefill-first"
    return 0.0 if device.is_gpu or has_none else CPU_TARGET_STEP_MS
