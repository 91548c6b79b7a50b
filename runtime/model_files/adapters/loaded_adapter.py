"""`LoadedAdapter`: an adapter of a running server, with the number by which its processes know it."""

from __future__ import annotations

import msgspec

from .adapter_spec import AdapterSpec


class LoadedAdapter(msgspec.Struct, frozen=True):
    """One name of one adapter.

    Attributes:
        store_id: above 0; names of equal adapters share it.
        spec: the adapter, with its name.
        pinned: it came with the start of the server, or was loaded as pinned; it is unloaded only with `force`.
    """

    store_id: int
    spec: AdapterSpec
    pinned: bool = False
