"""`BlockConsumer`: applies block events as a router does, and knows which prefixes are cached then."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.scheduler.prefix_cache.block_events import (
    AllBlocksCleared,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    chained_hash,
    first_hash,
)

AdapterPrefix = tuple[str, tuple[int, ...]]


class BlockConsumer:
    """Fails on events that do not fit together.

    Attributes:
        known: the adapter and all tokens up to the end of each block, by its hash.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.known: dict[int, AdapterPrefix] = {}

    def apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event)
                case BlocksRemoved():
                    for block_hash in event.hashes:
                        del self.known[block_hash]  # each was announced, and is withdrawn once
                case AllBlocksCleared():
                    self.known.clear()

    def _store(self, event: BlocksStored) -> None:
        lora_id, tokens, last = event.lora_id, tuple[int, ...](), first_hash(event.lora_id)
        if event.parent_hash is not None:
            (lora_id, tokens), last = self.known[event.parent_hash], event.parent_hash
        new = tuple(np.frombuffer(event.token_ids, dtype=np.int32).tolist())
        size = self._block_size
        assert lora_id == event.lora_id
        assert event.hashes
        assert len(new) == len(event.hashes) * size
        for number, block_hash in enumerate(event.hashes):
            block = new[number * size : (number + 1) * size]
            last = chained_hash(last, np.array(block, dtype=np.int32).tobytes())
            tokens = tokens + block
            assert block_hash == last
            assert block_hash not in self.known
            self.known[block_hash] = (lora_id, tokens)
