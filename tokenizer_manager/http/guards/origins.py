"""`Origins`: the web pages that may use the API from a browser (CORS): without `--cors-origin` only the server's own.

A server without keys trusts every client that can connect, and so can every page that is open in a browser on this
machine. CORS alone does not stop them: the page cannot read the answer, but its request runs. So a server without keys
refuses requests with an `Origin` that is not allowed. A server with keys need not: a page does not have the key.

The server's own page (`http/page`) has the origin that the `Host` header names. Only a host name that cannot be rebound
(see `Hosts`) makes an origin the server's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ....runtime.errors import RequestError
from ..schema.json_body import show
from .hosts import Hosts

Headers = list[tuple[bytes, bytes]]

_PREFLIGHT_ANSWER: Final[Headers] = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"600"),
]
_EXPOSED: Final = b"retry-after, x-engine-queue-position, x-request-id"


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
