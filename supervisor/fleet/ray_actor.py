"""`ServerActor`: a Ray actor that owns one `engine serve` on its machine. This module does not import Ray.

Each method returns at once. Tokens never pass through Ray: clients and routers speak to the server.
"""

from __future__ import annotations

from typing import NamedTuple

from .server import LocalServer, ServerEnd


class Seen(NamedTuple):
    """A server, as its actor sees it."""

    pid: int
    url: str | None
    model: str | None
    end: ServerEnd | None


class ServerActor:
    """Owns one server. If the actor dies, the kernel sends the server SIGTERM (`TiedProcess`)."""

    def __init__(self) -> None:
        self._server: LocalServer | None = None

    def start(self, module: str, arguments: list[str], env: dict[str, str]) -> Seen:
        """Start the server."""
        self._server = LocalServer(module, arguments, env)
        return self.look()

    def look(self) -> Seen:
        """What there is to see."""
        server = self._started()
        return Seen(server.pid, server.url, server.model, server.end)

    def terminate(self) -> Seen:
        """Have it drain and end."""
        self._started().terminate()
        return self.look()

    def kill(self) -> Seen:
        """End it at once."""
        self._started().kill()
        return self.look()

    def _started(self) -> LocalServer:
        assert self._server is not None, "`start` comes first"
        return self._server
