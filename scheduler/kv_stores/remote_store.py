"""`RemoteStore`: records on a server that several engines on several machines may share, through a `StoreClient`.

    engine:kv:IDENTITY:generation         random; to forget is to write another one, which all engines read
    engine:kv:IDENTITY:GENERATION:KEY     a record without the zeros at its end; with a key file sealed, and KEY hidden

The records of another generation are not found. They are deleted for as long as `FORGET_LIMIT_S`, and the rest is left
to the eviction of the server, so that to forget does not wait for a scan of a large database. A generation that was
evicted is replaced, with which all is forgotten.

The server evicts records as it is set up; looking a prompt up counts as a use of it. A server that does not answer in
time, or fails, is not asked for 30 s: one warning, and until then calls fail at once. One that takes nothing is read.

With the file of `--kv-store-key` a value is encrypted and authenticated with AES-256-GCM, its name included, and KEY is
a keyed hash. The server and the network see the number, the sizes and the uses of records; they may lose records, or
give back old ones of the same name, which have the same KV.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ...runtime.config.kv_store_address import KVStoreAddress
from ...runtime.errors import ConfigError
from .page_store import StoreError
from .segment_file import RecordBuffer
from .store_client import INSTALL, StoreClient, WritesRefusedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

OFF_S: Final = 30.0
FORGET_LIMIT_S: Final = 5.0
_GENERATION_BYTES: Final = 8
KEY_FILE_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16


def open_client(address: KVStoreAddress) -> StoreClient:
    """Connect to the server, and try it: write, read, delete.

    Raises:
        ConfigError: the package is missing, or the server does not do it.
    """
    if address.scheme == "mooncake":
        from .mooncake_client import MooncakeClient

        return MooncakeClient(address)
    from .redis_client import RedisClient

    return RedisClient(address)


def read_key(path: Path) -> bytes:
    """The secret in the file of `--kv-store-key`.

    Raises:
        ConfigError: it cannot be read, or is too short.
    """
    make = f"make one with: head -c {KEY_FILE_BYTES} /dev/urandom > FILE"
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"kv_store_key is {path}, which cannot be read: {error.strerror}; {make}"
        ) from error
    if len(secret) < KEY_FILE_BYTES:
        raise ConfigError(
            f"kv_store_key is {path}, which has {len(secret)} bytes, but a key has {KEY_FILE_BYTES} or more; {make}"
        )
    return secret


class Seal:
    """Encryption of values and hiding of names with a secret."""

    def __init__(self, secret: bytes) -> None:
        """Derive the keys.

        Raises:
            ConfigError: the package is not installed.
        """
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(f"kv_store_key needs the package cryptography; {INSTALL}") from error
        self._aead: AESGCM = AESGCM(blake2b(secret, digest_size=32, person=b"kv values").digest())
        self._names = blake2b(secret, digest_size=32, person=b"kv names").digest()

    def name(self, key: bytes) -> bytes:
        """The name that the server has for a key."""
        return blake2b(key, digest_size=32, key=self._names).digest()

    def close(self, name: bytes, record: memoryview) -> bytes:
        """Seal a record as the value of a name."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, record, name)

    def open(self, name: bytes, value: bytes) -> bytes:
        """The record in a value; b"" if it is not the one that was sealed for this name."""
        from cryptography.exceptions import InvalidTag

        with contextlib.suppress(InvalidTag, ValueError):
            return self._aead.decrypt(value[:_NONCE_BYTES], value[_NONCE_BYTES:], name)
        return b""


class RemoteStore:
    """See the module. A `PageStore`."""

    def __init__(
        self,
        address: KVStoreAddress,
        identity: bytes,
        client: StoreClient,
        seal: Seal | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts.

        Args:
            client: of `open_client`.
            seal: None: records are not sealed.
        """
        self.used_bytes = -1  # only the server knows
        self._address = address
        self._client = client
        self._seal = seal
        self._now_s = now_s
        self._root = f"engine:kv:{identity.hex()}:"
        self._generation_name = f"{self._root}generation"
        self._generation = ""
        self._off_until_s: float | None = None
        self._no_writes_until_s: float | None = None
        self._why = ""
        self._must_forget = False
        self._has_warned = False
        logger.info("kv_store=%s sealed=%s identity=%s", address, seal is not None, identity.hex()[:16])

    def find(self, keys: Sequence[bytes]) -> int:
        with self._asking():
            self._read_generation()
            _, *found = self._client.touch([self._generation_name, *map(self._name, keys)])
        return found.index(False) if False in found else len(found)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with self._asking():
            self._read_generation()
            return self._client.exists([self._name(key) for key in keys]) if keys else []

    def read(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        num_bytes = buffer.records.shape[1] + (0 if self._seal is None else _NONCE_BYTES + _TAG_BYTES)
        with self._asking():
            if not self._generation:
                self._read_generation()
            names = self._names(keys)
            values = self._client.get(names, num_bytes) if names else []
        for row, (key, name, value) in enumerate(zip(keys, names, values, strict=True)):
            if value is None:
                return row
            record = value if self._seal is None else self._seal.open(name.encode(), value)
            if len(record) == buffer.records.shape[1]:
                buffer.records[row] = np.frombuffer(record, np.uint8)
            if len(record) != buffer.records.shape[1] or not buffer.holds(row, key):
                self._lose(name)
                return row
        return len(keys)

    def write(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        if self._no_writes_until_s is not None and self._now_s() < self._no_writes_until_s:
            return 0
        try:
            with self._asking():
                if not self._generation:
                    self._read_generation()
                if not self._generation:
                    raise WritesRefusedError("it takes no generation")
                names, values = self._names(keys), []
                for row, (key, name) in enumerate(zip(keys, names, strict=True)):
                    buffer.seal(row, key)
                    record = buffer.records[row].data
                    values.append(
                        record.tobytes() if self._seal is None else self._seal.close(name.encode(), record)
                    )
                self._client.put(names, values)
        except WritesRefusedError as error:  # it is full, or may only be read
            if self._no_writes_until_s is None:
                logger.warning("%s: stores nothing, and tries every %d s: %s", self._address, OFF_S, error)
            self._no_writes_until_s = self._now_s() + OFF_S
            return 0
        self._no_writes_until_s = None
        return len(keys)

    def forget(self) -> None:
        """Delete the records; if the server does not answer, at once when it does, before anything is found there."""
        self._must_forget = True
        with self._asking():
            pass

    def close(self) -> None:
        self._client.close()

    def _name(self, key: bytes) -> str:
        return (
            f"{self._root}{self._generation}:" + (key if self._seal is None else self._seal.name(key)).hex()
        )

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._name(key) for key in keys]

    def _read_generation(self) -> None:
        """Learn whether another engine has forgotten. A server that may not be written can have no generation."""
        [value] = self._client.get([self._generation_name], _GENERATION_BYTES)
        self._generation = ""
        if value is None or len(value) != _GENERATION_BYTES:
            value = os.urandom(_GENERATION_BYTES)
            try:
                self._client.put([self._generation_name], [value])
            except WritesRefusedError:
                return
        self._generation = value.hex()

    def _forget(self) -> None:
        [value] = self._client.get([self._generation_name], _GENERATION_BYTES)
        self._client.remove(self._generation_name)
        self._generation = ""
        if value is not None:
            self._client.remove_all(f"{self._root}{value.hex()}:", FORGET_LIMIT_S)

    def _lose(self, name: str) -> None:
        """Delete a damaged record, so that it is stored again."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: a record is damaged; its tokens are computed again", self._address)
        with self._asking():
            self._client.remove(name)

    @contextlib.contextmanager
    def _asking(self) -> Generator[None, None, None]:
        """Ask the server, unless it has failed less than 30 s ago.

        Raises:
            StoreError: it has, or fails now.
        """
        if self._off_until_s is not None and self._now_s() < self._off_until_s:
            raise StoreError(self._why)
        try:
            if self._must_forget:
                self._forget()
                self._must_forget = False
            yield
        except StoreError as error:
            if self._off_until_s is None:
                logger.warning("%s: not used, and tried again every %d s: %s", self._address, OFF_S, error)
            self._off_until_s = self._now_s() + OFF_S
            self._why = f"the store has failed: {error}"
            raise StoreError(self._why) from error
        if self._off_until_s is not None:
            self._off_until_s = None
            logger.info("%s: used again", self._address)
