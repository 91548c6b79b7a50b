"""`Conversation`: a chat as every API sees it after its own form of messages and tools has been checked.

`/v1/chat/completions`, `/v1/responses`, `/v1/messages` and Ollama's endpoints each make one; `LLM.chat` too. Templates
have one assistant message per turn, with its reasoning, its text and its calls; some refuse two messages of one role in
a row. The agent APIs have separate items, so `History` joins neighbors of one role.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ...runtime.grammar_use import GrammarSpec
from ..media.sources import ImageSource


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call.

    Attributes:
        name: unique among the tools of a request.
        parameters: JSON Schema of the arguments, an object; None for a tool without parameters.
        strict: the arguments must match the schema; otherwise they are any JSON object, unless a call is demanded.
        custom: the tool takes text instead of JSON.
        custom_grammar: of that text; None: any text.
        namespace: the client's group of tools, which is the beginning of `name`; "" for none.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    custom: bool = False
    custom_grammar: GrammarSpec | None = None
    namespace: str = ""


class ChoiceMode(enum.StrEnum):
    """Whether the model may or must call tools. NAMED: exactly the tool `ToolChoice.name`, once."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may be called.

    Attributes:
        allowed: names of the tools that may be called (`allowed_tools`); None: all.
        parallel: an answer may have more than one call.
    """

    mode: ChoiceMode = ChoiceMode.AUTO
    name: str = ""
    allowed: tuple[str, ...] | None = None
    parallel: bool = True


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a request about reasoning.

    Attributes:
        enabled: None: as the model's template does by default.
        effort: none, minimal, low, medium, high, xhigh or max; None: not set.
        budget: most tokens of the block; None: no limit.
        control: it may be ended while it is generated.
        include: send the reasoning text. If False it is generated and counted, and not sent.
        separate: send it apart from the content. If False it stays in the content, with its markers.
        stream: send it piece by piece; if False, in one delta when it ends.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    control: bool = False
    include: bool = True
    separate: bool = True
    stream: bool = True


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A chat to answer.

    Attributes:
        messages: for the template, in OpenAI's form: role, content (str; "" beside tool calls), and where present name,
            reasoning_content, tool_call_id, tool_calls: [{id, type: function, function: {name, arguments: str}}]. The
            content of a message with images is a list of parts, {type: text, text} and {type: image, source}.
        tools: the offered tools.
        tool_choice: which of them may be called.
        spec: what the answer is constrained to, if it is no tool call; None: free text.
        reasoning: see there.
        variables: further variables of the template (`chat_template_kwargs`).
        documents: for templates that know them (retrieval).
        continue_final_message: the last message is the assistant's, and the answer continues it.
        add_generation_prompt: end the prompt with the beginning of an answer.
        tool_path: the field of the tool number {} in the client's request, for errors.
        schema_field: the field of a tool that has its schema, for errors.
    """

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    spec: GrammarSpec | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    variables: dict[str, Any] = {}
    documents: tuple[dict[str, Any], ...] = ()
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    tool_path: str = "tools[{}].function"
    schema_field: str = "parameters"


TEXT_SEPARATOR: Final = "\n"
"""Between the text parts of a message, as in chat completions."""
_MESSAGE_SEPARATOR: Final = "\n\n"

Content = str | list[dict[str, Any]]
"""Content of a message: a text, or parts, of which at least one is an image."""


def joined_contents(first: Content, second: Content, separator: str) -> Content:
    """The content of one message with the contents of two; the separator is between two texts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{separator}{second}"
    before, after = parts_of(first), parts_of(second)
    if before and after and before[-1]["type"] == after[0]["type"] == "text":
        text = f"{before[-1]['text']}{separator}{after[0]['text']}"
        return [*before[:-1], {"type": "text", "text": text}, *after[1:]]
    return [*before, *after]


def parts_of(content: Content) -> list[dict[str, Any]]:
    """A content as parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def image_sources(messages: Sequence[Mapping[str, Any]]) -> tuple[ImageSource, ...]:
    """The images of messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return tuple(part["source"] for part in parts if part.get("type") == "image")


def free_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Drop the files of images that have been placed: the conversation lives as long as its answer."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "image":
                part["source"] = replace(part["source"], content=b"")


class History:
    """Messages in OpenAI's form.

    Attributes:
        messages: so far.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def system(self, text: str) -> None:
        """Add instructions; those at the beginning become one message."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self._extend(self.messages[0], text, _MESSAGE_SEPARATOR)
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, content: Content) -> None:
        """Add a content of the user."""
        if (last := self._last("user")) is not None:
            self._extend(last, content, _MESSAGE_SEPARATOR)
        else:
            self.messages.append({"role": "user", "content": content})

    def assistant(self, text: str) -> None:
        """Add a text of the model."""
        last = self._last("assistant")
        if last is None or "tool_calls" in last:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self._extend(last, text, TEXT_SEPARATOR)

    def reasoning(self, text: str) -> None:
        """Add a reasoning of the model; it belongs to the text and the calls after it."""
        last = self._last("assistant")
        if last is None or last["content"] or "tool_calls" in last:
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            last["reasoning_content"] = f"{last['reasoning_content']}{TEXT_SEPARATOR}{text}"

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of the model."""
        last = self._last("assistant")
        if last is None:
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        last.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def result(self, call_id: str, text: str, name: str | None = None) -> None:
        """Add the result of a call."""
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        if name is None:
            name = self.name_of(call_id)
        if name is not None:
            message["name"] = name
        self.messages.append(message)

    def name_of(self, call_id: str) -> str | None:
        """The tool of an earlier call."""
        for message in reversed(self.messages):
            for call in message.get("tool_calls", ()):
                if call["id"] == call_id:
                    name: str = call["function"]["name"]
                    return name
        return None

    def _last(self, role: str) -> dict[str, Any] | None:
        if self.messages and self.messages[-1]["role"] == role:
            return self.messages[-1]
        return None

    @staticmethod
    def _extend(message: dict[str, Any], content: Content, separator: str) -> None:
        before = message["content"]
        message["content"] = joined_contents(before, content, separator) if before else content
