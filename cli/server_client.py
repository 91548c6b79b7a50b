"""`ServerConnection`: a server with an OpenAI-compatible API that a command asks; `attach`, `server_url` find one here.

A second copy of the weights would take memory and seconds: commands attach to a server of this user on this machine,
unless a flag, a file or a variable says how to load a model.
"""

from __future__ import annotations

import errno
import os
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Protocol, TypeVar

import httpx

from ..launch.child.socket_dir import running_servers
from ..runtime.config.config_fields import config_fields
from ..runtime.config.config_sources import DEFAULT_ORIGIN, Layer, MergedConfig
from ..runtime.config.server_config import ServerConfig
from ..runtime.errors import EngineError, RequestError, ServerError
from .options import FlagValues

_SERVER: Final = ServerConfig()
_DEFAULT_URL: Final = f"http://{_SERVER.host}:{_SERVER.port}"
QUICK_TIMEOUT_S: Final = 10.0
"""Limit for requests that wait for no model."""
_TIMEOUT: Final = httpx.Timeout(10.0, read=None)  # an answer may wait in the server's queue for any time
_BAD_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"


class ServerConnection:
    """An HTTP client of a server, and the model that it is asked for.

    Attributes:
        base: the URL without a path.
        client: sends the key with each request.
        entry: of the model in the server's list.
        model: its name.
        where: `at http://...`.
    """

    def __init__(self, url: str, *, api_key: str | None, model: str | None, how_to_start: str) -> None:
        """Connect, and find out which model is served.

        Args:
            url: of the server, with or without `/v1`.
            api_key: bearer token.
            model: the name to ask for; None takes the first the server lists.
            how_to_start: the fix if no server listens there.

        Raises:
            RequestError: not a URL, or no such model there.
            ServerError: no server answers.
        """
        self.base = base_url(url)
        self.where = f"at {self.base}"
        self._how_to_start = how_to_start
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self.client = httpx.Client(headers=headers, timeout=_TIMEOUT)
        try:
            self.entry = self._find_model(model)
        except EngineError:
            self.client.close()
            raise
        self.model = str(self.entry["id"])

    def failure(self, error: httpx.HTTPError) -> ServerError:
        """The error for a request without an answer; see `why_unreachable`."""
        return ServerError(connection_problem(self.base, error, self._how_to_start))

    def _find_model(self, model: str | None) -> Mapping[str, Any]:
        try:
            response = self.client.get(f"{self.base}/v1/models", timeout=QUICK_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self.failure(error) from None
        if response.status_code != httpx.codes.OK:
            raise error_of(response)
        try:
            entries = {str(entry["id"]): entry for entry in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self.base}/v1/models does not speak the OpenAI API; check --url") from None
        if not entries:
            raise ServerError(f"{self.base} serves no model")
        if model is not None and model not in entries:
            raise RequestError(
                f"{self.base} has no model {model!r}; it serves {', '.join(entries)}", param="model"
            )
        found: Mapping[str, Any] = entries[model] if model is not None else next(iter(entries.values()))
        return found


class Connected(Protocol):
    """A backend over a server."""

    model: str
    where: str


Backend = TypeVar("Backend", bound=Connected)


def attach(
    connect: Callable[[str], Backend],
    note: Callable[[str], None],
    *,
    word: str = "attached to",
    passes_over: Collection[str] = (),
) -> Backend | None:
    """Connect to the newest server of this user on this machine that can answer.

    Args:
        connect: makes the backend for a URL.
        note: called with one line about the server that is taken, and about each that is not.
        word: begins the line about the one that is taken.
        passes_over: codes of errors without a line.

    Returns:
        None: no server runs, or none takes requests.
    """
    servers = [record for record in reversed(running_servers()) if record.url]
    for record in servers:
        try:
            backend = connect(record.url)
        except EngineError as error:
            if getattr(error, "code", None) not in passes_over:
                note(f"the server at {record.url} is not used: {error}")
            continue
        others = f", the newest of {len(servers)} servers (--url chooses another one)" if servers[1:] else ""
        note(f"{word} {backend.model} {backend.where}{others}; --no-attach loads a model here")
        return backend
    return None


def names_a_model(merged: MergedConfig, base: Layer) -> bool:
    """Whether a setting of the model is given besides those of `base`; a seed is one of the answers, too."""
    own = {name: value.origin for name, value in base.items()}
    return any(
        origin not in (DEFAULT_ORIGIN, own.get(name))
        for name, origin in merged.origins.items()
        if name != "seed"
    )


def refuse_settings(settings: FlagValues, *, except_for: Collection[str]) -> None:
    """Refuse settings of an engine where a server runs already.

    Raises:
        RequestError: one is given.
    """
    for name, value in settings.items():
        if value is not None and name not in except_for:
            flag = config_fields()[name].flag
            raise RequestError(f"{flag} has no effect on a server that runs already; drop it")


def server_url(given: str | None) -> str:
    """The URL that is given; else that of the newest server of this user on this machine; else the default one."""
    if given:
        return given
    return next((record.url for record in reversed(running_servers()) if record.url), _DEFAULT_URL)


def base_url(url: str) -> str:
    """`host:port`, `http://host:port` and `http://host:port/v1` all name the same server."""
    if "://" not in url:
        url = f"http://{url}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RequestError(f"--url is {url!r}, which is no URL: {error}", param="url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestError(f"--url is {url!r}, but it must look like http://127.0.0.1:30000", param="url")
    return str(parsed).rstrip("/").removesuffix("/v1")


def is_busy(response: httpx.Response) -> bool:
    """Whether a server refuses a request for now, and says when to send it again."""
    refuses = response.status_code in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
    return refuses and "retry-after" in response.headers


def wait_s(response: httpx.Response) -> float:
    """Seconds to wait before a refused request is sent again."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "1")))  # in this order 0 for NaN, too
    except ValueError:  # a date
        return 1.0


def connection_problem(base: str, error: httpx.HTTPError, hint: str) -> str:
    """The sentence for a request without an answer; see `why_unreachable`."""
    connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    return why_unreachable(base, error, connected=connected, hint=hint)


def error_of(response: httpx.Response) -> EngineError:
    """The error for a refused request: `RequestError` for 4xx, which the user can fix, else `EngineError`."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = response.text.strip()[:200] or response.reason_phrase
    sent = "authorization" in response.request.headers
    if problem := key_problem(response.status_code, error, sent=sent):
        return RequestError(problem, status=response.status_code)
    return error_from(error, status=response.status_code)


def key_problem(status: int, error: object, *, sent: bool) -> str:
    """The sentence for a refused key, in the options of the commands; "" if the server refuses something else.

    Args:
        status: of HTTP.
        error: the error object of the answer, which speaks of headers.
        sent: a key was sent.
    """
    if status == httpx.codes.UNAUTHORIZED:
        if sent:
            return "the server does not know this API key; check --api-key or ENGINE_API_KEY"
        return "the server wants an API key; pass --api-key or set ENGINE_API_KEY"
    if isinstance(error, Mapping) and error.get("code") == "admin_key_required":
        return (
            "this needs the admin key of the server (`engine serve --admin-api-key`); pass it with --api-key or set "
            "ENGINE_ADMIN_API_KEY"
        )
    return ""


def error_from(error: object, *, status: int) -> EngineError:
    """The error for an error object of the OpenAI API, or for another text."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    message, param, code = (
        str(fields[key]) if fields.get(key) else None for key in ("message", "param", "code")
    )
    message = message or f"status {status} without a message"
    if 400 <= status < 500:
        return RequestError(message, param=param, code=code, status=status)
    state = "is not ready" if code == "loading_model" else "failed"
    return ServerError(f"the server {state}: {message}")


def why_unreachable(base: str, error: Exception, *, connected: bool, hint: str) -> str:
    """The sentence for the user. The commands that ask a server share it.

    Args:
        base: URL of the server, without a path.
        error: of httpx or aiohttp.
        connected: the connection was made, and failed later.
        hint: the fix if no server listens there.
    """
    text = str(error).rstrip(".") or type(error).__name__
    scheme, _, rest = base.partition("://")
    if _BAD_CERTIFICATE in text:
        return f"the certificate of {base} is not accepted: {_certificate_problem(text)}"
    if scheme == "https" and "ssl" in text.lower() and not _errno_text(error):
        return f"{base} does not answer with TLS; if the server has no certificate, use http://{rest}"
    closed = "disconnected" in text.lower() or _errno_text(error) == os.strerror(errno.ECONNRESET)
    if scheme == "http" and closed:  # what a TLS server does with a request that is not encrypted
        return f"{base} closed the connection without an answer; if the server has a certificate, use https://{rest}"
    if connected:
        return f"the connection to {base} broke: {text}"
    return f"no server answers at {base} ({_errno_text(error) or text}); {hint}"


def _certificate_problem(text: str) -> str:
    """Describe the fault of a certificate, and the fix. OpenSSL: `[SSL: ...] ... failed: REASON (_ssl.c:1006)`."""
    reason = text.rpartition("verify failed: ")[2].partition(" (_ssl.c")[0].rstrip(".")
    if "mismatch" in reason:
        return f"{reason}; use a name in the URL that the certificate has"
    if "expired" in reason or "not yet valid" in reason:
        return f"{reason}; renew it, or correct the clock"
    return f"{reason}; set SSL_CERT_FILE to a file with the certificate of its CA (PEM)"


def _errno_text(error: BaseException) -> str:
    """`Connection refused`, `Name or service not known`; "" if no call of the system has failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError) and cause.errno:
            # Of a name that has no address the number is negative, and no number of the system.
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return ""
