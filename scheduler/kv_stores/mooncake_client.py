"""`MooncakeClient`: the store of Mooncake. Its master places values in the memory of its clients.

The engine adds no memory of its own, which would end with it: a `mooncake_client`, or another process with a segment,
has to. Calls as in mooncake-transfer-engine 0.3.13; one to a frozen master ends after 30 s, and the scheduler does not
wait for it.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...runtime.config.kv_store_address import KVStoreAddress
from ...runtime.errors import ConfigError
from .page_store import StoreError
from .store_client import CONNECT_LIMIT_S, WritesRefusedError, check_client

_LOCAL_BUFFER_BYTES: Final = 16 << 20
_NOT_FOUND: Final = -704
_NO_ROOM: Final = -200
_LONGER: Final = -600
"""The value is longer than the memory for it."""


class MooncakeClient:
    """A `StoreClient`."""

    def __init__(self, address: KVStoreAddress) -> None:
        """Connect, and try the store.

        Raises:
            ConfigError: the package is not installed, or the store cannot be used.
        """
        os.environ.setdefault("GLOG_minloglevel", "1")  # else it logs each connection
        try:
            self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"kv_store is {address}, which needs the package mooncake-transfer-engine-non-cuda: {error}; "
                "install it with pip, or use redis://"
            ) from error
        self._staging: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        try:
            # The package itself would try for a minute.
            with socket.create_connection((address.host, address.port), CONNECT_LIMIT_S) as probe:
                host = probe.getsockname()[0]
        except OSError as error:
            raise ConfigError(
                f"kv_store is {address}, where nothing answers: {error.strerror or error}; start mooncake_master there"
            ) from error
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "tcp")
        master = f"{address.host}:{address.port}"
        if code := self._store.setup(host, "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, protocol, "", master):
            raise ConfigError(f"kv_store is {address}, where no Mooncake master answers (code {code})")
        try:
            check_client(address, self)
        except (StoreError, WritesRefusedError) as error:
            raise ConfigError(
                f"kv_store is {address}, which cannot be used: {error}; start a process that gives it memory, such as "
                "mooncake_client"
            ) from error

    def touch(self, names: Sequence[str]) -> list[bool]:
        return self.exists(names)

    def exists(self, names: Sequence[str]) -> list[bool]:
        codes = self._store.batch_is_exist(list(names))
        _check(codes)
        return [code == 1 for code in codes]

    def get(self, names: Sequence[str], num_bytes: int) -> list[bytes | None]:
        rows = self._rows(len(names), num_bytes)
        codes = self._store.batch_get_into(list(names), _addresses(rows), [num_bytes] * len(names))
        _check([code for code in codes if code not in (_NOT_FOUND, _LONGER)])
        return [
            None if code == _NOT_FOUND else rows[row, : max(code, 0)].tobytes()
            for row, code in enumerate(codes)
        ]

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        rows = self._rows(len(names), max(map(len, values)))
        for row, value in enumerate(values):
            rows[row, : len(value)] = np.frombuffer(value, np.uint8)
        codes = self._store.batch_put_from(list(names), _addresses(rows), [len(value) for value in values])
        if _NO_ROOM in codes:
            raise WritesRefusedError("it has no memory for them")
        _check(codes)

    def remove(self, name: str) -> None:
        code = self._store.remove(name, True)  # also one that was asked about just now
        _check([] if code == _NOT_FOUND else [code])

    def remove_all(self, prefix: str, limit_s: float) -> None:  # its own limit holds, see the module
        _check([self._store.remove_by_regex(f"^{re.escape(prefix)}.*", True)])

    def close(self) -> None:
        self._store.close()

    def _rows(self, count: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory that the library may write to and read, [count, num_bytes]."""
        if self._staging.size < count * num_bytes:
            if self._staging.size:
                self._store.unregister_buffer(self._staging.ctypes.data)
            self._staging = np.zeros(0, np.uint8)  # if the new memory is refused, the next call tries again
            staging = np.zeros(count * num_bytes, np.uint8)
            _check([self._store.register_buffer(staging.ctypes.data, staging.nbytes)])
            self._staging = staging
        return self._staging[: count * num_bytes].reshape(count, num_bytes)


def _addresses(rows: npt.NDArray[np.uint8]) -> list[int]:
    return [rows.ctypes.data + row * rows.shape[1] for row in range(len(rows))]


def _check(codes: Sequence[int]) -> None:
    if failed := [code for code in codes if code < 0]:
        raise StoreError(f"Mooncake's error {failed[0]}")
