"""`Exchange`: one HTTP request and its response, on bare ASGI.

It reads the body under a limit, responds in one piece or as a stream of server-sent events, and detects a disconnect,
which ASGI reports only to a pending `receive` call (`abort_on_disconnect`).
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, BinaryIO, Final, Self
from urllib.parse import parse_qsl

import msgspec

from ...runtime.errors import RequestError
from ..generation import Generation
from .guards.auth import Caller
from .guards.body_budget import BodyReservation
from .schema.errors import ErrorReply
from .schema.json_body import encoded_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_JSON: Final = (b"content-type", b"application/json")
_FILE_PART_BYTES: Final = 1 << 20
EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"
_UNBUFFERED: Final = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
]
_encoder: Final = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed the connection before its request was read."""


class LineChecked(Exception):
    """The reader of an endpoint has nothing against a line that is only checked."""


class Exchange:
    """One request and its response.

    Attributes:
        method, path: of the request; the path is decoded but not normalized.
        query: the parameters after the path, the last of repeated ones; few routes have some.
        headers: the request's, names in lower case; the first of repeated ones.
        request_id: the client's `X-Request-Id` if it is usable, otherwise a new one; a label for logs only.
        status: of the response, 0 before it has begun.
        streaming: the response is an event stream.
        caller: the sender; set once it is authenticated.
        more_headers: sent with every kind of response.
        error_code: of the error that it was answered with, also within a stream; "" for none.
        started_s: when it arrived, by the manager's clock.
        received_s: when its body had arrived; None before, and without one.
        generations: what was started for it.
        line_seed: of a line of a batch: the seed of a request that has none; None: it came over HTTP.
        checked_body: JSON object of a line that is read and not run; None: it runs.
        failure_event: writes the end of a stream that fails; None: an error event in the form of the path's API.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.scheme: str = scope.get("scheme", "http")
        self.query: dict[str, str] = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.status = 0
        self.streaming = False
        self.caller = Caller()
        self.more_headers: list[tuple[bytes, bytes]] = []
        self.error_code = ""
        self.started_s = 0.0
        self.received_s: float | None = None
        self.generations: list[Generation] = []
        self.line_seed: int | None = None
        self.checked_body: dict[str, Any] | None = None
        self.failure_event: Callable[[ErrorReply], bytes] | None = None
        wanted = self.headers.get(b"x-request-id", b"")
        self.request_id = wanted.decode() if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
        self._receive = receive
        self._send = send

    # ------------------------------------------------------------ request

    @property
    def bearer_token(self) -> bytes:
        """The token of `Authorization: Bearer ...`, checked or not; b"" for none.

        Bytes, since hmac refuses non-ASCII str, and a bad token must be a 401, not a 500.
        """
        scheme, _, token = self.headers.get(b"authorization", b"").partition(b" ")
        return token.strip() if scheme.lower() == b"bearer" else b""

    async def body(self, max_bytes: int, reservation: BodyReservation) -> bytes:
        """The whole body. One that is too large is refused before it is read, or as soon as its size is known.

        Args:
            max_bytes: of the body.
            reservation: grows with the bytes that arrive.

        Raises:
            RequestError: 415 for a body with a Content-Encoding, 413, or 429 when the budget of bodies is used up.
            ClientGone: the client disconnected.
        """
        parts: list[bytes] = []
        size = 0
        async for part in self.body_parts(max_bytes, "--max-body-mb"):
            size += len(part)
            reservation.grow_to(size)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def body_parts(self, max_bytes: int, setting: str) -> AsyncIterator[bytes]:
        """The body as it arrives; as `body`, without a bound on all bodies.

        Args:
            max_bytes: of the body.
            setting: the flag that raises it, for the error.
        """
        encoding = self.headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            raise encoded_body(f"Content-Encoding is {encoding.decode('ascii', 'backslashreplace')[:60]}")
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > max_bytes:
            raise _too_large(max_bytes, setting)
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes, setting)
            yield part
            if not message.get("more_body", False):
                return

    def id_after(self, path: str) -> str:
        """The id in the request's path, `path/{id}` or `path/{id}/...`."""
        return self.path.removeprefix(f"{path}/").partition("/")[0]

    def abort_on_disconnect(self) -> DisconnectScope:
        """A scope that is canceled when the client disconnects. Only after the body has been read."""
        return DisconnectScope(self._receive)

    # ------------------------------------------------------------ response

    async def send_json(
        self, body: object, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """Respond with `body`, a msgspec struct or plain data."""
        await self.send_bytes(_encoder.encode(body), _JSON[1], status, headers)

    async def send_bytes(
        self,
        body: bytes,
        content_type: bytes,
        status: int = 200,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """Respond in one piece."""
        about_body = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await self._start(status, about_body + (headers or []))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_file(self, file: BinaryIO, num_bytes: int, content_type: bytes) -> None:
        """Respond with the content of an open file, a part at a time."""
        await self._start(200, [(b"content-type", content_type), (b"content-length", b"%d" % num_bytes)])
        while part := await asyncio.to_thread(file.read, _FILE_PART_BYTES):
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_nothing(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Respond 204, with these headers and no body."""
        await self._start(204, headers)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def start_events(self, media_type: bytes = EVENT_STREAM) -> None:
        """Begin a response of server-sent events, or of other events."""
        self.streaming = True
        await self._start(200, [(b"content-type", media_type), *_UNBUFFERED])

    async def send_events(self, events: bytes) -> None:
        """Send framed events; returns when the transport has accepted them, which slows down a fast producer."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes = b"") -> None:
        """Send the last events and end the response."""
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        all_headers = [*headers, *self.more_headers, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})


class DisconnectScope:
    """Async context manager: cancels its body when the client disconnects, and then exits without an error.

    As in `asyncio.timeout`, the body's own task is canceled and un-canceled, so that a cancellation from outside (the
    server stops) still passes through.

    Attributes:
        disconnected: the client has disconnected.
    """

    def __init__(self, receive: Receive) -> None:
        self.disconnected = False
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._num_cancelling = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancelling = self._task.cancelling()
        self._watch = asyncio.create_task(self._wait_for_disconnect(self._task))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._watch is not None and self._task is not None
        self._watch.cancel()
        if not self.disconnected:
            return False
        outside = self._task.uncancel() > self._num_cancelling
        return kind is asyncio.CancelledError and not outside

    async def _wait_for_disconnect(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        task.cancel()


def _too_large(max_bytes: int, setting: str) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes} bytes; send less or raise {setting}",
        code="request_too_large",
        status=413,
    )
