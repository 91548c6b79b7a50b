"""`AdapterSlots`: moves adapters from the store into the slots that steps read, as plans say."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from .adapter_layers import AdapterLayers
    from .adapter_store import AdapterStore


class SlotSizes(NamedTuple):
    """The memory for adapters: see `AdapterLayers`."""

    max_slots: int
    max_rank: int
    targets: Collection[str] | None = None


class AdapterSlots:
    """The slots of all layers; slot 0 is the base model and stays empty."""

    def __init__(self, layers: AdapterLayers, store: AdapterStore) -> None:
        self.layers = layers
        self.store = store

    def load(self, adapter_loads: bytes) -> None:
        """Apply `StepPlan.adapter_loads`: [n, 2] int32 (slot, store id)."""
        for slot, store_id in np.frombuffer(adapter_loads, dtype=np.int32).reshape(-1, 2).tolist():
            assert 0 < slot < self.layers.num_slots, f"adapter slot {slot} of {self.layers.num_slots}"
            stored = self.store.get(store_id)
            for layer, packed in zip(self.layers.layers, stored.layers, strict=True):
                layer.delta.put(slot, packed)
