"""`Gate`: who may come in, and who may do what concerns everybody. With keys set, every path but exactly `/health`
needs one, known or not, however written.

Comparing paths to a list of protected ones is how `//v1` and `/V1` slip through elsewhere; here nothing is listed but
what is open. A path is looked up once, as it came, for both the question who may go there and who answers.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ....runtime.config.server_config import ServerConfig
from ....runtime.errors import ConfigError, RequestError
from ...admission.scheduling_options import digest_of
from ..exchange import Exchange
from .caller import Caller

OPEN_PATHS: Final = frozenset({"/health"})
_MAX_KEYS: Final = 10_000  # all are compared with each token: 0.3 us each
_SENDABLE: Final = re.compile(r"[^\x00-\x20\x7f](?:[^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?")
"""What arrives as a header's value as it was sent: no control characters, no space at the ends."""


class Keys(NamedTuple):
    """The keys of a server: of its clients, and of its operator."""

    clients: tuple[str, ...] = ()
    admin: str | None = None


def read_keys(config: ServerConfig) -> Keys:
    """The keys that flags, environment and `--api-key-file` give.

    Raises:
        ConfigError: the file cannot be read or has none, or a key cannot be sent in a header.
    """
    clients = dict.fromkeys(config.api_key, "api_key")
    if config.api_key_file is not None:
        clients |= {key: f"{config.api_key_file}:{line}" for line, key in _keys_in(config.api_key_file)}
    if len(clients) > _MAX_KEYS:
        raise ConfigError(f"there are {len(clients)} API keys, the limit is {_MAX_KEYS}; use fewer")
    admin = {} if config.admin_api_key is None else {config.admin_api_key: "admin_api_key"}
    for key, place in (clients | admin).items():
        if not _SENDABLE.fullmatch(key):
            raise ConfigError(
                f"{place}: a key is empty, or has control characters or spaces at its ends, so that no client could "
                f"send it; use another one"
            )
    if clients.keys() & admin.keys():
        raise ConfigError("admin_api_key is also one of the clients' keys; use another one")
    return Keys(tuple(clients), config.admin_api_key)


def _keys_in(path: str) -> list[tuple[int, str]]:
    """Line number and key of each line that has one."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: the API keys cannot be read: {reason}; see --api-key-file") from None
    keys = [(i, line.strip()) for i, line in enumerate(lines, 1)]
    keys = [(i, key) for i, key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: there is no API key in it; write one per line")
    return keys


class Gate:
    """Checks bearer tokens."""

    def __init__(self, keys: Keys, *, isolate: bool = False, loopback: bool = True) -> None:
        """Ask for one of `keys`, or let everyone in if there are none.

        Args:
            keys: verified.
            isolate: `--isolate-tenants`.
            loopback: only this machine can connect, so that without an admin key everyone is one.
        """
        self._clients = tuple(map(_hashed, keys.clients))
        self._admin = None if keys.admin is None else _hashed(keys.admin)
        self._isolate = isolate
        self._loopback = loopback
        # Tenants that must not learn of each other come through a proxy on this machine: none of them is an admin.
        self._everyone_is_admin = self._admin is None and loopback and not isolate

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return bool(self._clients)

    @property
    def trusts_this_machine(self) -> bool:
        """Whether only those on this machine can connect, and all of them may."""
        return self._loopback and not self._clients

    def admit(self, exchange: Exchange) -> Caller:
        """Let a request in, and say on whose behalf it is made.

        Raises:
            RequestError: 401.
        """
        token = exchange.bearer_token
        hashed = hashlib.sha256(token).digest()
        if token and self._admin is not None and hmac.compare_digest(hashed, self._admin):
            return Caller(token, owner=digest_of(token), admin=True, isolated=self._isolate)
        if self._clients and not (exchange.path in OPEN_PATHS and not token):
            if not (token and _is_among(hashed, self._clients)):
                given = "is wrong" if token else "is missing"
                raise RequestError(
                    f"the API key {given}; send the header `Authorization: Bearer <key>`",
                    code="invalid_api_key",
                    status=401,
                )
            return Caller(
                token, owner=digest_of(token), admin=self._everyone_is_admin, isolated=self._isolate
            )
        return Caller(token, admin=self._everyone_is_admin)

    def check_admin(self, caller: Caller, what: str) -> None:
        """Refuse what concerns everybody to who may not do it.

        Args:
            caller: as `admit` gave it.
            what: begins the message: `/flush_cache concerns ...`.

        Raises:
            RequestError: 403.
        """
        if caller.admin:
            return
        way_out = (
            "start the server with --admin-api-key (ENGINE_ADMIN_API_KEY) and send that key"
            if self._admin is None
            else "send the admin key as `Authorization: Bearer <key>`"
        )
        raise RequestError(
            f"{what} concerns everybody's requests, and this needs the admin key; {way_out}",
            code="admin_key_required",
            status=403,
        )


def _hashed(key: str) -> bytes:
    """What is compared: of one length, so that not even a key's length shows in the time it takes."""
    return hashlib.sha256(key.encode()).digest()


def _is_among(hashed: bytes, keys: Sequence[bytes]) -> bool:
    """Whether it is one of the keys; looks at all of them, so that the time does not tell which."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(hashed, key)
    return found
