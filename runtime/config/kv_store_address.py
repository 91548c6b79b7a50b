"""`KVStoreAddress`: the server of `--kv-store`, parsed from a URL whose password no message shows."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from ..errors import ConfigError

_FORM: Final = "redis://[user:password@]host:port/db, or rediss:// with TLS"
_PORT: Final = 6379
_MOST_DIGITS: Final = 9


class KVStoreAddress(NamedTuple):
    """A database of a Redis or Valkey server; `user` and `password` are "" if there are none."""

    host: str
    port: int
    db: int
    user: str
    password: str
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' * self.tls}://{host}:{self.port}/{self.db}"

    @property
    def is_local(self) -> bool:
        """Whether nothing that is sent there leaves the machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_kv_store(url: str) -> KVStoreAddress:
    """Parse `--kv-store`.

    Raises:
        ConfigError: it is no such URL.
    """
    shown = re.sub(r"//.*@", "//...@", url)
    try:
        parts = urlsplit(url)
        db = parts.path.removeprefix("/") or "0"
        address = KVStoreAddress(
            host=parts.hostname or "",
            port=_PORT if parts.port is None else parts.port,
            db=int(db) if db.isascii() and db.isdigit() and len(db) <= _MOST_DIGITS else -1,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            tls=parts.scheme == "rediss",
        )
    except ValueError as error:  # its text may have a part of the password
        raise ConfigError(
            f"kv_store is {shown!r}, but its host or its port cannot be read; write {_FORM}, and characters of a "
            "password that have a meaning in a URL as %40 for @"
        ) from error
    for is_wrong, words in (
        (parts.scheme not in ("redis", "rediss"), "such stores are not known"),
        (not address.host, "it has no host"),
        (not address.port, "port 0 is no port of a server"),
        (address.db < 0, f"its database is {db!r} and not a number"),
        (bool(parts.query or parts.fragment), "it has options, and there are none"),
    ):
        if is_wrong:
            raise ConfigError(f"kv_store is {shown!r}, but {words}; write {_FORM}")
    return address
