"""`AdapterReader`: reads the weights of adapters for the `Pipeline`, beside the steps; `AdapterStore` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...runtime.adapter_spec import AdapterSpec


class EndOfRead(Protocol):
    """The end of a `read_later`; `error` says why the adapter could not be read, "" if it was."""

    @property
    def store_id(self) -> int: ...

    @property
    def error(self) -> str: ...


class AdapterReader(Protocol):
    """See the module."""

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


class _Unread(NamedTuple):
    store_id: int
    error: str


class NoAdapterReader:
    """Of a scheduler without a model runner that has adapters."""

    def __init__(self) -> None:
        self._asked: list[_Unread] = []

    def read_later(self, store_id: int, spec: AdapterSpec) -> None:
        self._asked.append(_Unread(store_id, "there is no memory for adapters"))

    def done(self) -> Sequence[EndOfRead]:
        asked, self._asked = self._asked, []
        return asked

    def wait(self) -> EndOfRead:
        return self._asked.pop(0)

    def drop(self, store_id: int) -> None:
        pass
