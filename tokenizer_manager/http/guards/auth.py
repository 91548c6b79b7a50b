"""`Authorizer`: checks API keys, and which caller may do what affects all requests. With keys set, every path except
exactly `/health` and `/ping` needs one, whether the path exists or not.

A list of protected paths would let `//v1` and `/V1` through; so only the open paths are listed. A path is used as it
was sent, both for this check and to find its handler.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ....runtime.config.server_config import ServerConfig
from ....runtime.errors import ConfigError, RequestError
from ...scheduling_options import (
    Bootstrap,
    Scheduling,
    checked_priority,
    checked_salt,
    checked_tier,
    checked_timeout,
    digest_of,
    tenant_of,
)
from ..schema.cache_fields import is_kept_in_memory, keep_s_of, session_of
from ..schema.kv_hints import MAX_ACTIONS_IN_TURN, checked_hints, keep_s_with
from ..schema.values import Body

OPEN_PATHS: Final = frozenset({"/health", "/ping"})
_KEY_HEADER: Final = b"x-api-key"
_MAX_KEYS: Final = 10_000  # all are compared with each token: 0.3 us each
_SENDABLE: Final = re.compile(r"[^\x00-\x20\x7f](?:[^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?")
"""A header value that arrives unchanged: no control characters, no space at the ends."""


def key_of(path: str, headers: Mapping[bytes, bytes]) -> bytes:
    """The key in the header of Anthropic's clients, on their routes; b"" for none."""
    return headers.get(_KEY_HEADER, b"").strip() if takes_key_header(path) else b""


def takes_key_header(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class Keys(NamedTuple):
    """The keys of a server: its clients' keys and the admin key."""

    clients: tuple[str, ...] = ()
    admin: str | None = None


def read_keys(config: ServerConfig) -> Keys:
    """The keys from flags, environment and `--api-key-file`.

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


def refuse_pipe(setting: str, path: str) -> None:
    """Refuse a pipe, such as `<(command)` of a shell, for a file that is read again after a restart.

    Raises:
        ConfigError: it is one.
    """
    if Path(path).is_fifo():
        raise ConfigError(
            f"{setting} is {path!r}, which is a pipe, but each new process of the server reads it; name a regular file"
        )


def _keys_in(path: str) -> list[tuple[int, str]]:
    """Line number and key of each line that has one."""
    refuse_pipe("api_key_file", path)
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


class Caller(NamedTuple):
    """The sender of a request, as its API key identifies it.

    Attributes:
        token: the bearer token; b"" for none. Checked, if the server has keys.
        owner: a digest of the checked key; "" if the server has no keys. A request can be aborted by its owner and by
            an admin.
        admin: may do what affects all requests.
        isolated: shares prefixes only among its own requests, and is accounted separately.
        session_header: the name and the value of the request's header that names its session; see `session_header`.
    """

    token: bytes = b""
    owner: str = ""
    admin: bool = True
    isolated: bool = False
    session_header: tuple[str, str] = ("", "")

    def namespace(self, cache_salt: str | None) -> str:
        """Its namespace of the prefix cache for a salt; isolated owners never share one."""
        salt = cache_salt or ""
        return f"{self.owner}:{salt}" if self.isolated else salt

    def tenant(self, user: str | None) -> str:
        """The tenant that a request with this `user` is accounted to; an isolated caller cannot name another's."""
        if self.isolated and user:
            return f"key-{self.owner}/{digest_of(user.encode())}"
        return tenant_of(user, self.token) or (f"key-{self.owner}" if self.owner else "")

    def scheduling(
        self,
        request: msgspec.Struct,
        user: str | None = None,
        *,
        body: Body | None = None,
        user_session: str | None = None,
    ) -> Scheduling:
        """The scheduling options of a body, which has the fields of its API.

        Args:
            request: the body.
            user: the tenant's name, in an API that has no field `user`.
            body: as it was sent, for the breakpoints of its prompt; None: it has none.
            user_session: the session, in an API where the name of the user contains it.

        Raises:
            RequestError: a value is out of range.
        """

        def field(name: str) -> Any:
            return getattr(request, name, None)

        bootstrap = None
        if field("bootstrap_room") is not None or field("kv_transfer_params") is not None:
            bootstrap = Bootstrap(
                host=field("bootstrap_host"),
                port=field("bootstrap_port"),
                room=field("bootstrap_room"),
                kv_transfer_params=field("kv_transfer_params"),
            )
        extra_key = self.namespace(checked_salt(field("cache_salt")))
        session = session_of(request, self.session_header, self.owner, extra_key, user_session)
        envelope = field("kv_hints")
        hints = () if envelope is None else checked_hints(envelope, "kv_hints.", MAX_ACTIONS_IN_TURN)
        tier, timeout_s = checked_tier(
            field("service_tier"), field("background_options"), checked_timeout(field("timeout"), "timeout")
        )
        keep_s = None if body is None else keep_s_of(body, field("prompt_cache_options"))
        return Scheduling(
            priority=checked_priority(field("priority")),
            tenant=self.tenant(user or field("user") or field("safety_identifier")),
            extra_key=extra_key,
            queue_timeout_s=checked_timeout(field("queue_timeout"), "queue_timeout"),
            timeout_s=timeout_s,
            service_tier=tier,
            replica=field("data_parallel_rank"),
            owner=self.owner,
            keep_s=keep_s_with(hints, keep_s, has_session=bool(session)),
            in_memory=is_kept_in_memory(field("prompt_cache_retention")),
            session=session,
            hints=hints,
            bootstrap=bootstrap,
        )


class Authorizer:
    """Checks bearer tokens."""

    def __init__(self, keys: Keys, *, isolate: bool = False, loopback: bool = True) -> None:
        """Demand one of `keys`; without keys every request is authorized.

        Args:
            keys: verified.
            isolate: `--isolate-tenants`.
            loopback: only this machine can connect, so that without an admin key every caller is an admin.
        """
        self._clients = tuple(map(_hashed, keys.clients))
        self._admin = None if keys.admin is None else _hashed(keys.admin)
        self._isolate = isolate
        self._loopback = loopback
        # Isolated tenants connect through a proxy on this machine, so being local makes none of them an admin.
        self._everyone_is_admin = self._admin is None and loopback and not isolate

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return bool(self._clients)

    @property
    def trusts_this_machine(self) -> bool:
        """Whether only this machine can connect, and needs no key."""
        return self._loopback and not self._clients

    def authenticate(self, path: str, token: bytes) -> Caller:
        """The caller that sent a bearer token.

        Args:
            path: of the request, as it was sent.
            token: b"" for none.

        Raises:
            RequestError: 401.
        """
        hashed = hashlib.sha256(token).digest()
        if token and self._admin is not None and hmac.compare_digest(hashed, self._admin):
            return Caller(token, owner=digest_of(token), admin=True, isolated=self._isolate)
        if self._clients and not (path in OPEN_PATHS and not token):
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

    def caller_of(self, owner: str) -> Caller:
        """The caller of a request that an authenticated owner has left with the server, such as a line of a batch."""
        return Caller(owner=owner, admin=False, isolated=self._isolate)

    def check_admin(self, caller: Caller, what: str) -> None:
        """Refuse what affects all requests, unless the caller is an admin.

        Args:
            caller: from `authenticate`.
            what: begins the message: `/flush_cache affects ...`.

        Raises:
            RequestError: 403.
        """
        if caller.admin:
            return
        hint = (
            "start the server with --admin-api-key (ENGINE_ADMIN_API_KEY) and send that key"
            if self._admin is None
            else "send the admin key as `Authorization: Bearer <key>`"
        )
        raise RequestError(
            f"{what} affects all requests, and this needs the admin key; {hint}",
            code="admin_key_required",
            status=403,
        )


def _hashed(key: str) -> bytes:
    """Keys are compared as hashes: of one length, so that the time taken does not reveal a key's length."""
    return hashlib.sha256(key.encode()).digest()


def _is_among(hashed: bytes, keys: Sequence[bytes]) -> bool:
    """Whether it is one of the keys. Compares with all of them, so that the time taken does not reveal which."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(hashed, key)
    return found
