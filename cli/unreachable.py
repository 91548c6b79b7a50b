"""`why_unreachable`: what went wrong with a connection to a server, in one sentence with its fix."""

from __future__ import annotations

import errno
import os
import ssl
from typing import Final

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
    """What is wrong with a certificate, and the fix. OpenSSL: `[SSL: ...] ... failed: REASON (_ssl.c:1006)`."""
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
