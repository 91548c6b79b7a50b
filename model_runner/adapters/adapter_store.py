"""`AdapterStore`: adapters in host memory, packed for the kernels; read on a thread: steps never wait for a disk.

event loop    read_later(store id, spec) ... done() -> results        drop(store id)
thread                 read, check, pack
runner        get(store id), when a plan moves the adapter into a slot (`AdapterSlots`)
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...models.adapters.base_modules import target_of
from ...runtime.errors import ConfigError
from .adapter_layers import read_modules

if TYPE_CHECKING:
    from collections.abc import Collection

    from ...runtime.adapter_spec import AdapterSpec
    from .adapter_layers import AdapterLayers, PackedLayer


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
                layer.put(slot, packed)


logger = logging.getLogger(__name__)


class AdapterRead(NamedTuple):
    """The end of a `read_later`; `error` says why the adapter could not be read, "" if it was."""

    store_id: int
    error: str = ""


class StoredAdapter(NamedTuple):
    """One adapter: for each of `AdapterLayers.layers` its part, None where it changes nothing."""

    name: str
    layers: tuple[PackedLayer | None, ...]


class AdapterStore:
    """The adapters by store id; all methods may be called on any thread."""

    def __init__(self, layers: AdapterLayers) -> None:
        self._layers = layers
        self._lock = threading.Lock()
        self._adapters: dict[int, StoredAdapter] = {}
        self._dropped: set[int] = set()
        self._done: SimpleQueue[AdapterRead] = SimpleQueue()
        self._thread: ThreadPoolExecutor | None = None
        self._reads: dict[int, Future[None]] = {}

    def read(self, store_id: int, spec: AdapterSpec) -> None:
        """Read an adapter now.

        Raises:
            ConfigError: its files are missing, changed or damaged, or it does not fit the slots' memory.
        """
        started_s = time.perf_counter()
        if spec.rank > self._layers.max_rank:
            raise ConfigError(
                f"{spec.path}: the adapter has rank {spec.rank}, the maximum is {self._layers.max_rank}; "
                "start the server with a larger --max-lora-rank"
            )
        known = self._layers.module_names
        for module in spec.modules:
            if module.name not in known:
                raise ConfigError(
                    f"{spec.path}: the adapter changes {module.name}, for which the server has no memory; start it "
                    f"with {target_of(module.name)} in --lora-target-modules"
                )
        modules = read_modules(spec)
        packed = StoredAdapter(spec.name, tuple(layer.pack(modules) for layer in self._layers.layers))
        with self._lock:
            self._adapters[store_id] = packed
        logger.info(
            "adapter=%s rank=%d modules=%d read_ms=%.0f",
            spec.name,
            spec.rank,
            len(spec.modules),
            (time.perf_counter() - started_s) * 1e3,
        )

    def read_later(self, store_id: int, spec: AdapterSpec) -> None:
        """Read an adapter on the store's thread; the result is in `done` afterwards."""
        with self._lock:
            self._dropped.discard(store_id)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
            self._reads[store_id] = self._thread.submit(self._read_and_notify, store_id, spec)

    def _read_and_notify(self, store_id: int, spec: AdapterSpec) -> None:
        error = ""
        try:
            self.read(store_id, spec)
        except ConfigError as found:
            error = str(found)
        except Exception as found:  # a bug, or a file that changes while it is read: only this adapter fails
            logger.exception("adapter %s", spec.name)
            error = f"{spec.path}: cannot be read: {found!r}"
        with self._lock:
            if store_id in self._dropped:
                self._dropped.discard(store_id)
                self._adapters.pop(store_id, None)
                return
        self._done.put(AdapterRead(store_id, error))

    def done(self) -> list[AdapterRead]:
        """The reads that have ended since the last call; does not wait."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def wait(self) -> AdapterRead:
        """The next read that ends."""
        return self._done.get()

    def wait_for(self, store_id: int) -> None:
        """Return when an adapter that `read_later` began is read, or cannot be."""
        read = self._reads.get(store_id)
        if read is not None:
            read.result()

    def get(self, store_id: int) -> StoredAdapter:
        """A stored adapter."""
        with self._lock:
            return self._adapters[store_id]

    def drop(self, store_id: int) -> None:
        """Forget an adapter, which may be unknown or still being read. Slots keep their copies."""
        with self._lock:
            self._reads.pop(store_id, None)
            if self._adapters.pop(store_id, None) is None:
                self._dropped.add(store_id)

    def close(self) -> None:
        """End the thread after the read that it is in."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.shutdown(cancel_futures=True)
