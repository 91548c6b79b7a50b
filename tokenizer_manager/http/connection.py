"""`Connection`: one client's TCP connection: uvicorn's protocol with bounds on times and sizes; and their `HttpServer`.

    head     from the first byte (of a new connection: from its opening) to the empty line   --header-timeout, 408
    body     from there to its end                                                           --body-timeout, 408
    answer   from when the client's and the kernel's buffers are full until they are read    --send-timeout, aborted
    idle     from an answer to the next request                                              --keep-alive-timeout

A request that arrives in one packet starts none of these clocks, and neither does a token sent to a client that reads:
the transport reports when its buffer is full.

uvicorn stops reading from a client that sends a second request before the first is answered (pipelining), and so would
miss its disconnect. Here reading goes on: a few small requests may wait; a further or larger one is not read, and the
connection is closed after the answers before it, which HTTP allows at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
from collections.abc import Iterator
from typing import Any, Final

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import RequestError
from .exchange import AsgiApp
from .port import BACKLOG
from .schema.errors import reply_to

logger = logging.getLogger(__name__)

_MAX_PIPELINED: Final = 16
_MAX_PIPELINED_BODY: Final = 32 << 10  # below the 64 KiB at which uvicorn stops reading
_MAX_CLOSING_S: Final = 5.0
"""For a client to read the last response; then the connection is aborted."""


class _Phase(enum.Enum):
    HEAD = "head"
    BODY = "body"
    IDLE = "idle"  # or answering: no bytes are expected


class _Refused(Exception):
    """Raised through the parser to stop it; `_refusal` has the error to send."""


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def __init__(self, limits: ServerConfig, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._max_head_bytes = int(limits.max_header_kb * 1024)
        self._phase = _Phase.HEAD
        self._clocked = _Phase.IDLE
        self._clock: asyncio.TimerHandle | None = None
        self._send_clock: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0  # received since the last complete head or part of a body
        self._had_body = False  # in the data that is being parsed
        self._framing = b""  # headers that frame the body of a request for a protocol upgrade
        self._repeats_head = False
        self._refusal: RequestError | None = None
        self._answering: RequestResponseCycle | None = None
        self._deaf = False  # received data is dropped; a disconnect is still noticed

    # ------------------------------------------------------------ events of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(
                RequestError(
                    f"{self._limits.max_connections} connections are open, which is the limit; retry later, or raise "
                    f"--max-connections",
                    code="too_many_connections",
                    status=503,
                )
            )
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        for clock in (self._clock, self._send_clock):
            if clock is not None:
                clock.cancel()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # uvicorn notifies only the newest request
            self._answering.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        phase_before, self._had_body = self._phase, False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._on_parser_stopped()
            return
        if self._phase is not _Phase.IDLE:
            goes_on = phase_before is self._phase or phase_before is _Phase.IDLE
            self._num_head_bytes += len(data) if goes_on and not self._had_body else 0
            if self._num_head_bytes > self._max_head_bytes:
                self._refuse(self._head_too_large())
                return
        self._watch()

    def pause_writing(self) -> None:
        """All buffers are full: the client does not read."""
        super().pause_writing()
        self._send_clock = self.loop.call_later(self._limits.send_timeout, self._on_unread)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._send_clock is not None:
            self._send_clock.cancel()
            self._send_clock = None

    # ------------------------------------------------------------ events of the parser

    def on_message_begin(self) -> None:
        """The first byte of a request has arrived."""
        if self._repeats_head:
            return
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        """The head of a request is complete."""
        if self._repeats_head:
            return
        self._phase = _Phase.BODY
        self._num_head_bytes = 0
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > self._max_head_bytes:
            self._refusal = self._head_too_large()
            raise _Refused
        length, chunked = self._announced_body()
        if self.parser.should_upgrade():
            framing = (b"content-length", b"transfer-encoding")
            self._framing = b"".join(b"%b: %b\r\n" % line for line in self.headers if line[0] in framing)
        if not self._is_busy:
            super().on_headers_complete()
            self._answering = self.cycle
            return
        if len(self.pipeline) >= _MAX_PIPELINED or chunked or length > _MAX_PIPELINED_BODY:
            self._deaf = True
            self.cycle.keep_alive = False  # the newest request: the connection is closed after it
            raise _Refused
        super().on_headers_complete()
        self.flow.resume_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of a request. Trailers, after a body in chunks, are ignored."""
        if self._phase is _Phase.HEAD:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._num_head_bytes = 0
        self._had_body = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        """A response is complete; the next pipelined request is handled."""
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """The last byte of a request has arrived."""
        if self._framing:
            return
        self._phase = _Phase.IDLE
        super().on_message_complete()

    # ------------------------------------------------------------ clocks

    def _watch(self) -> None:
        """Start or stop the clock for the bytes that the client must send next."""
        if self._phase is self._clocked:
            return
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        self._clocked = self._phase
        if self._phase is not _Phase.IDLE:
            limits = self._limits
            time_s = limits.header_timeout if self._phase is _Phase.HEAD else limits.body_timeout
            self._clock = self.loop.call_later(time_s, self._on_late)

    def _on_late(self) -> None:
        self._clock = None
        if self._phase is _Phase.HEAD and self._num_head_bytes == 0:
            self.transport.close()  # no request was begun
            return
        limit = "header" if self._phase is _Phase.HEAD else "body"
        time_s = self._limits.header_timeout if limit == "header" else self._limits.body_timeout
        self._refuse(
            RequestError(
                f"the request's {limit} did not come within {time_s:g} s; send it faster, or raise --{limit}-timeout",
                code="request_timeout",
                status=408,
            )
        )

    def _on_unread(self) -> None:
        logger.info("connection aborted: its client has read nothing for %g s", self._limits.send_timeout)
        self.transport.abort()

    # ------------------------------------------------------------ refusals

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being answered; a further one waits for it."""
        return (cycle := self._newest) is not None and not cycle.response_complete

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The newest request, answered or not; None before the first, unlike uvicorn's type."""
        newest: RequestResponseCycle | None = self.cycle
        return newest

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._decline_upgrade()

    def _decline_upgrade(self) -> None:
        """Ignore a request for a protocol upgrade, which HTTP allows.

        The parser takes such a request for one without a body. A new parser continues: of the head it is given only
        the headers that frame the body.
        """
        self.parser = httptools.HttpRequestParser(self)
        if self._framing:
            framing, self._framing = self._framing, b""
            self._repeats_head = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
            self._repeats_head = False

    def _announced_body(self) -> tuple[int, bool]:
        """Content-Length, and whether the body comes in chunks."""
        length, chunked = 0, False
        for name, value in self.headers:
            if name == b"content-length" and value.strip().isdigit():
                length = int(value[:20])
            elif name == b"transfer-encoding":
                chunked = True
        return length, chunked

    def _head_too_large(self) -> RequestError:
        return RequestError(
            f"the request's head is larger than {self._max_head_bytes} bytes; send fewer or shorter headers, or raise "
            f"--max-header-kb",
            code="headers_too_large",
            status=431,
        )

    def _on_parser_stopped(self) -> None:
        if self._deaf:
            return
        self._refuse(
            self._refusal
            or RequestError("the request is not valid HTTP/1.1; send it again", code="invalid_http")
        )

    def _refuse(self, error: RequestError) -> None:
        """Send the error, unless a response is being sent, and close."""
        self._deaf = True
        self._phase = _Phase.IDLE
        self._watch()
        first = self._answering  # of the pipelined ones
        answered = first is not None and first.response_started and not first.response_complete
        if not answered:
            reply = reply_to(error, "")
            body = msgspec.json.encode(reply.body)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[reply.status] + head % len(body) + body)
        logger.info("connection closed status=%d code=%s", error.status, error.code)
        self.transport.close()
        self._clock = self.loop.call_later(_MAX_CLOSING_S, self.transport.abort)


_LAST_WORDS_S: Final = 2  # for clients to read their error events at shutdown


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
