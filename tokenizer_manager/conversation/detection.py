"""`AnswerFormats`: how a model writes tool calls and reasoning; `detect_formats` finds it out from its chat template.

Short conversations are rendered. A family of tool calls is a candidate if its first marker is in the template's output,
and matches if the parser finds exactly the calls that were rendered: one with nested arguments, and text and a call. A
template that fails does not match.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import jinja2

from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.config.answer_config import AnswerConfig
from ...runtime.errors import ConfigError, RequestError
from .chat_template import ChatTemplate
from .conversation import Tool
from .deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from .parsing.families import FAMILIES, GENERIC, HARMONY, Form, ToolFamily
from .parsing.output_parser import OutputParser
from .parsing.reasoning_families import HARMONY_REASONING, REASONING_FAMILIES, ReasoningFamily
from .tools import tool_for_template


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """Found once, at start.

    Attributes:
        tools: the format of calls; None (`--tool-call-parser none`): answers are not parsed for calls.
        reasoning: None: the model does not reason, or its reasoning is not separated from the answer.
        template_tools: the template shows tools and calls; otherwise they are written into the messages.
        object_arguments: the template wants the arguments of earlier calls as objects; otherwise as JSON text.
        written_calls: the template shows tools, and nothing of earlier calls: these are written into the contents.
        variables: names of the variables that the template reads.
    """

    tools: ToolFamily | None = GENERIC
    reasoning: ReasoningFamily | None = None
    template_tools: bool = False
    object_arguments: bool = True
    written_calls: bool = False
    variables: frozenset[str] = frozenset()

    @property
    def is_generic(self) -> bool:
        """Calls are described in the system message and always constrained."""
        return self.tools is not None and self.tools.form is Form.GENERIC

    @property
    def reasoning_switch(self) -> str | None:
        """The variable that turns reasoning on and off."""
        for name in ("enable_thinking", "thinking"):
            if name in self.variables:
                return name
        is_cohere = self.reasoning is not None and self.reasoning.name in ("command_a", "cohere2_moe")
        return "reasoning" if is_cohere and "reasoning" in self.variables else None


logger = logging.getLogger(__name__)

_Family = TypeVar("_Family")
_Calls = list[tuple[str, Any]]

_TEXT: Final = "zq content zq"
_USER: Final = {"role": "user", "content": "zq question zq"}
_PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "description": "a number"},
        "deep": {"type": "object", "description": "more"},
    },
    "required": ["city"],
}
_TOOL: Final = Tool(name="zq_weather", description="zq describes zq", parameters=_PARAMETERS)
_CALLS: Final = (
    (_TOOL.name, {"city": 'a "b" <c>\nd', "days": 3, "deep": {"a": [1, {"b": "ü"}], "ok": True}}),
    (_TOOL.name, {"city": "e"}),
)


def detect_formats(
    template: ChatTemplate | None, tokenizer: Tokenizer, config: AnswerConfig
) -> AnswerFormats:
    """Find the formats, or take those of the configuration.

    Raises:
        ConfigError: the configuration names an unknown format.
    """
    named_tools, named_reasoning = check_parser_names(config)
    if template is None:
        tools = named_tools if config.tool_call_parser != "auto" else GENERIC
        formats = AnswerFormats(tools=tools, reasoning=named_reasoning)
    else:
        formats = _detect(template, tokenizer, config, named_tools, named_reasoning)
    logger.info(
        "answer formats: tools=%s reasoning=%s template_tools=%s switch=%s",
        formats.tools.name if formats.tools else "none",
        formats.reasoning.name if formats.reasoning else "none",
        formats.template_tools,
        formats.reasoning_switch or "none",
    )
    return formats


def check_parser_names(config: AnswerConfig) -> tuple[ToolFamily | None, ReasoningFamily | None]:
    """The formats that the configuration names; None for `auto` and `none`.

    Raises:
        ConfigError: it names an unknown one.
    """
    return (
        _named(config.tool_call_parser, FAMILIES, "--tool-call-parser"),
        _named(config.reasoning_parser, REASONING_FAMILIES, "--reasoning-parser"),
    )


def _named(name: str, families: Mapping[str, _Family], flag: str) -> _Family | None:
    if name in ("auto", "none"):
        return None
    if name not in families:
        raise ConfigError(
            f"{flag} is {name!r}, but it must be auto, none, or one of {', '.join(sorted(families))}"
        )
    return families[name]


def _detect(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    config: AnswerConfig,
    named_tools: ToolFamily | None,
    named_reasoning: ReasoningFamily | None,
) -> AnswerFormats:
    try:
        variables = frozenset(template.undeclared_variables())
    except (jinja2.TemplateError, RecursionError):  # it has been compiled, so this is not expected
        variables = frozenset()
    prober = _Prober(template)
    reasoning = named_reasoning
    if config.reasoning_parser == "auto":
        reasoning = _find_reasoning(template, prober)
    knows_tools = "tools" in variables and prober.shows_tools()
    tools: ToolFamily | None
    as_objects = True
    if config.tool_call_parser == "none":
        tools = None
    elif named_tools is not None:
        tools = named_tools
        as_objects = prober.proof(tools, reasoning) != "text"
    else:
        tools, as_objects = GENERIC, True
        if knows_tools:
            for family in prober.candidates():
                if found := prober.proof(family, reasoning):
                    tools, as_objects = family, found == "object"
                    break
            else:
                if not prober.shows_calls():
                    tools = _only_family(template, tokenizer) or GENERIC
    if tools is HARMONY and config.reasoning_parser == "auto":
        reasoning = HARMONY_REASONING
    is_generic = tools is not None and tools.form is Form.GENERIC
    return AnswerFormats(
        tools=tools,
        reasoning=reasoning,
        template_tools=knows_tools and not is_generic,
        object_arguments=as_objects,
        written_calls=knows_tools
        and tools is not None
        and tools.form not in (Form.GENERIC, Form.HARMONY)
        and not prober.shows_calls(),
        variables=variables,
    )


def _only_family(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFamily | None:
    """The family of a template that shows tools and no calls.

    Its marker is one that no other family has, and is in the template's text or a special token of the tokenizer.
    """
    markers = {name: family.begin[0].strip() for name, family in FAMILIES.items() if family.begin}
    for name, marker in markers.items():
        token_id = tokenizer.token_to_id(marker)
        is_special = token_id is not None and tokenizer.is_special(token_id)
        is_tag = len(marker) > len("[") and list(markers.values()).count(marker) == 1
        if is_tag and (is_special or marker in template.source):
            return FAMILIES[name]
    return None


def _find_reasoning(template: ChatTemplate, prober: _Prober) -> ReasoningFamily | None:
    """The family that has its markers in the template, or in what it renders."""
    rendered = [
        prober.render([_USER], add_generation_prompt=True),
        prober.render([_USER, {"role": "assistant", "content": _TEXT, "reasoning_content": "zq thought zq"}]),
    ]
    last = {family.begin: family for family in REASONING_FAMILIES.values()}
    for (
        family
    ) in REASONING_FAMILIES.values():  # of several with one marker, the marks around the answer decide
        if family is not last[family.begin] and not all(
            mark in template.source for mark in family.answer_marks
        ):
            continue
        in_source = family.end in template.source
        if family is HARMONY_REASONING:  # <|end|> is a marker of other models too
            in_source = in_source and "<|channel|>" in template.source
        if in_source or any(family.begin in text for text in rendered):
            return family
    return None


class _Prober:
    """Renders the probing conversations of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """The prompt; "" if the template fails."""
        try:
            return self._template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=[tool_for_template(tool) for tool in tools],
            )
        except RequestError:
            return ""

    def shows_tools(self) -> bool:
        return _TOOL.name in self.render([_USER], tools=[_TOOL], add_generation_prompt=True)

    def shows_calls(self) -> bool:
        """Whether the name or an argument of a call is rendered."""
        call = ("zq_called", {"city": "zq_argument"})
        texts = [
            self.render([_USER, _call_message([call], "", form)], tools=[_TOOL]) for form in (True, False)
        ]
        refused = not any(texts)
        return refused or any(mark in text for text in texts for mark in ("zq_called", "zq_argument"))

    def candidates(self) -> Iterator[ToolFamily]:
        """Families that have their first marker in what the template renders of calls."""
        shown = "".join(
            self.render([_USER, _call_message(_CALLS[:1], "", as_objects)], tools=[_TOOL])
            for as_objects in (True, False)
        )
        for family in FAMILIES.values():
            if family is GENERIC:
                continue
            marker = "<|channel|>" if family is HARMONY else (*family.begin, "{")[0].strip()
            if marker in shown:
                yield family

    def proof(self, family: ToolFamily, reasoning: ReasoningFamily | None) -> str:
        """In which form the arguments must be for the parser to find the calls: object or text; "" for neither."""
        for as_objects in (True, False):
            if self._finds(family, reasoning, _CALLS[:1], "", as_objects) and (
                self._finds(family, reasoning, _CALLS[1:], _TEXT, as_objects)
                or family.at_start
                or family is HARMONY  # shows the text as reasoning
                or not self._shows_text(as_objects)
            ):
                return "object" if as_objects else "text"
        return ""

    def _shows_text(self, as_objects: bool) -> bool:
        """Whether a content next to a call is rendered at all."""
        message = _call_message(_CALLS[1:], _TEXT, as_objects)
        return _TEXT in self.render([_USER, message], tools=[_TOOL])

    def _finds(
        self,
        family: ToolFamily,
        reasoning: ReasoningFamily | None,
        calls: Sequence[tuple[str, Any]],
        text: str,
        as_objects: bool,
    ) -> bool:
        """Whether the parser finds exactly these calls, and this text beside them, in what is rendered."""
        rendered = self.render([_USER, _call_message(calls, text, as_objects)], tools=[_TOOL])
        head = self.render([_USER], tools=[_TOOL], add_generation_prompt=True)
        plain = self.render([_USER, {"role": "assistant", "content": _TEXT}], tools=[_TOOL]).partition(_TEXT)[
            0
        ]
        starts = {_num_common(rendered, each) for each in (head, plain) if each}
        for start in starts | {_marker_start(rendered, start) for start in starts}:
            answer = rendered[start:]
            opened = reasoning is not None and reasoning.end in answer and reasoning.begin not in answer
            parser = OutputParser(family, [_TOOL], reasoning=reasoning, opened=opened)
            content, found = _summary(parser.feed(answer, final=True))
            if found == list(calls) and (text in content if text else _TEXT not in content):
                return True
        return False


def _summary(deltas: Sequence[Delta]) -> tuple[str, _Calls]:
    """The content and reasoning, and the calls that are complete."""
    content = ""
    calls: _Calls = []
    name = arguments = ""
    for delta in deltas:
        match delta:
            case Content(text) | Reasoning(text):  # templates show it as reasoning, too, or after the calls
                content += text
            case CallBegin():
                name, arguments = delta.name, ""
            case CallArguments():
                arguments += delta.text
            case CallEnd():
                try:
                    calls.append((name, json.loads(arguments)))
                except ValueError:
                    return content, []
    return content, calls


def _num_common(first: str, second: str) -> int:
    """The length of the common beginning of two texts."""
    size = min(len(first), len(second))
    return next((index for index in range(size) if first[index] != second[index]), size)


def _marker_start(text: str, position: int) -> int:
    """The beginning of the marker that a position is inside of; the position if there is none."""
    begin = text.rfind("<", 0, position)
    return position if begin < 0 or ">" in text[begin:position] else begin


def _call_message(calls: Sequence[tuple[str, Any]], content: str, as_objects: bool) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"zq345678{index}",  # Mistral's templates demand nine letters
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if as_objects else json.dumps(arguments, ensure_ascii=False),
                },
            }
            for index, (name, arguments) in enumerate(calls)
        ],
    }
