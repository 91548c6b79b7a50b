"""`load_model_runner`: from a resolved configuration and model files to a `ModelRunner` that is ready to serve."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ..runtime.errors import ConfigError
from .attention.selection import select_backend
from .batch_builder import BatchBuilder, make_req_to_token
from .host_kv_pool import HostKVPool, NoHostKVPool
from .input_buffers import InputBuffers
from .kv_pool import KVPool
from .model_runner import ModelRunner
from .models.registry import build_model
from .output_buffers import OutputBuffers
from .row_states import RowStates
from .sampler import Sampler
from .token_counts import TokenCounts
from .token_relay import TokenRelay
from .weights.dummy import DummyStore
from .weights.gguf import GGUFStore
from .weights.reader import TensorStore, WeightReader
from .weights.safetensors import SafetensorsStore

if TYPE_CHECKING:
    from ..runtime.config import CacheConfig, ModelConfig
    from ..runtime.feasibility import Capacity
    from ..runtime.model_files.model_spec import ModelSpec
    from ..runtime.model_files.source import ModelSource

logger = logging.getLogger(__name__)

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_model_runner(
    config: ModelConfig, cache: CacheConfig, source: ModelSource, spec: ModelSpec, capacity: Capacity
) -> ModelRunner:
    """Load the weights, reserve the KV pool, put the runner together.

    Args:
        config: resolved: dtype, device and num_threads are concrete. Sets torch's number of threads.
        cache: resolved.
        source: where the weights are.
        spec: the model's architecture.
        capacity: what the scheduler was promised.

    Raises:
        ConfigError: the checkpoint is incomplete, damaged, or of another architecture; memory does not suffice.
    """
    assert config.dtype != "auto" and config.device != "auto" and config.num_threads != "auto"
    assert cache.page_size == capacity.page_size
    if config.device == "cpu":
        torch.set_num_threads(config.num_threads)
    device, dtype = torch.device(config.device), _DTYPES[config.dtype]
    started_s = time.perf_counter()

    weights = WeightReader(_open_store(config, source, spec), dtype, device)
    model = build_model(spec, weights, capacity.max_model_len, device)
    weights.finish()
    logger.info(
        "weights_loaded_s=%.2f dtype=%s device=%s", time.perf_counter() - started_s, config.dtype, device
    )

    kv_pool = KVPool(
        num_layers=spec.num_layers,
        num_pages=capacity.num_pages,
        page_size=capacity.page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=device,
    )
    logger.info(
        "kv_pool_tokens=%d kv_pool_mib=%.0f", capacity.max_total_tokens, kv_pool.num_bytes / (1 << 20)
    )
    buffers = InputBuffers(device)
    host_kv_pool: HostKVPool | NoHostKVPool = NoHostKVPool()
    if capacity.num_host_pages:
        host_kv_pool = HostKVPool(kv_pool, capacity.num_host_pages, buffers)
        logger.info("host_kv_pool_mib=%.0f", host_kv_pool.num_bytes / (1 << 20))
    req_to_token = make_req_to_token(capacity.max_running_requests, capacity.max_model_len, device)
    states = RowStates(capacity.max_running_requests, capacity.vocab_size)
    counts = TokenCounts(capacity.vocab_size, buffers)
    relay = TokenRelay(capacity.max_running_requests, device)
    builder = BatchBuilder(
        req_to_token=req_to_token,
        attention=select_backend(spec, device)(spec, kv_pool, req_to_token, buffers),
        states=states,
        counts=counts,
        relay=relay,
        eos_token_ids=spec.eos_token_ids,
        buffers=buffers,
    )
    return ModelRunner(
        model=model,
        kv_pool=kv_pool,
        host_kv_pool=host_kv_pool,
        states=states,
        counts=counts,
        relay=relay,
        builder=builder,
        sampler=Sampler(counts),
        buffers=buffers,
        outputs=OutputBuffers(device),
    )


def _open_store(config: ModelConfig, source: ModelSource, spec: ModelSpec) -> TensorStore:
    load_format = config.load_format
    if load_format == "auto":
        load_format = "gguf" if source.kind == "gguf" else "safetensors"
    path = Path(source.path)
    if load_format == "dummy":
        return DummyStore(config.seed)
    if load_format == "gguf":
        if source.kind != "gguf":
            raise ConfigError(
                f"{path}: load_format is gguf, but this is a folder; name the .gguf file as the model"
            )
        return GGUFStore(path, spec)
    if source.kind != "hf":
        raise ConfigError(
            f"{path}: load_format is safetensors, but this is a GGUF file; use --load-format gguf or auto"
        )
    return SafetensorsStore(path)
