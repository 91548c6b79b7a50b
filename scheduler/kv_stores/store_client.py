"""`StoreClient`: the commands of a server of records, which `RemoteStore` gives; each kind of server has a client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol

from ...runtime.config.kv_store_address import KVStoreAddress
from ...runtime.errors import ConfigError

CONNECT_LIMIT_S: Final = 1.0
INSTALL: Final = "install it with pip install 'engine[redis]', in the repository pip install '.[redis]'"


class WritesRefusedError(Exception):
    """The server takes no more, but may be read; the text says why."""


class StoreClient(Protocol):
    """The commands of a server. Each ends in a bounded time, or raises `StoreError`; names are ASCII."""

    def touch(self, names: Sequence[str]) -> list[bool]:
        """Whether there are values, which count as used now."""
        ...

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether there are values."""
        ...

    def get(self, names: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """The values, each of `num_bytes` if it is undamaged; None: there is none."""
        ...

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        """Set values; raises `WritesRefusedError` if not all could be set."""
        ...

    def remove(self, name: str) -> None:
        """Delete a value."""
        ...

    def remove_all(self, prefix: str, limit_s: float) -> None:
        """Delete values with names that begin so, all of them if that takes no longer."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


def check_client(address: KVStoreAddress, client: StoreClient) -> None:
    """Write, read and delete a value; raises what the client does, or `ConfigError` if the value was lost."""
    name = f"engine:kv:probe:{os.urandom(8).hex()}"
    client.put([name], [b"probe"])
    found = client.get([name], 5)
    client.remove(name)
    if found != [b"probe"]:
        raise ConfigError(f"kv_store is {address}, which loses what is written; name another server")
