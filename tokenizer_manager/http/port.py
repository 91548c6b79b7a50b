"""The server's port: `bind`, TLS, and `LoadingPort`, which answers on it until the model is loaded.

`engine serve` opens the port before it reads the model, so that probes and clients get 503 instead of a refused
connection. The tokenizer manager inherits the socket; connections that are made while it takes over wait in its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import time
import uuid
from typing import Final

import msgspec

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import ConfigError, RequestError
from .guards.auth import refuse_pipe
from .schema.errors import reply_to, shape_of

BACKLOG: Final = 2048
RETRY_AFTER_S: Final = 5
_LIMIT_S: Final = 5.0
"""Longest life of a connection to a server that loads."""
_MAX_OPEN: Final = 256
"""Connections at a time to a server that loads; further ones are closed: this process needs files for the model."""
_READ_BYTES: Final = 65536

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


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context of the server's certificate; None without one.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    if config.ssl_certfile is None:
        return None
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
    return context


def _no_password() -> str:
    """Called for an encrypted key; without it OpenSSL would ask on the terminal and wait."""
    raise ValueError("the key has a password")


class LoadingPort:
    """The open port, and a thread that answers every request with 503 and `Retry-After`.

    Attributes:
        listener: for the process that will serve, which inherits it.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Listen and answer.

        Raises:
            ConfigError: the port or the certificate cannot be used.
        """
        tls = tls_context(config)
        self.listener = bind(config.host, config.port)
        self._started_s = time.monotonic()
        self._room = asyncio.Semaphore(_MAX_OPEN)
        self._loop = asyncio.new_event_loop()
        started = asyncio.start_server(
            self._answer,
            sock=self.listener,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else _LIMIT_S,
        )
        self._server = self._loop.run_until_complete(started)
        self.listener.listen(BACKLOG)  # asyncio has listened with a backlog of 100
        threading.Thread(target=self._run, name="loading-port", daemon=True).start()

    def close(self) -> None:
        """Stop answering, and close this process's copy of the socket; idempotent.

        What connects later waits for the process that has inherited it. Answers under way are finished.
        """
        if self.listener.fileno() < 0:
            return
        closed = threading.Event()

        def close() -> None:
            self._server.close()
            self._loop.call_later(3 * _LIMIT_S, self._loop.stop)
            closed.set()

        def accept_no_more() -> None:
            self._loop.remove_reader(self.listener)
            # asyncio drops a connection that is accepted, and has no transport before the next pass of the loop.
            self._loop.call_soon(close)

        self._loop.call_soon_threadsafe(accept_no_more)
        closed.wait()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first request of a connection, and wait until the client has closed it.

        Whatever it sends meanwhile, such as a long body, is dropped: the kernel would reset a connection that is closed
        with unread data, and the client would not see the answer.
        """
        if self._room.locked():
            writer.transport.abort()
            return
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
            async with self._room, asyncio.timeout(_LIMIT_S):
                writer.write(self._response(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                while await reader.read(_READ_BYTES):
                    pass
        writer.close()

    def _response(self, head: bytes) -> bytes:
        """The whole response to the head of a request, in the form of the API that its path belongs to."""
        method, target, *_ = [*head.split(None, 2), b"", b""]
        message = (
            f"the model is loading, for {time.monotonic() - self._started_s:.0f} s so far; try again in "
            f"{RETRY_AFTER_S} s"
        )
        error = RequestError(message, code="loading_model", status=503, retry_after_s=RETRY_AFTER_S)
        request_id = uuid.uuid4().hex
        shape = shape_of(target.partition(b"?")[0].decode("latin-1"))
        body = msgspec.json.encode(shape.body(reply_to(error, request_id), request_id))
        lines = (
            "HTTP/1.1 503 Service Unavailable",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"retry-after: {RETRY_AFTER_S}",
            f"x-request-id: {request_id}",
            "cache-control: no-store",
            "connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + (b"" if method == b"HEAD" else body)
