"""The Responses API: its items to a `Conversation`, and its settings to a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from ....runtime.config.answer_config import RequestLimits
from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import RequestError
from ....runtime.sampling_defaults import SamplingDefaults
from ...conversation.conversation import (
    TEXT_SEPARATOR,
    Content,
    Conversation,
    History,
    ReasoningOptions,
    Tool,
)
from ...conversation.parameters import CUSTOM_INPUT
from ...generation import Constraint, GenerationRequest, warm_up_of
from ..openai.messages import checked_template_variables
from ..openai.tools import choice_of, tool_of
from ..recent_items import KEPT_S
from ..schema.constraints import constraint_of, json_object, json_schema
from ..schema.errors import renamed_fields
from ..schema.field_policy import PART_POLICY, RESULT_POLICY, Notes, policy_of
from ..schema.generation_fields import answer_limit
from ..schema.image_parts import RequestImages
from ..schema.parts import ONLY_IMAGES, left_out, part_text, refuse_or_note, result_text, text_of
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
from .wire import (
    POLICY,
    ReasoningFields,
    ResponsesRequest,
    TextOptions,
)

LENGTH_PARAM: Final = "max_output_tokens"
FORMAT_PARAM: Final = "text.format"
NAMES: Final = {
    "max_new_tokens": LENGTH_PARAM,
    "max_tokens": LENGTH_PARAM,
    "min_new_tokens": "min_tokens",
    "messages": "input",
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
    earlier: Sequence[Body] = (),
    *,
    sees_images: bool = False,
    is_stored: bool = False,
) -> tuple[ResponsesRequest, GenerationRequest]:
    """Check a request.

    Args:
        body: its JSON.
        config: settings of the server.
        defaults: for the sampling fields that the request leaves out.
        find_item: an item of an earlier answer by its id, for `item_reference`.
        earlier: the items of `previous_response_id`.
        sees_images: messages of the user may have images.
        is_stored: the server stores responses.

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
    _check_storing(request, is_stored=is_stored)
    history = History()
    if request.instructions:
        history.system(request.instructions)
    read_items(request.input, history, notes, config.limits, find_item, earlier, sees_images=sees_images)
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
    generation = GenerationRequest(
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
    options = request.prompt_cache_options
    return request, warm_up_of(generation) if options is not None and options.prewarm else generation


def _check_storing(request: ResponsesRequest, *, is_stored: bool) -> None:
    for name, value in (
        ("previous_response_id", request.previous_response_id),
        ("background", request.background),
    ):
        if value and not is_stored:
            raise refused(
                name,
                f"is {show(value)}, but this server stores no responses; start it with --state-dir DIR, or leave the "
                "field out",
                "unsupported_field",
            )
    if request.background and request.store is False:
        raise refused(
            "background", "is true, but store is false, and such a response is stored; leave one out"
        )


# ---------------------------------------------------------------- input


def read_items(
    value: object,
    history: History,
    notes: Notes,
    limits: RequestLimits,
    find_item: Callable[[str], Body | None] = lambda item_id: None,
    earlier: Sequence[Body] = (),
    *,
    sees_images: bool = False,
) -> None:
    """Add a text or items to a history.

    Args:
        find_item, earlier, sees_images: as in `read_responses`.

    Raises:
        RequestError: one is refused; names its path in `input`.
    """
    reader = _ItemReader(history, notes, find_item, RequestImages(limits) if sees_images else None)
    if earlier:
        check_limit("previous_response_id", len(earlier), "items", limits.max_messages, "max_messages")
        reader.read_earlier(earlier)
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

    def __init__(
        self,
        history: History,
        notes: Notes,
        find_item: Callable[[str], Body | None],
        images: RequestImages | None,
    ) -> None:
        self._images = images
        self._history = history
        self._notes = notes
        self._find_item = find_item
        self._unknown_calls: set[str] = set()  # ids of calls that were left out, and so are their results
        self._earlier_ids: set[str] = set()

    def read_earlier(self, items: Sequence[Body]) -> None:
        """Add the items of a chain, of which earlier answers have had the warnings.

        Raises:
            RequestError: one is refused.
        """
        notes, self._notes = self._notes, Notes([], strict=False)
        for item in items:
            self.read(item, "previous_response_id")
        self._earlier_ids = {item["id"] for item in items if isinstance(item.get("id"), str)}
        self._notes = notes

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
                arguments = item.get("arguments")  # some clients replay them as an object
                if not isinstance(arguments, dict):
                    arguments = _text(item, "arguments", at)
                self._read_call(item, at, arguments)
            case "custom_tool_call":
                self._read_call(item, at, {CUSTOM_INPUT: _text(item, "input", at)})
            case "function_call_output" | "custom_tool_call_output":
                self._read_result(item, at, str(kind))
            case "reasoning":
                field = "content" if item.get("content") else "summary"
                if text := text_of(item.get(field) or [], f"{at}.{field}", self._notes):
                    self._history.reasoning(text)
                elif item.get("encrypted_content"):
                    left_out("reasoning", at, self._notes, "this server cannot read encrypted_content")
            case "item_reference":
                item_id = _text(item, "id", at)
                if item_id in self._earlier_ids:
                    self._notes.warn(f"{at} was left out: previous_response_id has the item already")
                    return
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

    def _read_call(self, item: Body, at: str, arguments: str | Body) -> None:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
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
        if role == "user" and self._images is not None and isinstance(item.get("content"), list):
            self._history.user(self._content(item["content"], f"{at}.content", self._images))
            return
        text = text_of(item.get("content"), f"{at}.content", notes)
        match role:
            case "user":
                self._history.user(text)
            case "assistant":
                self._history.assistant(text)
            case _:
                self._history.system(text)

    def _content(self, parts: list[Any], at: str, images: RequestImages) -> Content:
        read: list[dict[str, Any]] = []
        texts: list[str] = []
        for place, part in objects(parts, at):
            if (text := part_text(part, place)) is not None:
                texts.append(text)
                read.append({"type": "text", "text": text})
            elif (image := images.input_image(part, place, self._notes)) is not None:
                read.append(image)
            else:
                refuse_or_note(part, place, None, ONLY_IMAGES)
        return TEXT_SEPARATOR.join(texts) if len(texts) == len(read) else read


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
