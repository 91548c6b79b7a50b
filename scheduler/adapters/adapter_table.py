"""`AdapterTable`: the adapters that requests may ask for. Their weights are with the model runner.

`AdapterReader` is the part of the model runner that reads them beside the steps, for the `Pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...runtime.adapter_spec import AdapterSpec
from ...runtime.messages import AdapterDone, LoadAdapter


class Adapter:
    """One adapter.

    Attributes:
        store_id: its number with the runner.
        name: for errors.
        is_ready: its weights are in host memory.
        calls: calls that wait for the end of the read.
    """

    __slots__ = ("calls", "is_ready", "name", "store_id")

    def __init__(self, store_id: int, name: str) -> None:
        self.store_id = store_id
        self.name = name
        self.is_ready = False
        self.calls: list[int] = []


class AdapterTable:
    """The adapters by fingerprint: being read, ready, or not readable, whose requests are refused with the reason."""

    def __init__(self, *, is_enabled: bool) -> None:
        """`is_enabled`: whether the runner has slots for adapters."""
        self._is_enabled = is_enabled
        self._adapters: dict[str, Adapter] = {}
        self._failed: dict[str, tuple[int, str]] = {}  # store id and error, by fingerprint

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, fingerprint: str) -> Adapter | None:
        """The adapter with this fingerprint; None if there is none."""
        return self._adapters.get(fingerprint)

    @property
    def num_reading(self) -> int:
        """Adapters that are still being read."""
        return sum(not adapter.is_ready for adapter in self._adapters.values())

    def is_reading(self, store_id: int) -> bool:
        """Whether an adapter is still being read."""
        adapter = self._adapters.get(self.fingerprint_of(store_id))
        return adapter is not None and not adapter.is_ready

    def reason_against(self, fingerprint: str) -> str | None:
        """Reason why no request can run with this adapter; None if one can, at once or when it is read."""
        if not fingerprint or fingerprint in self._adapters:
            return None
        if not self._is_enabled:
            return "the server runs without LoRA adapters; start it with --enable-lora"
        if fingerprint in self._failed:
            return self._failed[fingerprint][1]
        return "the LoRA adapter of the request is not loaded any more; send it again"

    def load(self, call_id: int, request: LoadAdapter) -> AdapterDone | None:
        """Take an adapter that is about to be read; returns the answer to the call if there is nothing to wait for."""
        if not self._is_enabled:
            error = "the server runs without LoRA adapters; start it with --enable-lora"
            return AdapterDone(error)
        adapter = self._adapters.get(request.adapter.fingerprint)
        if adapter is None:
            adapter = Adapter(request.store_id, request.adapter.name)
            self._failed.pop(request.adapter.fingerprint, None)
            self._adapters[request.adapter.fingerprint] = adapter
        elif adapter.is_ready:
            return AdapterDone()
        adapter.calls.append(call_id)
        return None

    def read(self, store_id: int, error: str) -> tuple[str, list[int]]:
        """An adapter is read, or cannot be; returns its fingerprint ("" if unknown), and the calls that waited."""
        fingerprint = self.fingerprint_of(store_id)
        if not fingerprint:
            return "", []
        adapter = self._adapters[fingerprint]
        if error:
            del self._adapters[fingerprint]
            self._failed[fingerprint] = store_id, error
        adapter.is_ready = True
        calls, adapter.calls = adapter.calls, []
        return fingerprint, calls

    def remove(self, store_id: int) -> str:
        """Forget an adapter; returns its fingerprint, "" if it is unknown."""
        fingerprint = self.fingerprint_of(store_id)
        self._adapters.pop(fingerprint, None)
        self._failed = {name: failed for name, failed in self._failed.items() if failed[0] != store_id}
        return fingerprint

    def fingerprint_of(self, store_id: int) -> str:
        """The fingerprint of the adapter with this number; "" if there is none."""
        return next((f for f, adapter in self._adapters.items() if adapter.store_id == store_id), "")


class EndOfRead(Protocol):
    """The end of a `read_later`; `error` says why the adapter could not be read, "" if it was."""

    @property
    def store_id(self) -> int: ...

    @property
    def error(self) -> str: ...


class AdapterReader(Protocol):
    """Reads the weights of adapters beside the steps; `AdapterStore` is one."""

    def read_later(self, store_id: int, spec: AdapterSpec) -> None:
        """Begin to read an adapter; the end is in `done` afterwards."""
        ...

    def done(self) -> Sequence[EndOfRead]:
        """The reads that have ended since the last call; does not wait."""
        ...

    def wait(self) -> EndOfRead:
        """The next read that ends; call it only while one is going on."""
        ...

    def drop(self, store_id: int) -> None:
        """Forget an adapter, which may be unknown or still being read."""
        ...
