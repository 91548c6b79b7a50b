"""The Responses API: its items to a `Conversation`, its settings to a request, and deltas to events and items.

Order of events: created, in_progress; for each item output_item.added, its parts and deltas, output_item.done; then
completed, incomplete or failed. An answer in one piece is the final object of the same writer, so that both have the
same items.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ....runtime.config.answer_config import RequestLimits
from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import RequestError
from ....runtime.sampling_defaults import SamplingDefaults
from ...conversation.conversation import Conversation, History, ReasoningOptions, Tool
from ...conversation.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ...conversation.parameters import CUSTOM_INPUT
from ...generation import Constraint, GenerationRequest
from ..openai.messages import checked_template_variables
from ..openai.tools import choice_of, tool_of
from ..schema.constraints import constraint_of, json_object, json_schema
from ..schema.errors import renamed_fields
from ..schema.field_policy import PART_POLICY, RESULT_POLICY, Notes, policy_of
from ..schema.generation_fields import answer_limit
from ..schema.parts import left_out, result_text, text_of
from ..schema.values import (
    Body,
    check_limit,
    convert,
    effort_options,
    objects,
    one_of,
    refused,
    shortened,
    show,
)
from .items import KEPT_S
from .wire import (
    POLICY,
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningFields,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    ResponsesUsage,
    TextOptions,
)

LENGTH_PARAM: Final = "max_output_tokens"
FORMAT_PARAM: Final = "text.format"
NAMES: Final = {
    "max_new_tokens": LENGTH_PARAM,
    "max_tokens": LENGTH_PARAM,
    "min_new_tokens": "min_tokens",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
}
_ROLES: Final = ("user", "assistant", "system", "developer")
_NOT_KNOWN: Final = "this server does not know such items, or does not run their tool"
_NO_EFFECT: Final = ("async", "caller", "encrypted_content", "id", "phase", "status")
_CALL: Final = policy_of(("call_id", "name", "namespace", "arguments"), _NO_EFFECT)
_OUTPUT: Final = policy_of(("call_id",), (*_NO_EFFECT, "name", "namespace"), {"output": RESULT_POLICY})
_ITEMS: Final = {
    "message": policy_of(("role",), _NO_EFFECT, {"content": PART_POLICY}),
    "function_call": _CALL,
    "function_call_output": _OUTPUT,
    "custom_tool_call": policy_of(("call_id", "name", "namespace", "input"), _NO_EFFECT),
    "custom_tool_call_output": _OUTPUT,
    "reasoning": policy_of((), _NO_EFFECT, {"content": PART_POLICY, "summary": PART_POLICY}),
}


_NAMESPACE_END: Final = "__"
"""Between the namespace of a tool and its name there, for the model."""


def read_responses(
    body: Body,
    config: EngineConfig,
    defaults: SamplingDefaults,
    find_item: Callable[[str], Body | None] = lambda item_id: None,
) -> tuple[ResponsesRequest, GenerationRequest]:
    """Check a request.

    Args:
        body: its JSON.
        config: settings of the server.
        defaults: for the sampling fields that the request leaves out.
        find_item: an item of an earlier answer by its id, for `item_reference`.

    Raises:
        RequestError: a field is refused; names its path.
    """
    strict = config.server.strict
    notes = Notes(POLICY.check(body, strict=strict), strict=strict)
    request = convert(body, ResponsesRequest)
    if request.n not in (None, 1):
        raise refused(
            "n", f"is {request.n}, but a response has one answer; leave it out", "unsupported_value"
        )
    history = History()
    if request.instructions:
        history.system(request.instructions)
    _read_input(request.input, _ItemReader(history, notes, find_item), config.limits)
    _check_include(request.include or (), notes)
    tools = _tools(request.tools or [], notes)
    text = convert(request.text or {}, TextOptions, "text")
    if text.verbosity not in (None, "medium"):
        notes.warn("text.verbosity has no effect")
    constraint = _constraint(request, text, config)
    if constraint is not None:
        notes.warn(*constraint.warnings)
    conversation = Conversation(
        messages=history.messages,
        tools=tools,
        tool_choice=choice_of(request.tool_choice, request.parallel_tool_calls),
        tool_path="tools[{}]",
        spec=None if constraint is None else constraint.use.spec,
        reasoning=_reasoning(request.reasoning),
        variables=checked_template_variables(request.chat_template_kwargs),
    )
    with renamed_fields(NAMES):
        sampling = request.sampling(
            config.limits,
            defaults,
            max_new_tokens=answer_limit(request.max_output_tokens, LENGTH_PARAM),
            min_new_tokens=request.min_tokens,
            keep_stop=False,
        )
    return request, GenerationRequest(
        conversation=conversation,
        constraint=constraint,
        sampling=sampling,
        id_prefix="resp",
        prompt_param="input",
        length_param=LENGTH_PARAM,
        cut_length=True,
        names=NAMES,
        warnings=notes.warnings,
    )


# ---------------------------------------------------------------- input


def _read_input(value: object, reader: _ItemReader, limits: RequestLimits) -> None:
    if isinstance(value, str):
        if not value:
            raise refused("input", "is empty; a chat has at least one message", "empty_prompt")
        reader.read({"role": "user", "content": value}, "input")
        return
    if not isinstance(value, list):
        raise refused(
            "input", f"is {show(value)}, but it must be a string or a list of items", "invalid_type"
        )
    if not value:
        raise refused("input", "is empty; a chat has at least one message", "empty_prompt")
    check_limit("input", len(value), "items", limits.max_messages, "max_messages")
    for at, item in objects(value, "input"):
        reader.read(item, at)


class _ItemReader:
    """Reads items into a history; those that this server does not know are left out."""

    def __init__(self, history: History, notes: Notes, find_item: Callable[[str], Body | None]) -> None:
        self._history = history
        self._notes = notes
        self._find_item = find_item
        self._unknown_calls: set[str] = set()  # ids of calls that were left out, and so are their results

    def read(self, item: Body, at: str) -> None:
        """Add one item.

        Raises:
            RequestError: it is refused; names the field.
        """
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind in _ITEMS:
            self._notes.check(_ITEMS[kind], item, at)
        match kind:
            case "message":
                self._read_message(item, at)
            case "function_call":
                self._read_call(item, at, _text(item, "arguments", at))
            case "custom_tool_call":
                arguments = json.dumps({CUSTOM_INPUT: _text(item, "input", at)}, ensure_ascii=False)
                self._read_call(item, at, arguments)
            case "function_call_output" | "custom_tool_call_output":
                self._read_result(item, at, str(kind))
            case "reasoning":
                field = "content" if item.get("content") else "summary"
                if text := text_of(item.get(field) or [], f"{at}.{field}", self._notes):
                    self._history.reasoning(text)
            case "item_reference":
                item_id = _text(item, "id", at)
                if (found := self._find_item(item_id)) is None:
                    raise refused(
                        f"{at}.id",
                        f"is {show(item_id)}, but this server keeps the items of an answer for {KEPT_S / 60:g} minutes "
                        "at most and has none with this id; send the item itself, as clients with store: false do",
                    )
                self.read(found, at)
            case str():
                left_out(kind, at, self._notes, _NOT_KNOWN)
                if isinstance(call_id := item.get("call_id"), str):
                    self._unknown_calls.add(call_id)
            case _:
                raise refused(f"{at}.type", f"is {show(kind)}, but it must be a string", "invalid_type")

    def _read_call(self, item: Body, at: str, arguments: str) -> None:
        self._history.call(_text(item, "call_id", at), _tool_name(item, at), arguments)

    def _read_result(self, item: Body, at: str, kind: str) -> None:
        call_id = _text(item, "call_id", at)
        if "output" not in item:
            raise refused(f"{at}.output", "is missing; the item must have it", "missing_field")
        text = result_text(item["output"], f"{at}.output", self._notes)
        if call_id in self._unknown_calls:
            left_out(kind, at, self._notes, "its call was left out")
        elif self._history.name_of(call_id) is None:
            raise refused(
                f"{at}.call_id",
                f"is {show(call_id)}, but no call before it has this id; send the item with the call, too",
            )
        else:
            self._history.result(call_id, text)

    def _read_message(self, item: Body, at: str) -> None:
        role = one_of(item.get("role"), _ROLES, f"{at}.role")
        notes = self._notes if role == "assistant" else None
        text = text_of(item.get("content"), f"{at}.content", notes)
        match role:
            case "user":
                self._history.user(text)
            case "assistant":
                self._history.assistant(text)
            case _:
                self._history.system(text)


def _text(item: Body, key: str, at: str) -> str:
    if key not in item:
        raise refused(f"{at}.{key}", "is missing; the item must have it", "missing_field")
    return convert(item[key], str, f"{at}.{key}")


# ---------------------------------------------------------------- tools


def _tools(tools: list[dict[str, Any]], notes: Notes) -> tuple[Tool, ...]:
    """The tools that the client runs, those in namespaces too; others are left out with a warning."""
    kept: list[Tool] = []
    warnings: list[str] = []
    for at, tool in objects(tools, "tools"):
        if tool.get("type") != "namespace":
            made = tool_of(tool, at, warnings)
            kept += [] if made is None else [made]
            continue
        namespace = _text(tool, "name", at)
        inner = convert(tool.get("tools") or [], list[dict[str, Any]], f"{at}.tools")
        for place, entry in objects(inner, f"{at}.tools"):
            if (made := tool_of(entry, place, warnings)) is not None:
                name = f"{namespace}{_NAMESPACE_END}{made.name}"
                kept.append(replace(made, name=name, namespace=namespace))
    notes.warn(*warnings)
    return tuple(kept)


def namespaces_of(conversation: Conversation) -> dict[str, tuple[str, str]]:
    """Name of a tool as the model sees it -> its namespace, and its name there."""
    return {
        tool.name: (tool.namespace, tool.name.removeprefix(f"{tool.namespace}{_NAMESPACE_END}"))
        for tool in conversation.tools
        if tool.namespace
    }


def _tool_name(call: Body, at: str) -> str:
    """The name of the tool of an earlier call, as the model sees it."""
    name = _text(call, "name", at)
    if call.get("namespace") is None:
        return name
    return f"{_text(call, 'namespace', at)}{_NAMESPACE_END}{name}"


# ---------------------------------------------------------------- settings


def _check_include(names: Iterable[str], notes: Notes) -> None:
    """Refuse log-probabilities; other parts are not there to be included, which is a warning."""
    for index, name in enumerate(names):
        if name == "message.output_text.logprobs":
            raise refused(
                f"include[{index}]",
                f"is {show(name)}, but log-probabilities are not supported here yet; leave it out, or use "
                "/v1/chat/completions",
                "unsupported_value",
            )
        if name != "reasoning.encrypted_content":  # the reasoning itself is in the answer
            notes.warn(f"include[{index}] ({shortened(name, 60)}) has no effect: answers have no such part")


def _constraint(request: ResponsesRequest, text: TextOptions, config: EngineConfig) -> Constraint | None:
    """The constraint of `text.format`, or of a field of another engine."""
    own = None if text.format is None else _format(text.format, config, request)
    other = constraint_of(request, config.answers, config.limits, strict_server=config.server.strict)
    if own is not None and other is not None:
        raise RequestError(
            f"{own.param} and {other.param} exclude each other; send one of them",
            param=other.param,
            code="conflicting_constraints",
        )
    return own or other


def _format(form: dict[str, Any], config: EngineConfig, request: ResponsesRequest) -> Constraint | None:
    match one_of(form.get("type"), ("text", "json_object", "json_schema"), f"{FORMAT_PARAM}.type"):
        case "json_object":
            return json_object(FORMAT_PARAM, config, request)
        case "json_schema":
            return json_schema(
                form.get("schema"),
                FORMAT_PARAM,
                f"{FORMAT_PARAM}.schema",
                config,
                strict=form.get("strict") is True,
                fields=request,
            )
        case _:
            return None


def _reasoning(value: dict[str, Any] | None) -> ReasoningOptions:
    fields = convert(value or {}, ReasoningFields, "reasoning")
    return replace(effort_options(fields.effort, "reasoning.effort"), budget=fields.max_tokens)


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
