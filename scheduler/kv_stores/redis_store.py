"""`RedisStore`: records on a Redis or Valkey server, which several engines on several machines may share.

    engine:kv:IDENTITY:KEY    a record without the zeros at its end; with a key file sealed, and KEY hidden

The server evicts records as its own `maxmemory-policy` says; looking a prompt up counts as a use of it. A server that
does not answer in time, or refuses a command, is not asked for 30 s: one warning, and until then calls fail at once.

With the file of `--kv-store-key` a value is encrypted and authenticated with AES-256-GCM, its name included, and KEY is
a keyed hash. The server and the network see the number, the sizes and the uses of records; they may lose records, or
give back old ones of the same name, which have the same KV.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...runtime.config.kv_store_address import KVStoreAddress
from ...runtime.errors import ConfigError
from .page_store import StoreError
from .segment_file import RecordBuffer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

OFF_S: Final = 30.0
CONNECT_LIMIT_S: Final = 1.0
ANSWER_LIMIT_S: Final = 2.0
"""The server must send or take something in this time, else the call ends. A piece of a load is 4 MiB."""
KEY_FILE_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_SCAN_COUNT: Final = 1000
_INSTALL: Final = "install them with pip install 'engine[redis]', in the repository pip install '.[redis]'"


def connect(address: KVStoreAddress) -> Any:
    """A client, which connects at its first command.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError(f"kv_store is {address}, which needs the package redis; {_INSTALL}") from error
    return redis.Redis(
        host=address.host,
        port=address.port,
        db=address.db,
        username=address.user or None,
        password=address.password or None,
        ssl=address.tls,
        socket_connect_timeout=CONNECT_LIMIT_S,
        socket_timeout=ANSWER_LIMIT_S,
        retry=Retry(NoBackoff(), 0),  # a retry would double the limits
        protocol=2,
    )


def check_store(address: KVStoreAddress, client: Any) -> None:
    """Try the store at the start: connect, write, read.

    Raises:
        ConfigError: it does not work.
    """
    from redis.exceptions import AuthenticationError, RedisError, ResponseError

    name = f"engine:kv:probe:{os.urandom(8).hex()}"
    try:
        client.set(name, b"1", ex=1)
        if client.get(name) != b"1":
            raise ConfigError(f"kv_store is {address}, which loses what is written; name another server")
        client.unlink(name)
    except AuthenticationError as error:
        raise ConfigError(
            f"kv_store is {address}, which refuses the user or the password: {error}; write them as "
            "redis://USER:PASSWORD@host:port/db, or redis://:PASSWORD@... without a user"
        ) from error
    except (RedisError, OSError) as error:
        words = _words(error)
        if "DB index" in words or "Invalid Database" in words:
            fix = "end the URL with a smaller database, such as /0"
        elif isinstance(error, ResponseError):
            fix = "let this user read, write and delete keys, or name a server that may be written"
        else:
            fix = "start redis-server or valkey-server there, or leave --kv-store out"
        raise ConfigError(f"kv_store is {address}, which cannot be used: {words}; {fix}") from error


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


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
            raise ConfigError(f"kv_store_key needs the package cryptography; {_INSTALL}") from error
        self._aead: AESGCM = AESGCM(blake2b(secret, digest_size=32, person=b"kv values").digest())
        self._names = blake2b(secret, digest_size=32, person=b"kv names").digest()

    def name(self, key: bytes) -> bytes:
        """What the server sees instead of a key."""
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


class RedisStore:
    """See the module. A `PageStore`."""

    def __init__(
        self,
        address: KVStoreAddress,
        identity: bytes,
        client: Any,
        seal: Seal | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts.

        Args:
            client: of `connect`.
            seal: None: records are not sealed.
        """
        from redis.exceptions import RedisError, ResponseError

        self.used_bytes = -1  # only the server knows
        self._address = address
        self._client = client
        self._seal = seal
        self._now_s = now_s
        self._failures = (RedisError, OSError)
        self._refusal = ResponseError
        self._prefix = b"engine:kv:" + identity.hex().encode() + b":"
        self._off_until_s: float | None = None
        self._no_writes_until_s: float | None = None
        self._why = ""
        self._must_forget = False
        self._has_warned = False
        logger.info("kv_store=%s sealed=%s identity=%s", address, seal is not None, identity.hex()[:16])

    def find(self, keys: Sequence[bytes]) -> int:
        found = self._each("touch", keys)  # unlike EXISTS it is a use for the server's eviction
        return found.index(False) if False in found else len(found)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._each("exists", keys)

    def read(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        names = [self._name(key) for key in keys]
        with self._asking():
            values = self._client.mget(names) if names else []
        for row, (key, name, value) in enumerate(zip(keys, names, values, strict=True)):
            if value is None:
                return row
            record = value if self._seal is None else self._seal.open(name, value)
            if len(record) == buffer.records.shape[1]:
                buffer.records[row] = np.frombuffer(record, np.uint8)
            if len(record) != buffer.records.shape[1] or not buffer.holds(row, key):
                self._lose(name)
                return row
        return len(keys)

    def write(self, keys: Sequence[bytes], buffer: RecordBuffer) -> int:
        if self._no_writes_until_s is not None and self._now_s() < self._no_writes_until_s:
            return 0
        with self._asking():
            pipeline = self._client.pipeline(transaction=False)
            for row, key in enumerate(keys):
                buffer.seal(row, key)
                name, record = self._name(key), buffer.records[row].data
                value = record.tobytes() if self._seal is None else self._seal.close(name, record)
                pipeline.set(name, value)
            try:
                _answers(pipeline)
            except self._refusal as error:  # it is full, or may only be read
                if self._no_writes_until_s is None:
                    logger.warning(
                        "%s: stores nothing, and tries every %d s: %s", self._address, OFF_S, error
                    )
                self._no_writes_until_s = self._now_s() + OFF_S
                return 0
        self._no_writes_until_s = None
        return len(keys)

    def forget(self) -> None:
        """Delete the records; if the server does not answer, at once when it does, before anything is found there."""
        self._must_forget = True
        with contextlib.suppress(StoreError), self._asking():
            pass

    def close(self) -> None:
        with contextlib.suppress(*self._failures):
            self._client.close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + (key if self._seal is None else self._seal.name(key))

    def _each(self, command: str, keys: Sequence[bytes]) -> list[bool]:
        """Ask about each key in one round trip."""
        with self._asking():
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                getattr(pipeline, command)(self._name(key))
            answers = _answers(pipeline)
        return [bool(answer) for answer in answers]

    def _lose(self, name: bytes) -> None:
        """Delete a damaged record, so that it is stored again."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s: a record is damaged; its tokens are computed again", self._address)
        with self._asking():
            self._client.unlink(name)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Ask the server, unless it has failed less than 30 s ago.

        Raises:
            StoreError: it has, or fails now.
        """
        if self._off_until_s is not None and self._now_s() < self._off_until_s:
            raise StoreError(self._why)
        try:
            if self._must_forget:
                for name in self._client.scan_iter(match=self._prefix + b"*", count=_SCAN_COUNT):
                    self._client.unlink(name)
                self._must_forget = False
            yield
        except self._failures as error:
            if self._off_until_s is None:
                logger.warning(
                    "%s: not used, and tried again every %d s: %s", self._address, OFF_S, _words(error)
                )
            self._off_until_s = self._now_s() + OFF_S
            self._why = f"the store has failed: {_words(error)}"
            raise StoreError(self._why) from error
        if self._off_until_s is not None:
            self._off_until_s = None
            logger.info("%s: used again", self._address)


def _answers(pipeline: Any) -> list[Any]:
    """The answers of all commands; raises the first error that is one, without the command, whose value is long."""
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
