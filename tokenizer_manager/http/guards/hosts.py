"""`Hosts`: the `Host` names that a server without API keys accepts, against DNS rebinding.

A web page can point its own name to 127.0.0.1. The browser then takes the engine for that page's own server: it sends
no `Origin` with a GET, and lets the page read the answers. The header `Host` still has the page's name. IP addresses
and `localhost` cannot be rebound and are always accepted; the operator allows other names with `--allowed-host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from ....runtime.errors import RequestError
from ..schema.json_body import show


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
