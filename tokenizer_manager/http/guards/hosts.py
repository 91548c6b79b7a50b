"""`Hosts`: under which names a server may be called that whoever can connect to may use.

A page on the internet can have its own name lead to 127.0.0.1 (DNS rebinding). To the browser the engine then is that
page's own server: it sends no `Origin` with a GET, and the page may read the answers. The name still stands in `Host`.
Addresses and `localhost` lead nowhere else, so they are always good; other names are the operator's to allow.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from ....runtime.errors import RequestError
from ..exchange import Exchange
from ..schema.json_body import show


class Hosts:
    """The allowed ones."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """Allow these besides addresses and localhost, or all with `*`."""
        self._any = "*" in allowed
        self._allowed = frozenset(name.lower().removesuffix(".") for name in allowed)

    def check(self, exchange: Exchange) -> None:
        """Refuse a request that was sent to another name. One without a name (HTTP/1.0) comes from no browser.

        Raises:
            RequestError: 403.
        """
        host = exchange.headers.get(b"host")
        if host is None or self._any:
            return
        name = _name_in(host.decode("latin-1"))
        if name in self._allowed or _leads_only_here(name):
            return
        raise RequestError(
            f"this server does not know the name {show(name)}, by which a web page may pretend to be it; use its "
            f"address, or allow the name with --allowed-host",
            code="host_not_allowed",
            status=403,
        )


def _name_in(host: str) -> str:
    """What stands before the port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _leads_only_here(name: str) -> bool:
    """Whether it is an address, or a name that browsers never look up."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
