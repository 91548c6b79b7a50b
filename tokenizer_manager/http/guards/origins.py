"""`Origins`: which web pages may use the API from a browser (CORS); none, unless `--cors-origin` says so.

A server that asks for no key trusts whoever can connect, and every page that is open in a browser on this machine can.
CORS alone does not stop that: a page may not read the answer, but its request is carried out. So such a server refuses
requests that a browser marks with an origin which is not allowed. With a key there is nothing to abuse: no page has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ....runtime.errors import RequestError
from ..exchange import Exchange
from ..schema.json_body import show

Headers = list[tuple[bytes, bytes]]

_PREFLIGHT_ANSWER: Final[Headers] = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-max-age", b"600"),
]
_EXPOSED: Final = b"retry-after, x-engine-queue-position, x-request-id"


class Origins:
    """The allowed ones. Cookies are never allowed: the API has none."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """Allow these, or all with `*`."""
        self._any = "*" in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def headers_for(self, exchange: Exchange) -> Headers:
        """What lets the page read the answer."""
        origin = exchange.headers.get(b"origin")
        if origin is None or not self._allows(origin):
            return []
        return [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight(self, exchange: Exchange) -> Headers | None:
        """The answer to a browser that asks beforehand, which it does without a key; None if this is no such question,
        or not from an allowed origin.
        """
        asks = exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers
        if not (asks and self.headers_for(exchange)):
            return None
        # Whatever it wants to send: OpenAI's client adds ten headers of its own, and none means anything here.
        wanted = exchange.headers.get(b"access-control-request-headers", b"")
        return [*_PREFLIGHT_ANSWER, *([(b"access-control-allow-headers", wanted)] if wanted else [])]

    def check(self, exchange: Exchange) -> None:
        """Refuse a request that some page had a browser send.

        Raises:
            RequestError: 403.
        """
        origin = exchange.headers.get(b"origin")
        if origin is not None and not self._allows(origin):
            shown = show(origin.decode("latin-1"))
            raise RequestError(
                f"the origin {shown} may not use this server from a browser; allow it with --cors-origin",
                code="origin_not_allowed",
                status=403,
            )

    def _allows(self, origin: bytes) -> bool:
        return self._any or origin in self._allowed
