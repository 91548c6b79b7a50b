"""`PageStore`: records by key that outlive the process; `PageMover` moves them, and does not know where they are.

`SegmentStore` keeps them in files, `RemoteStore` on a server. A record is a row of a `RecordBuffer`: key, lengths and
checksums with the payload, so that each store tests at each read what it gives. One thread uses a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .segment_file import RecordBuffer


class StoreError(Exception):
    """The store does not answer, or is not asked because it has failed lately; the text says which and why."""


class PageStore(Protocol):
    """See the module. Every call ends in a bounded time; each may raise `StoreError`."""

    used_bytes: int
    """Bytes that it holds, as it knows without a look; -1: it does not know."""

    def find(self, keys: Sequence[bytes]) -> int:
        """Number of first keys that have records, which count as used now."""
        ...

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each key has a record."""
        ...

    def read(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        """Read the records of keys into the rows of a buffer; returns how many, up to the first that is a miss."""
        ...

    def write(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        """Store the first payloads of a buffer under keys without a record; returns how many are stored."""
        ...

    def forget(self) -> None:
        """Drop all records of the identity; a crash does not bring them back.

        Raises:
            StoreError: it might; a store that does not answer drops them before a later call finds anything.
        """
        ...

    def close(self) -> None:
        """End the use of the store; its records stay."""
        ...
