"""Small replicas for which results can be computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.simulator.sim_request import VOCAB_SIZE
from engine.simulator.simulated_engine import ReplicaSettings


def replica(
    *,
    num_pages: int = 4096,
    page_size: int = 16,
    max_running: int = 64,
    radix_cache: bool = True,
    num_host_pages: int = 0,
    num_stages: int = 1,
    **scheduler: Any,
) -> ReplicaSettings:
    """Settings of a replica with 64k KV tokens; prompts are not cut unless a chunk size is given."""
    scheduler.setdefault("chunked_prefill_size", -1)
    capacity = Capacity(
        8192, num_pages, page_size, max_running, VOCAB_SIZE, num_host_pages, 1024, num_stages=num_stages
    )
    return ReplicaSettings(
        SchedulerConfig(max_running_requests=max_running, **scheduler),
        CacheConfig(page_size=page_size, radix_cache=radix_cache, max_total_tokens=num_pages * page_size),
        capacity,
    )


@pytest.fixture
def make_replica() -> Callable[..., ReplicaSettings]:
    """Make `ReplicaSettings`; arguments as for `replica`."""
    return replica
