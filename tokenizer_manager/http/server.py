"""`HttpServer`: the listening socket, TLS, and uvicorn with our `Connection` for each client."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Final

import uvicorn

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import ConfigError
from .connection import Connection
from .exchange import AsgiApp
from .guards.auth import refuse_pipe

BACKLOG: Final = 2048
_LAST_WORDS_S: Final = 2  # for clients to read their error events at shutdown

# A half-open connection is detected after 60 + 3 * 10 s, even if nothing is sent on it.
_TCP_OPTIONS: Final = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.SOL_SOCKET, "SO_REUSEADDR", 1),
)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet; connections inherit its options.

    Raises:
        ConfigError: the address is in use, or is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host}: {error}; give another one with --host") from error
    try:
        for level, name, value in _TCP_OPTIONS:
            if (option := getattr(socket, name, None)) is not None:
                listener.setsockopt(level, option, value)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; give another one with --port, or 0 for a free one"
        ) from error
    return listener


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to a socket bound to this IP address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def check_tls(config: ServerConfig) -> None:
    """Check at start that TLS can work.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    if config.ssl_certfile is None:
        return
    refuse_pipe("ssl_certfile", config.ssl_certfile)
    if config.ssl_keyfile is not None:
        refuse_pipe("ssl_keyfile", config.ssl_keyfile)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        key = config.ssl_keyfile or config.ssl_certfile
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile} with the key in {key} cannot be used: "
            f"{getattr(error, 'strerror', None) or error}; give a PEM certificate chain and its key without password"
        ) from None


def _no_password() -> str:
    """Called for an encrypted key; without it OpenSSL would ask on the terminal and wait."""
    raise ValueError("the key has a password")


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: the supervisor decides when to stop, and in what order."""

    def __init__(self, app: AsgiApp, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(Connection, config),  # type: ignore[arg-type]  # only ever called
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # for loop.call_later
                timeout_graceful_shutdown=_LAST_WORDS_S,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield
