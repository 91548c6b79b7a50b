"""`Gate`: who may come in. With a key set, every path but exactly `/health` needs it, known or not, however written.

Comparing paths to a list of protected ones is how `//v1` and `/V1` slip through elsewhere; here nothing is listed but
what is open.
"""

from __future__ import annotations

import hmac
from typing import Final

from ...runtime.errors import RequestError
from .exchange import Exchange

_OPEN_PATHS: Final = frozenset({"/health"})


class Gate:
    """Checks bearer tokens."""

    def __init__(self, api_key: str | None) -> None:
        """Ask for `api_key`, or let everyone in if there is none."""
        self._key = None if api_key is None else api_key.encode()

    def check(self, exchange: Exchange) -> None:
        """Let the request pass.

        Raises:
            RequestError: 401.
        """
        if self._key is None or exchange.path in _OPEN_PATHS:
            return
        token = exchange.bearer_token
        if not token or not hmac.compare_digest(token, self._key):
            given = "is wrong" if token else "is missing"
            raise RequestError(
                f"the API key {given}; send the header `Authorization: Bearer <key>`",
                code="invalid_api_key",
                status=401,
            )
