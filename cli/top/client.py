"""`Client`: asks a server for snapshots."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any, Final, Self

import httpx

from ...runtime.errors import RequestError, ServerError
from ..chat.http import base_url, connection_problem, error_of
from .snapshot import Snapshot

_TIMEOUT_S: Final = 10.0


class Unreachable(ServerError):
    """No server answers now; a live view tries again."""


class Client:
    """One server. A context manager."""

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float = _TIMEOUT_S, cacert: str | None = None
    ) -> None:
        """Prepare the client; it connects with the first request.

        Args:
            cacert: a file of certificates (PEM) to trust; None for those that the system trusts.

        Raises:
            RequestError: not a URL, or such a file cannot be used.
        """
        self.base = base_url(url)
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=timeout_s, verify=_trust(cacert))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def look(self) -> Snapshot:
        """The current state.

        Raises:
            Unreachable: no server answers, or it is shutting down.
            RequestError: a server refuses.
            ServerError: it is not an engine.
        """
        info = self._get("/server_info")
        return Snapshot.from_answers(self.base, info, self._get("/v1/requests"))

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._client.get(f"{self.base}{path}")
        except httpx.HTTPError as error:
            hint = "start one with `engine serve`, or give the URL of one"
            raise Unreachable(connection_problem(self.base, error, hint)) from None
        if response.status_code == httpx.codes.NOT_FOUND:
            raise ServerError(f"{self.base} has no {path}; is it an engine of this version? Check the URL")
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise Unreachable(str(error_of(response)))
        if response.status_code != httpx.codes.OK:
            raise error_of(response)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerError(f"{self.base}{path} is no JSON object; is it an engine? Check the URL")
        return answer


def _trust(cacert: str | None) -> ssl.SSLContext | bool:
    """How certificates are verified; True is httpx's default, which honors SSL_CERT_FILE."""
    if cacert is None:
        return True
    try:
        return ssl.create_default_context(cafile=cacert)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"--cacert {cacert} cannot be used: {reason}; give a file of certificates in PEM form"
        ) from None
