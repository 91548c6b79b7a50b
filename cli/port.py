"""Checks that a server can listen at its address, before anything slow starts."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

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
