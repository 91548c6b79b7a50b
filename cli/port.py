"""Addresses: whether a server can listen at its own before anything slow starts, and why another cannot be reached."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from typing import TYPE_CHECKING, Final

from ..runtime.errors import ConfigError

if TYPE_CHECKING:
    from ..runtime.config.server_config import ServerConfig


def check_port(config: ServerConfig) -> None:
    """Check the address before the model is loaded; see `check_address`."""
    check_address(config.host, config.port, any_port=" (--port 0 takes a free one)")


def check_address(host: str, port: int, *, option: str = "--port", any_port: str = "") -> None:
    """Check an address.

    Args:
        host, port: the address.
        option: sets the port.
        any_port: how to get a free port, in parentheses.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is not an address of this machine.
    """
    where = f"{host}:{port}"
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (
        OSError,
        UnicodeError,
    ) as error:  # no name of the internet, such as one with a part of 64 characters
        reason = getattr(error, "strerror", None) or "it is no host name"
        raise ConfigError(f"host {host!r} has no address ({reason}); use --host 127.0.0.1") from None
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        # Like the server: connections of a process that has just ended do not count as "in use".
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{where} is in use, maybe by another engine; stop it, or use {option} {port + 1}{any_port}"
                ) from None
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"ports below 1024 need privileges, not {where}; use {option} 30000"
                ) from None
            raise ConfigError(
                f"cannot listen on {where}: {error.strerror}; see --host and {option}"
            ) from None


_BAD_CERTIFICATE: Final = "CERTIFICATE_VERIFY_FAILED"


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
