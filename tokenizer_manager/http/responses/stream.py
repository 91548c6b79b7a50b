"""`ResponseStream`: the events and items of one response.

Order of events: created, in_progress; for each item output_item.added, its parts and deltas, output_item.done; then
completed, incomplete or failed. An answer in one piece is the final object of the same writer, so that both have the
same items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, assert_never

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from .wire import (
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponseEvent,
    ResponsesUsage,
)

_encoder: Final = msgspec.json.Encoder()


class ResponseStream:
    """Writes one response.

    Attributes:
        body: the response object as of the latest event.
        num_events: so far.
        namespaces: name of a tool as the model sees it -> its namespace, and its name there.
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
        self.namespaces = namespaces or {}
        self.body = body
        self._make_id = make_id
        self.num_events = 0
        self._item: Item | None = None  # the open one, the last of `_items`
        self._texts: list[str] = []  # of the open item
        self._items: list[Item] = []

    def begin(self) -> bytes:
        """The first two events."""
        return self.opening("response.created") + self.opening("response.in_progress")

    def opening(self, name: str) -> bytes:
        """An event with the body before any item."""
        return self._event(name, response=self.body)

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events for some deltas."""
        return b"".join(map(self._delta, deltas))

    def complete(self, finish_reason: str | None, usage: ResponsesUsage, now_s: int) -> bytes:
        """Complete the body of a response whose generation has finished; the events before `last_event`."""
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
        return events

    def last_event(self) -> bytes:
        """The event with the body of a response that has ended."""
        return self._event(f"response.{self.body.status}", response=self.body)

    def break_off(
        self,
        status: Literal["failed", "cancelled"],
        error: ResponseError | None,
        usage: ResponsesUsage | None,
    ) -> bytes:
        """End the body of a response whose generation has not finished; the events before `last_event`."""
        events = self._end_item("incomplete")
        self.body = replace(self.body, status=status, error=error, output=self._items, usage=usage or UNSET)
        return events

    def snapshot(self) -> ResponseBody:
        """The body as of now, with the items so far."""
        return replace(self.body, output=self._items)

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
                namespace, short = self.namespaces.get(name, (UNSET, name))
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
        data = ResponseEvent(type=kind, sequence_number=self.num_events, **fields)
        self.num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(data) + b"\n\n"
