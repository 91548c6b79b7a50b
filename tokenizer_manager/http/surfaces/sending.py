"""`send_stream`: the rows of one answer through the writer of an API."""

from __future__ import annotations

from typing import Protocol

from ..chat_run import AnswerRow, ChatGeneration
from ..exchange import EVENT_STREAM, Exchange


class AnswerWriter(Protocol):
    """Writes the stream of one API."""

    def begin(self, row: AnswerRow) -> bytes:
        """What comes before the first row, framed."""
        ...

    def row(self, row: AnswerRow) -> bytes:
        """What is new in a row, framed; may be empty."""
        ...

    def closing(self) -> bytes:
        """The end of the stream, framed."""
        ...


async def send_stream(
    exchange: Exchange, chat: ChatGeneration, writer: AnswerWriter, media_type: bytes = EVENT_STREAM
) -> None:
    """Send an answer as a stream. It begins with the first row, so that earlier failures have an HTTP status.

    Raises:
        EngineError: the generation failed; what was sent so far is incomplete.
    """
    async for rows in chat:
        events = b""
        for row in rows:
            if not exchange.streaming:
                await exchange.start_events(media_type)
                events += writer.begin(row)
            events += writer.row(row)
        if events:
            await exchange.send_events(events)
    await exchange.end_events(writer.closing())
