"""`Connection`: one client's TCP connection; uvicorn's protocol with bounds on how long and how large all may be.

    head     from the first byte (of a new connection: from its opening) to the empty line   --header-timeout, 408
    body     from there to its end                                                           --body-timeout, 408
    answer   from when the client's and the kernel's buffers are full until they are read    --send-timeout, aborted
    idle     from an answer to the next request                                              --keep-alive-timeout

A request that comes in one packet starts none of these clocks, and a token sent to a client that reads starts none
either: the transport says when its buffer is full.

uvicorn stops reading from a client that sends a second request before the first is answered (pipelining), and so would
not notice that it leaves. Here reading goes on: a few small requests may wait in line; one that is more than that is
not read, and the connection closed after the answers before it, which HTTP allows at any time.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import Any, Final

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import RequestError
from .schema.errors import reply_to

logger = logging.getLogger(__name__)

_MAX_PIPELINED: Final = 16
_MAX_PIPELINED_BODY: Final = 32 << 10  # below the 64 KiB at which uvicorn stops reading
_MAX_CLOSING_S: Final = 5.0
"""For a client to take what was said to it last; then the connection is cut."""


class _Phase(enum.Enum):
    HEAD = "head"
    BODY = "body"
    IDLE = "idle"  # or answering: nothing is expected


class _Refused(Exception):
    """Raised through the parser to stop it; whoever raised it has noted what to say."""


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
        self._num_head_bytes = 0  # of what has come since there last was a request, or a part of its body
        self._had_body = False  # in what is being parsed
        self._framing = (
            b""  # headers with which the body of a request that wants another protocol is yet to be read
        )
        self._repeats_head = False
        self._refusal: RequestError | None = None
        self._answering: RequestResponseCycle | None = None
        self._deaf = False  # what comes is thrown away; that the client leaves is still noticed

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
        """It is over."""
        for clock in (self._clock, self._send_clock):
            if clock is not None:
                clock.cancel()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # uvicorn tells only the newest one
            self._answering.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Something came."""
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
        """The client does not read, and all buffers are full."""
        super().pause_writing()
        self._send_clock = self.loop.call_later(self._limits.send_timeout, self._on_unread)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._send_clock is not None:
            self._send_clock.cancel()
            self._send_clock = None

    # ------------------------------------------------------------ events of the parser

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._repeats_head:
            return
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        """Its head is there."""
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
            self.cycle.keep_alive = False  # the last one in line: the connection is closed after it
            raise _Refused
        super().on_headers_complete()
        self.flow.resume_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers. What stands behind a body in chunks (trailers) is none: nobody has asked for it."""
        if self._phase is _Phase.HEAD:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._num_head_bytes = 0
        self._had_body = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        """An answer is out; the next in line has its turn."""
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """Its last byte."""
        if self._framing:
            return
        self._phase = _Phase.IDLE
        super().on_message_complete()

    # ------------------------------------------------------------ clocks

    def _watch(self) -> None:
        """Start or stop the clock for what the client has yet to send."""
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
            self.transport.close()  # nobody asked for anything
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
        """Whether a request is being answered, which another one has to wait for."""
        return (cycle := self._newest) is not None and not cycle.response_complete

    @property
    def _newest(self) -> RequestResponseCycle | None:
        """The request that came last, answered or not; None before the first, whatever uvicorn's type says."""
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
        """Go on as if the request did not want another protocol, which HTTP allows.

        The parser takes it for one without a body; so another parser goes on, which has read what says how its body
        comes, and nothing else, of its head.
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
        """Say why, unless an answer is under way, and close."""
        self._deaf = True
        self._phase = _Phase.IDLE
        self._watch()
        first = self._answering  # of those in line
        answered = first is not None and first.response_started and not first.response_complete
        if not answered:
            reply = reply_to(error, "")
            body = msgspec.json.encode(reply.body)
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[reply.status] + head % len(body) + body)
        logger.info("connection closed status=%d code=%s", error.status, error.code)
        self.transport.close()
        self._clock = self.loop.call_later(_MAX_CLOSING_S, self.transport.abort)
