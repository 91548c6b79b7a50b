"""A certificate for localhost and 127.0.0.1 that is its own authority, and its key, made for these tests.

It is valid in every year in which they may run, so that a client can check all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

_CERTIFICATE: Final = """\
-----BEGIN CERTIFICATE-----
MIIBeDCCAR2gAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMDAwMTAxMDAwMDAwWhgPMjA5OTEyMzEyMzU5NTlaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABK0Uk8hquueicGlt
nZkMVD1lsX7eH5xxQCOZYV1hOD+FQ9X5RIYNrmk/kfwNXkXaTh3+9VsJcOZgbIb2
PvTGfpGjXjBcMA8GA1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFGjj/5ku3Yh1yMa7
AXcGqQLKU/ceMA4GA1UdDwEB/wQEAwIChDAaBgNVHREEEzARgglsb2NhbGhvc3SH
BH8AAAEwCgYIKoZIzj0EAwIDSQAwRgIhAIv6Cz36GerD2PiF7Dexl4H0qeJ7zXxY
dcW7JCgF8wBuAiEAqQgL8NFTGOLzIsztlWL7uyKsyn3NGIA2Vlazjquw+jc=
-----END CERTIFICATE-----
"""
_KEY: Final = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgjJD9tMJ/HfdnOaiA
yo8sN6zDojLgkIJ487oNb+wurCyhRANCAAStFJPIarrnonBpbZ2ZDFQ9ZbF+3h+c
cUAjmWFdYTg/hUPV+USGDa5pP5H8DV5F2k4d/vVbCXDmYGyG9j70xn6R
-----END PRIVATE KEY-----
"""


class TlsFiles(NamedTuple):
    """Where they lie."""

    certificate: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a server that uses them."""
        return ("--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key))


def write_tls_files(folder: Path) -> TlsFiles:
    """Write them into a folder."""
    files = TlsFiles(folder / "cert.pem", folder / "key.pem")
    files.certificate.write_text(_CERTIFICATE)
    files.key.write_text(_KEY)
    return files
