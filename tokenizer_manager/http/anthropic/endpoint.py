"""`POST /v1/messages` and `POST /v1/messages/count_tokens`, and the events and blocks of an answer.

Order of events: message_start, ping; for each block content_block_start, deltas, content_block_stop; message_delta,
message_stop. Blocks do not interleave, and their indices are dense.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ....runtime.errors import RequestError
from ....runtime.feasibility import max_new_tokens_for
from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ...conversation.parsing.json_text import object_of
from ...generation import Generation, GenerationRequest, Row
from ..delivery import collect_deltas, stream
from ..exchange import Exchange
from ..guards.auth import Caller
from ..prompt_parts import Comparison, compare
from ..schema.accounting import truncated_of, usage_of
from ..schema.cache_fields import CONTROL_S
from ..services import Engine
from .convert import read_count, read_messages, user_of
from .wire import (
    Block,
    CacheCreation,
    CacheMissReason,
    CountBody,
    Diagnostics,
    MessageBody,
    MessageDelta,
    MessageEvent,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

_REQUEST_ID: Final = b"request-id"
"""The header in which Anthropic's clients look for `Exchange.request_id`."""


async def messages(exchange: Exchange, engine: Engine) -> None:
    """Answer a chat in the form of the Messages API."""
    exchange.more_headers.append((_REQUEST_ID, exchange.request_id.encode()))
    body, request = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            writer = _Writer(engine, generation, body)
            if body.stream:
                await stream(exchange, generation, writer)
            else:
                writer.stream.events(await collect_deltas(generation))
                writer.closing()
                await exchange.send_json(writer.stream.body)


async def count_tokens(exchange: Exchange, engine: Engine) -> None:
    """The number of tokens of the prompt of a message."""
    exchange.more_headers.append((_REQUEST_ID, exchange.request_id.encode()))
    request = await engine.read(exchange, lambda body: _read_count(body, engine))
    async with exchange.abort_on_disconnect():
        num_tokens, warnings = await engine.count_prompt(exchange, request)
        await exchange.send_json(CountBody(input_tokens=num_tokens, warnings=warnings or UNSET))


def _read(body: dict[str, Any], engine: Engine, caller: Caller) -> tuple[MessagesRequest, GenerationRequest]:
    request, generation = read_messages(
        body, engine.config, engine.sampling_defaults, sees_images=engine.images.are_seen
    )
    request.messages = []  # the conversation has them; an answer may take long, and images are megabytes
    user, session = user_of(request)
    scheduling = caller.scheduling(request, user, body=body, user_session=session)
    scheduling = engine.with_adapter(scheduling, request.model)
    return request, replace(generation, scheduling=scheduling)


def _read_count(body: dict[str, Any], engine: Engine) -> GenerationRequest:
    request, generation = read_count(body, engine.config, sees_images=engine.images.are_seen)
    engine.check_model(request.model)
    return generation


class _Writer:
    """Writes the stream of one message.

    Attributes:
        stream: of the events.
    """

    def __init__(self, engine: Engine, generation: Generation, request: MessagesRequest) -> None:
        self._engine = engine
        self._generation = generation
        self._stops = request.stop_sequences or []
        room = max_new_tokens_for(len(generation.choices[0].prompt_ids), engine.manager.capacity)
        self._is_cut = room < request.max_tokens
        self._begun = False
        message_id = generation.id.replace("-", "_")
        self._diagnostics = request.diagnostics
        self._comparison: Comparison | None = None
        if request.diagnostics is not None:
            earlier_id = request.diagnostics.previous_message_id
            self._comparison = compare(generation, message_id, earlier_id, engine.recent_items)
        self.stream = MessageStream(
            MessageBody(
                id=message_id,
                model=request.model or engine.served_model,
                usage=self._usage(),
                warnings=generation.request.warnings or UNSET,
            )
        )

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for a row, after the first ones."""
        begin = b""
        if not self._begun:
            self._begun = True
            self._note_diagnostics()
            begin = self.stream.begin(self._usage())
        return begin + self.stream.events(deltas)

    def closing(self) -> bytes:
        """The last events.

        Raises:
            RequestError: the request was aborted; the API has no stop reason for that.
        """
        stop_reason, stop_sequence = self._stop()
        self._note_diagnostics()
        return self.stream.complete(stop_reason, stop_sequence, self._usage())

    def _stop(self) -> tuple[StopReason, str | None]:
        [choice] = self._generation.choices
        matched = None if choice.finish is None else choice.finish.matched
        match choice.finish_reason:
            case "abort":
                raise RequestError("the request was aborted", code="aborted", status=500)
            case "length":
                return "model_context_window_exceeded" if self._is_cut else "max_tokens", None
            case "tool_calls":
                return "tool_use", None
            case _ if isinstance(matched, str) and matched in self._stops:
                return "stop_sequence", matched
            case _:
                return "end_turn", None

    def _note_diagnostics(self) -> None:
        if self._diagnostics is None:
            return
        cached, comparison = self._generation.choices[0].usage.cached_tokens, self._comparison
        reason = None
        if comparison is None and self._diagnostics.previous_message_id:
            reason = CacheMissReason("previous_message_not_found")
        elif comparison is not None and comparison.changed:
            missed = comparison.missed_tokens(cached)
            reason = CacheMissReason(f"{comparison.changed}_changed", missed)
        elif comparison is not None and not comparison.is_reused(
            cached, self._engine.manager.capacity.page_size
        ):
            reason = CacheMissReason("unavailable")
        self.stream.body.diagnostics = None if reason is None else Diagnostics(reason)

    def _usage(self) -> MessageUsage:
        generation, tokenizer = self._generation, self._engine.tokenizer
        usage, keep_s = usage_of(generation, tokenizer=tokenizer), generation.scheduling.keep_s
        cached = usage.prompt_tokens_details.cached_tokens
        written = self._engine.num_written_tokens(generation) if keep_s else 0
        hour = written if keep_s == CONTROL_S["1h"] else 0
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached - written,
            cache_creation_input_tokens=written,
            cache_creation=CacheCreation(written - hour, hour) if keep_s else UNSET,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(generation.reasoning_tokens() or 0),
            grammar=usage.grammar,
            truncated=truncated_of(generation.choices[0], tokenizer),
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
