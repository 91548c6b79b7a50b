"""The messages of KV events, as vLLM publishes them and routers read them (vllm:distributed/kv_events.py).

    frames of a message    topic | sequence number (u64, big-endian) | payload
    payload (msgpack)      [time in seconds, [event, ...], data parallel rank]
    event                  {"type": "BlockStored", "block_hashes": [...], ...}, BlockRemoved or AllBlocksCleared

`lora_name` and `medium` are always present: vllm-router drops a batch without them. Hashes are positive and have 63
bits, because it takes unsigned integers and Dynamo takes signed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, assert_never

import msgspec
import numpy as np

from ..adapters.adapter_table import Adapter
from ..prefix_cache.block_events import AllBlocksCleared, BlockEvent, BlocksRemoved, BlocksStored

DEVICE_MEDIUM: Final = "GPU"
"""The tier of the KV pool, on a CPU too: consumers give blocks in "CPU" less credit, because in vLLM they are offloaded
and must be copied back."""

MAX_EVENTS: Final = 256
"""In one message."""
MAX_PAYLOAD_TOKENS: Final = 1 << 20
"""Token ids and hashes in one message, unless one event has more: at most 9 bytes each, of 16 MiB that are accepted."""

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message that ends a replay."""


class WireEvent(msgspec.Struct, frozen=True, tag=True):
    """Base of the events; `type` is the name of the class."""


class BlockStored(WireEvent, frozen=True, tag="BlockStored"):
    """Blocks that follow each other are in the cache; see `BlocksStored`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(WireEvent, frozen=True, tag="BlockRemoved"):
    """Blocks are no longer in the cache."""

    block_hashes: list[int]
    medium: str


class AllCleared(WireEvent, frozen=True, tag="AllBlocksCleared"):
    """No block is in the cache."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The payload of one message."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int


def batches(events: Iterable[BlockEvent]) -> Iterator[list[BlockEvent]]:
    """The events in runs that fit into one message each."""
    batch: list[BlockEvent] = []
    num_tokens = 0
    for event in events:
        size = _num_integers(event)
        if batch and (len(batch) == MAX_EVENTS or num_tokens + size > MAX_PAYLOAD_TOKENS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(event)
        num_tokens += size
    if batch:
        yield batch


def wire_event(event: BlockEvent, block_size: int, adapter: Adapter | None) -> WireEvent:
    """The event as it is sent; `adapter`: of a `BlocksStored`, None if it has none or if it is not loaded any more."""
    match event:
        case BlocksStored():
            return BlockStored(
                event.hashes,
                event.parent_hash,
                np.frombuffer(event.token_ids, dtype=np.int32).tolist(),
                block_size,
                None if adapter is None else adapter.store_id,
                DEVICE_MEDIUM,
                # Never null for an adapter's blocks: a reader would take them for those of the base model.
                (event.lora_id or None) if adapter is None else adapter.name,
            )
        case BlocksRemoved():
            return BlockRemoved(event.hashes, DEVICE_MEDIUM)
        case AllBlocksCleared():
            return AllCleared()
        case _:
            assert_never(event)


def _num_integers(event: BlockEvent) -> int:
    match event:
        case BlocksStored():
            return len(event.hashes) + len(event.token_ids) // 4
        case BlocksRemoved():
            return len(event.hashes)
        case AllBlocksCleared():
            return 0
        case _:
            assert_never(event)
