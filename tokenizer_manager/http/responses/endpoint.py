"""`POST /v1/responses` and `POST /v1/responses/input_tokens`, and the events and items of an answer.

Order of events: created, in_progress; for each item output_item.added, its parts and deltas, output_item.done; then
completed, incomplete or failed. An answer in one piece is the final object of the same writer, so that both have the
same items.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ...generation import Generation, GenerationRequest, Row
from ..delivery import collect_deltas, stream
from ..exchange import Exchange
from ..guards.auth import Caller
from ..prompt_parts import Comparison, compare
from ..schema.accounting import truncated_of, usage_of
from ..schema.errors import ErrorReply
from ..services import Engine
from .convert import namespaces_of, read_responses
from .wire import (
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputDetails,
    InputTokensBody,
    Item,
    ItemStatus,
    MessageItem,
    OutputDetails,
    OutputText,
    PromptCacheDiagnostics,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    ResponsesUsage,
)

_ABORTED: Final = ResponseError("server_error", "the request was aborted")


async def responses(exchange: Exchange, engine: Engine) -> None:
    """Answer a chat in the form of the Responses API."""
    body, request = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            writer = _Writer(engine, generation, body)
            if body.stream:
                exchange.failure_event = writer.fail
                await stream(exchange, generation, writer)
            else:
                writer.stream.events(await collect_deltas(generation))
                writer.closing()
                await exchange.send_json(writer.stream.body)


async def response_input_tokens(exchange: Exchange, engine: Engine) -> None:
    """The number of tokens of the prompt of a response."""
    _, request = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        num_tokens, warnings = await engine.count_prompt(exchange, request)
        await exchange.send_json(InputTokensBody(input_tokens=num_tokens, warnings=warnings or UNSET))


def _read(body: dict[str, Any], engine: Engine, caller: Caller) -> tuple[ResponsesRequest, GenerationRequest]:
    request, generation = read_responses(
        body,
        engine.config,
        engine.sampling_defaults,
        lambda item: engine.recent_items.find(item, caller.owner),
        sees_images=engine.images.are_seen,
    )
    engine.check_model(request.model)
    request.input = []  # the conversation has them; an answer may take long, and images are megabytes
    scheduling = engine.with_adapter(caller.scheduling(request, body=body), request.model)
    return request, replace(generation, scheduling=scheduling)


class _Writer:
    """Writes the stream of one response.

    Attributes:
        stream: of the events.
    """

    def __init__(self, engine: Engine, generation: Generation, request: ResponsesRequest) -> None:
        assert generation.request.conversation is not None
        self._engine = engine
        self._generation = generation
        self._begun = False
        self._recent_items = None if request.store is False else engine.recent_items
        options = request.prompt_cache_options
        self._earlier_id = None if options is None else options.comparison_response_id
        self._comparison: Comparison | None = None
        if self._recent_items is not None or options is not None:
            response_id = generation.id.replace("-", "_")
            self._comparison = compare(generation, response_id, self._earlier_id, engine.recent_items)
        self.stream = ResponseStream(
            _body(engine, generation, request),
            lambda prefix: f"{prefix}_{uuid.uuid4().hex}",
            namespaces_of(generation.request.conversation),
        )

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The events for a row, after the first ones."""
        begin = b"" if self._begun else self.stream.begin()
        self._begun = True
        return begin + self.stream.events(deltas)

    def closing(self) -> bytes:
        """The last events."""
        [choice] = self._generation.choices
        usage = _usage(self._generation, self._engine)
        if choice.finish_reason == "abort":
            return self.stream.fail(_ABORTED, usage)
        self.stream.body.truncated = truncated_of(choice, self._engine.tokenizer)
        if self._earlier_id:
            page_size = self._engine.manager.capacity.page_size
            self.stream.body.prompt_cache_diagnostics = _diagnostics(
                self._comparison, choice.usage.cached_tokens, page_size
            )
        events = self.stream.complete(
            None if choice.warm_up else choice.finish_reason, usage, int(time.time())
        )
        if self._recent_items is not None:
            self._recent_items.keep(self.stream.body.output, self._generation.scheduling.owner)
        return events

    def fail(self, reply: ErrorReply) -> bytes:
        """The last events of a stream that fails."""
        error = reply.body.error
        code = "rate_limit_exceeded" if reply.status == 429 else "server_error"
        usage = _usage(self._generation, self._engine)
        return self.stream.fail(ResponseError(code, error.message), usage)


def _diagnostics(comparison: Comparison | None, cached_tokens: int, page_size: int) -> PromptCacheDiagnostics:
    if comparison is None:
        return PromptCacheDiagnostics(type="comparison_response_not_found")
    if comparison.changed:
        part = comparison.changed if comparison.changed in ("model", "tools") else "input"
        missed = comparison.missed_tokens(cached_tokens)
        return PromptCacheDiagnostics(type="cache_miss", reason=f"{part}_changed", cache_missed_tokens=missed)
    reused = comparison.is_reused(cached_tokens, page_size)
    return PromptCacheDiagnostics(type="cache_hit" if reused else "unavailable")


def _body(engine: Engine, generation: Generation, request: ResponsesRequest) -> ResponseBody:
    """The response at its beginning, with the request's settings."""
    sampling = generation.request.sampling
    reasoning = request.reasoning or {}
    text = request.text or {}
    return ResponseBody(
        id=generation.id.replace("-", "_"),
        created_at=int(time.time()),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        model=generation.scheduling.served_as or engine.served_model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        temperature=sampling.temperature,
        text={"format": text.get("format") or {"type": "text"}},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_p=sampling.top_p,
        user=request.user or UNSET,
        metadata=request.metadata or {},
        warnings=generation.request.warnings or UNSET,
    )


def _usage(generation: Generation, engine: Engine) -> ResponsesUsage:
    usage = usage_of(generation, tokenizer=engine.tokenizer)
    return ResponsesUsage(
        usage.prompt_tokens,
        InputDetails(usage.prompt_tokens_details.cached_tokens, engine.num_written_tokens(generation)),
        usage.completion_tokens,
        OutputDetails(generation.reasoning_tokens() or 0),
        usage.total_tokens,
        usage.grammar,
    )


_encoder: Final = msgspec.json.Encoder()


class ResponseStream:
    """Writes one response.

    Attributes:
        body: the response object as of the latest event.
    """

    def __init__(
        self,
        body: ResponseBody,
        make_id: Callable[[str], str],
        namespaces: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """Begin.

        Args:
            body: in progress, without output.
            make_id: a new id with the given prefix.
            namespaces: name of a tool as the model sees it -> its namespace, and its name there.
        """
        self._namespaces = namespaces or {}
        self.body = body
        self._make_id = make_id
        self._sequence_number = 0
        self._item: Item | None = None  # the open one, the last of `_items`
        self._texts: list[str] = []  # of the open item
        self._items: list[Item] = []

    def begin(self) -> bytes:
        """The first two events."""
        return self._event("response.created", response=self.body) + self._event(
            "response.in_progress", response=self.body
        )

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events for some deltas."""
        return b"".join(map(self._delta, deltas))

    def complete(self, finish_reason: str | None, usage: ResponsesUsage, now_s: int) -> bytes:
        """The events that end a response whose generation has finished."""
        is_cut = finish_reason == "length"
        events = self._end_item("incomplete" if is_cut else "completed")
        self.body = replace(
            self.body,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else now_s,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=usage,
        )
        return events + self._event(f"response.{self.body.status}", response=self.body)

    def fail(self, error: ResponseError, usage: ResponsesUsage | None) -> bytes:
        """The events that end a response whose generation has failed."""
        events = self._end_item("incomplete")
        self.body = replace(self.body, status="failed", error=error, output=self._items, usage=usage or UNSET)
        return events + self._event("response.failed", response=self.body)

    # ------------------------------------------------------------ deltas

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case Reasoning(text):
                return self._text(ReasoningItem, text, "response.reasoning_text.delta")
            case Content(text):
                return self._text(MessageItem, text, "response.output_text.delta", logprobs=[])
            case CallBegin(_, call_id, name, custom):
                events = self._end_item("completed")
                kind, prefix = (CustomToolCallItem, "ctc") if custom else (FunctionCallItem, "fc")
                namespace, short = self._namespaces.get(name, (UNSET, name))
                return events + self._add(
                    kind(
                        id=self._make_id(prefix),
                        status="in_progress",
                        call_id=call_id,
                        name=short,
                        namespace=namespace,
                    )
                )
            case CallArguments(_, text):
                return self._arguments(text)
            case CallEnd():
                return self._end_item("completed")

    def _text(
        self, kind: type[ReasoningItem] | type[MessageItem], text: str, name: str, **more: Any
    ) -> bytes:
        if not text:
            return b""
        events = b""
        if not isinstance(self._item, kind):
            events = self._end_item("completed")
            prefix = "rs" if kind is ReasoningItem else "msg"
            events += self._add(kind(id=self._make_id(prefix), status="in_progress"))
            if kind is MessageItem:
                events += self._event(
                    "response.content_part.added", **self._place(), content_index=0, part=OutputText()
                )
        self._texts.append(text)
        return events + self._event(name, **self._place(), content_index=0, delta=text, **more)

    def _arguments(self, text: str) -> bytes:
        if not text:
            return b""
        self._texts.append(text)
        kind = (
            "custom_tool_call_input"
            if isinstance(self._item, CustomToolCallItem)
            else "function_call_arguments"
        )
        return self._event(f"response.{kind}.delta", **self._place(), delta=text)

    # ------------------------------------------------------------ items

    def _add(self, item: Item) -> bytes:
        self._item = item
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _end_item(self, status: ItemStatus) -> bytes:
        """The events that end the open item, if there is one."""
        if self._item is None:
            return b""
        events = b""
        if (
            isinstance(self._item, FunctionCallItem)
            and status == "completed"
            and not "".join(self._texts).strip()
        ):
            self._texts.clear()
            events = self._arguments("{}")
        text, place = "".join(self._texts), self._place()
        item: Item
        match self._item:
            case MessageItem():
                part = OutputText(text=text)
                item = replace(self._item, status=status, content=[part])
                events += self._event(
                    "response.output_text.done", **place, content_index=0, text=text, logprobs=[]
                )
                events += self._event("response.content_part.done", **place, content_index=0, part=part)
            case ReasoningItem():
                item = replace(self._item, status=status, content=[ReasoningText(text=text)])
                events += self._event("response.reasoning_text.done", **place, content_index=0, text=text)
            case FunctionCallItem():
                item = replace(self._item, status=status, arguments=text)
                events += self._event(
                    "response.function_call_arguments.done", **place, name=item.name, arguments=text
                )
            case CustomToolCallItem():
                item = replace(self._item, status=status, input=text)
                events += self._event("response.custom_tool_call_input.done", **place, input=text)
            case _ as unreachable:
                assert_never(unreachable)
        self._items[-1] = item
        self._item = None
        self._texts.clear()
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"output_index": len(self._items) - 1, "item_id": self._item.id}

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        data = ResponseEvent(type=kind, sequence_number=self._sequence_number, **fields)
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(data) + b"\n\n"
