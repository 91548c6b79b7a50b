"""`MessageStream`: writes the events of `/v1/messages` from deltas, and keeps the blocks for the whole message.

Order: message_start, ping; for each block content_block_start, deltas, content_block_stop; message_delta, message_stop.
Blocks do not interleave, and their indices are dense.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any, Final, assert_never

import msgspec
from msgspec.structs import replace

from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ..surfaces.cut_json import object_of
from .bodies import (
    Block,
    MessageBody,
    MessageDelta,
    MessageEvent,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

_encoder: Final = msgspec.json.Encoder()


class MessageStream:
    """Writes one message.

    Attributes:
        body: the message as of the latest event.
    """

    def __init__(self, body: MessageBody) -> None:
        """Begin with a message without content."""
        self.body = body
        self._blocks: list[Block] = []
        self._block: Block | None = None  # the open one, the last of `_blocks`
        self._texts: list[str] = []  # of the open block

    def begin(self, usage: MessageUsage) -> bytes:
        """The first two events."""
        self.body = replace(self.body, usage=usage)
        return _event("message_start", message=self.body) + _event("ping")

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events for some deltas."""
        return b"".join(map(self._delta, deltas))

    def complete(self, stop_reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> bytes:
        """The events that end a message."""
        events = self._end_block()
        self.body = replace(
            self.body,
            content=self._blocks,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )
        delta = MessageDelta(stop_reason=stop_reason, stop_sequence=stop_sequence)
        return events + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    @property
    def has_calls(self) -> bool:
        """Whether the message has a call so far."""
        return any(isinstance(block, ToolUseBlock) for block in self._blocks)

    # ------------------------------------------------------------ blocks

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case Reasoning(text):
                return self._text(ThinkingBlock, text)
            case Content(text):
                return self._text(TextBlock, text)
            case CallBegin(_, call_id, name):
                return self._end_block() + self._start(ToolUseBlock(id=call_id, name=name))
            case CallArguments(_, text):
                return self._append(MessageDelta(type="input_json_delta", partial_json=text), text)
            case CallEnd():
                return self._end_block()

    def _text(self, kind: type[TextBlock] | type[ThinkingBlock], text: str) -> bytes:
        if not text:
            return b""
        events = b""
        if not isinstance(self._block, kind):
            events = self._end_block() + self._start(kind())
        if kind is TextBlock:
            return events + self._append(MessageDelta(type="text_delta", text=text), text)
        return events + self._append(MessageDelta(type="thinking_delta", thinking=text), text)

    def _start(self, block: Block) -> bytes:
        self._block = block
        self._blocks.append(block)
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _append(self, delta: MessageDelta, text: str) -> bytes:
        if not text:
            return b""
        self._texts.append(text)
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> bytes:
        """The events that end the open block, if there is one."""
        if self._block is None:
            return b""
        events = b""
        text = "".join(self._texts)
        block: Block
        match self._block:
            case TextBlock():
                block = TextBlock(text=text)
            case ThinkingBlock():
                signature = _signature(text)
                block = ThinkingBlock(thinking=text, signature=signature)
                events = self._append(MessageDelta(type="signature_delta", signature=signature), signature)
            case ToolUseBlock():
                block = replace(self._block, input=object_of(text))
            case _ as unreachable:
                assert_never(unreachable)
        self._blocks[-1] = block
        self._block = None
        self._texts.clear()
        return events + _event("content_block_stop", index=len(self._blocks) - 1)


def _signature(text: str) -> str:
    """Clients keep it and send it back; nothing is proved by it."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=24).digest()
    return base64.b64encode(digest).decode()


def _event(name: str, **fields: Any) -> bytes:
    data = MessageEvent(type=name, **fields)
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(data) + b"\n\n"
