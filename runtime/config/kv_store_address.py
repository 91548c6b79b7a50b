"""`KVStoreAddress`: the server of `--kv-store`, parsed from a URL; no message shows its password."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from ..errors import ConfigError

_FORM: Final = "redis://[user:password@]host:port/db, rediss:// with TLS, or mooncake://master:port"
_PORTS: Final = {"redis": 6379, "rediss": 6379, "mooncake": 50051}
_MOST_DIGITS: Final = 9


class KVStoreAddress(NamedTuple):
    """A database of a Redis or Valkey server, or the master of a Mooncake store; "": no user, or no password."""

    scheme: str
    host: str
    port: int
    db: int
    user: str
    password: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + ("" if self.scheme == "mooncake" else f"/{self.db}")

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
    shown = _shown(url)
    try:
        parts = urlsplit(url)
        db = parts.path.removeprefix("/") or "0"
        address = KVStoreAddress(
            scheme=parts.scheme,
            host=parts.hostname or "",
            port=_PORTS.get(parts.scheme, 1) if parts.port is None else parts.port,
            db=int(db) if db.isascii() and db.isdigit() and len(db) <= _MOST_DIGITS else -1,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
        )
    except ValueError:  # its text may have a part of the password
        raise ConfigError(
            f"kv_store is {shown!r}, but its host or its port cannot be read; write {_FORM}, and characters of a "
            "password that have a meaning in a URL as %40 for @"
        ) from None
    for is_wrong, words in (
        (parts.scheme not in _PORTS, "such stores are not known"),
        (not address.host, "it has no host"),
        (not address.port, "port 0 is no port of a server"),
        (address.db < 0, f"its database is {db.rpartition('@')[2]!r} and not a number"),
        (
            parts.scheme == "mooncake" and bool(parts.username or parts.password or address.db),
            "a master of Mooncake has no users and no databases",
        ),
        (bool(parts.query or parts.fragment), "it has options, and there are none"),
    ):
        if is_wrong:
            raise ConfigError(f"kv_store is {shown!r}, but {words}; write {_FORM}")
    return address


def _shown(url: str) -> str:
    """A URL, which may be none, without what may be its user, its password or an option with one."""
    before, at, place = url.rpartition("@")
    start = before.partition("//")[0] + "//..." if "//" in before else "..."
    return (start + at if at else "") + re.sub(r"(?s)([?#]).*", r"\1...", place)
