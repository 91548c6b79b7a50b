"""Which host names and which web pages may use the API: `Hosts` checks `Host`, `Origins` checks `Origin` (CORS).

A server without keys trusts every client that can connect, and so can every page that is open in a browser on this
machine. CORS alone does not stop them: the page cannot read the answer, but its request runs. So a server without keys
refuses requests with an `Origin` that is not allowed; without `--cors-origin`, every origin but its own. A server with
keys need not: a page does not have the key.

The server's own page (`http/page`) has the origin that the `Host` header names. Only a host name that cannot be rebound
(see `Hosts`) makes an origin the server's own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final

from ....runtime.errors import RequestError
from ..schema.values import show


class Hosts:
    """The allowed names."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """Allow these besides addresses and localhost; `*` allows all."""
        self._any = "*" in allowed
        self._allowed = frozenset(name.lower().removesuffix(".") for name in allowed)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request for another name. A request without a name (HTTP/1.0) is not sent by a browser.

        Raises:
            RequestError: 403.
        """
        host = headers.get(b"host")
        if host is None or self._any:
            return
        if self.is_certain(host):
            return
        name = _name_in(host.decode("latin-1"))
        raise RequestError(
            f"the host name {show(name)} is not one of this server, and may belong to a web page; use its "
            f"address, or allow the name with --allowed-host",
            code="host_not_allowed",
            status=403,
        )

    def is_certain(self, host: bytes) -> bool:
        """Whether a `Host` header has a name that is this server's and cannot be rebound to it; `*` proves nothing."""
        name = _name_in(host.decode("latin-1"))
        return name in self._allowed or _cannot_be_rebound(name)


def _name_in(host: str) -> str:
    """The name without the port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _cannot_be_rebound(name: str) -> bool:
    """Whether it is an address, or a name that browsers do not look up."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


Headers = list[tuple[bytes, bytes]]

_PREFLIGHT_ANSWER: Final[Headers] = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"600"),
]
_EXPOSED: Final = b"retry-after, x-engine-queue-position, x-kv-hints, x-request-id"


class Origins:
    """The allowed origins. Cookies are never allowed: the API has none."""

    def __init__(self, allowed: Sequence[str], *, own: Hosts | None = None) -> None:
        """Allow these; `*` allows all.

        Args:
            allowed: origins.
            own: knows the names of this server; None: the server has no page of its own.
        """
        self._own = own
        self._any = "*" in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def headers_for(self, headers: Mapping[bytes, bytes]) -> Headers:
        """The response headers that let an allowed page read the answer."""
        origin = headers.get(b"origin")
        if origin is None or not self._allows(origin):
            return []
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Headers | None:
        """The response headers for a preflight request, which has no key; None for another request or origin."""
        asks = method == "OPTIONS" and b"access-control-request-method" in headers
        if not (asks and self.headers_for(headers)):
            return None
        # All headers are allowed: OpenAI's client adds ten of its own, and they have no effect here.
        wanted = headers.get(b"access-control-request-headers", b"")
        return [*_PREFLIGHT_ANSWER, *([(b"access-control-allow-headers", wanted)] if wanted else [])]

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request of a page that is not allowed.

        Raises:
            RequestError: 403.
        """
        origin = headers.get(b"origin")
        if origin is not None and not self._allows(origin) and not self._is_own(origin, headers):
            shown = show(origin.decode("latin-1"))
            raise RequestError(
                f"the origin {shown} may not use this server from a browser; allow it with --cors-origin",
                code="origin_not_allowed",
                status=403,
            )

    def _is_own(self, origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the page came from this server."""
        scheme, separator, authority = origin.lower().partition(b"://")
        host = headers.get(b"host", b"").strip().lower()
        if self._own is None or not separator or scheme not in (b"http", b"https"):
            return False
        return bool(host) and authority == host and self._own.is_certain(host)

    def _allows(self, origin: bytes) -> bool:
        return self._any or origin in self._allowed
