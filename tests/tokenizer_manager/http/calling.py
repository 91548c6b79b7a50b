"""Calls the application as uvicorn does, without sockets, on the event loop of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.tokenizer_manager.http.app import App


class Reply(NamedTuple):
    """What the application sent; status 0: nothing."""

    status: int
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


async def call(
    app: App,
    path: str,
    body: bytes | Mapping[str, Any] = b"",
    *,
    method: str = "POST",
    gone: asyncio.Event | None = None,
) -> Reply:
    """One request, from a client that waits for its answer, or until `gone` is set."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    incoming = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    if not sent:
        return Reply(0, b"")
    return Reply(sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:]))
