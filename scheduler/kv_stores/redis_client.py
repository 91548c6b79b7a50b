"""`RedisClient`: a Redis or Valkey server, through the package `redis`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ...runtime.config.kv_store_address import KVStoreAddress
from ...runtime.errors import ConfigError
from .page_store import StoreError
from .store_client import CONNECT_LIMIT_S, INSTALL, WritesRefusedError, check_client

ANSWER_LIMIT_S: Final = 2.0
"""The server must send or take something in this time, else the call ends. A piece of a load is 4 MiB."""
_SCAN_COUNT: Final = 1000


class RedisClient:
    """A `StoreClient`."""

    def __init__(self, address: KVStoreAddress, client: Any = None) -> None:
        """Connect, and try the server.

        Args:
            client: of the package; None: a new one.

        Raises:
            ConfigError: the package is not installed, or the server cannot be used.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(f"kv_store is {address}, which needs the package redis; {INSTALL}") from error
        self._errors = redis.exceptions
        self._client = client or redis.Redis(
            host=address.host,
            port=address.port,
            db=address.db,
            username=address.user or None,
            password=address.password or None,
            ssl=address.scheme == "rediss",
            socket_connect_timeout=CONNECT_LIMIT_S,
            socket_timeout=ANSWER_LIMIT_S,
            retry=Retry(NoBackoff(), 0),  # a retry would double the limits
            protocol=2,
        )
        try:
            check_client(address, self)
        except WritesRefusedError as error:
            fix = "let this user read, write and delete keys, or name a server that may be written"
            raise ConfigError(f"kv_store is {address}, which cannot be used: {error}; {fix}") from error
        except StoreError as error:
            if isinstance(error.__cause__, self._errors.AuthenticationError):
                raise ConfigError(
                    f"kv_store is {address}, which refuses the user or the password: {error}; write them as "
                    "redis://USER:PASSWORD@host:port/db, or redis://:PASSWORD@... without a user"
                ) from error
            if "DB index" in str(error) or "Invalid Database" in str(error):
                fix = "end the URL with a smaller database, such as /0"
            else:
                fix = "start redis-server or valkey-server there, or leave --kv-store out"
            raise ConfigError(f"kv_store is {address}, which cannot be used: {error}; {fix}") from error

    def touch(self, names: Sequence[str]) -> list[bool]:
        return self._each("touch", names)  # unlike EXISTS it is a use for the server's eviction

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self._each("exists", names)

    def get(self, names: Sequence[str], num_bytes: int) -> list[bytes | None]:
        with self._calling():
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.getrange(name, 0, num_bytes)  # a byte more shows that a value is too long
            parts = [self._part(answer) for answer in pipeline.execute(raise_on_error=False)]
        is_there = [True] * len(parts) if all(parts) else self.exists(names)
        return [part if found else None for part, found in zip(parts, is_there, strict=True)]

    def _part(self, answer: Any) -> bytes:
        if isinstance(answer, self._errors.ResponseError) and str(answer).startswith("WRONGTYPE"):
            return b""  # no string: damaged
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        with self._calling():
            pipeline = self._client.pipeline(transaction=False)
            for name, value in zip(names, values, strict=True):
                pipeline.set(name, value)
            try:
                _answers(pipeline)
            except self._errors.ResponseError as error:
                if "DB index" in str(error):
                    raise  # of the connection
                raise WritesRefusedError(str(error)) from error

    def remove(self, name: str) -> None:
        with self._calling():
            self._client.unlink(name)

    def remove_all(self, prefix: str, limit_s: float) -> None:
        ends_s, cursor = time.monotonic() + limit_s, 0
        with self._calling():
            while True:
                cursor, names = self._client.scan(cursor, match=prefix + "*", count=_SCAN_COUNT)
                if names:
                    self._client.unlink(*names)
                if not cursor or time.monotonic() > ends_s:
                    return

    def close(self) -> None:
        with contextlib.suppress(self._errors.RedisError, OSError):
            self._client.close()

    def _each(self, command: str, names: Sequence[str]) -> list[bool]:
        """Ask about each name in one round trip."""
        with self._calling():
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                getattr(pipeline, command)(name)
            answers = _answers(pipeline)
        return [bool(answer) for answer in answers]

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            yield
        except (self._errors.RedisError, OSError) as error:
            raise StoreError(str(error) or type(error).__name__) from error


def _answers(pipeline: Any) -> list[Any]:
    """The answers of all commands; raises the first error that is one, without the command: its value is long."""
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
