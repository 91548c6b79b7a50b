"""The certificates of public CAs, read once for all HTTP clients of a test process: it takes a tenth of a second."""

from __future__ import annotations

import os
import ssl
from typing import Any

import certifi

_create = ssl.create_default_context


def read_certificates_once() -> None:
    """Let clients that trust the public CAs, which no test calls, share one TLS context; others get their own."""
    shared: dict[str, ssl.SSLContext] = {}
    bundles = {certifi.where(), os.environ.get("SSL_CERT_FILE")}

    def create(*purpose: ssl.Purpose, **options: Any) -> ssl.SSLContext:
        if purpose or options.keys() != {"cafile"} or options["cafile"] not in bundles:
            return _create(*purpose, **options)
        if options["cafile"] not in shared:
            shared[options["cafile"]] = _create(**options)
        return shared[options["cafile"]]

    ssl.create_default_context = create
