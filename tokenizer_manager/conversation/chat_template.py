"""`ChatTemplate`: chat messages to prompt text, with the model's Jinja template in a sandbox.

Templates come with model files and are untrusted code: they run in `TemplateSandbox`, which documents the limits. A
template is set up as in Hugging Face transformers, against which template authors test.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from ...runtime.errors import ConfigError, RequestError
from .template_sandbox import AbandonedError, CpuTimeError, LimitError, RenderBudget, TemplateSandbox
from .template_shape import TemplateShape, find_shape, fitted

logger = logging.getLogger(__name__)

RESERVED_NAMES: Final = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
_MAX_OUTPUT_CHARS: Final = 64 << 20
_END_MARK: Final = "\u2063end-of-final-message\u2063 "
"""As in transformers: its blank is missing from the prompt if the template strips contents."""

_SENTINEL: Final = "zq content zq"
_SENTINEL_SPEEDUP: Final = 10  # of the clock for its limit: a start renders up to thirty times
_SENTINEL_CHATS: Final[tuple[list[dict[str, Any]], ...]] = (
    [{"role": "user", "content": _SENTINEL}],
    [{"role": "system", "content": _SENTINEL}, {"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": _SENTINEL}],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [
                {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
            ],
        },
        {"role": "tool", "content": _SENTINEL, "tool_call_id": "call00000", "name": "f"},
    ],
)


class ChatTemplate:
    """A compiled chat template.

    Contents of messages are strings here. Templates of models that also take images often expect a list of parts and
    show nothing of a string; `find_part_roles` detects that.

    Attributes:
        source: its Jinja text.
        part_roles: the roles with contents that the template takes as a list of parts only.
        shape: the chats that the template shows; others are rewritten before they are rendered.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str = "the model's chat template",
        with_tools: ChatTemplate | None = None,
    ) -> None:
        """Compile.

        Args:
            source: Jinja text.
            special_tokens: bos_token, eos_token, ...: variables of the template.
            name: of the template, for errors.
            with_tools: renders chats with tools instead of this one.

        Raises:
            ConfigError: the text is not a Jinja template.
        """
        self.source = source
        self._name = name
        self._environment = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals |= {
            **special_tokens,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{name} has a syntax error in line {error.lineno}: {error.message}; fix it or give another one with "
                f"--chat-template"
            ) from error
        except Exception as error:  # from Python's compiler, or a RecursionError
            raise ConfigError(
                f"{name} cannot be compiled: {type(error).__name__}: {error}; fix it or give another one with "
                f"--chat-template"
            ) from error
        self._with_tools = with_tools
        self.part_roles: frozenset[str] = frozenset()
        self.shape = TemplateShape()

    def find_part_roles(self) -> None:
        """Render a short text as a string and as a list of parts, and set `part_roles`.

        A template that shows a user's text in neither form is reported.
        """
        for chat in _SENTINEL_CHATS:  # the user's first: the other chats have a message of the user
            role = next(str(message["role"]) for message in chat if message["content"] == _SENTINEL)
            as_text = self._shows(chat)
            if as_text:
                continue
            in_parts = self._shows(_in_parts(chat, self.part_roles | {role}))
            if in_parts:
                self.part_roles |= {role}
            elif role == "user" and as_text is not None and in_parts is not None:
                logger.warning(
                    "%s shows nothing of what a user writes; give another one with --chat-template",
                    self._name,
                )

    def find_shape(self) -> None:
        """Render short chats, and set `shape`; after `find_part_roles`."""

        def shows(chat: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> bool:
            return bool(self._shows(chat, texts))

        self.shape = find_shape(shows)
        if missing := self.shape.missing:
            logger.info(
                "%s cannot show every chat, so that such messages are joined or renamed: %s",
                self._name,
                ", ".join(missing),
            )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        budget: RenderBudget | None = None,
    ) -> str:
        """The prompt of a chat. Several threads may render at the same time.

        Args:
            messages: with `role` and `content`, a string, and further fields that the template may use.
            add_generation_prompt: end with the start of an assistant message.
            variables: further variables of the template.
            tools: in OpenAI's form, {"type": "function", "function": {...}}.
            documents: for templates that know them.
            continue_final_message: the prompt ends with the content of the last message, which the answer continues.
            budget: of this rendering alone; another thread may end the rendering through it.

        Raises:
            RequestError: the template refuses these messages, fails, or goes beyond a limit.
            AbandonedError: `budget` says that the prompt is not wanted any more.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
                tools=tools,
                documents=documents,
                continue_final_message=continue_final_message,
                budget=budget,
            )
        messages = [_with_thinking(message) for message in fitted(messages, self.shape)]
        if continue_final_message:
            messages, add_generation_prompt = _with_end(messages), False
        messages = _in_parts(messages, self.part_roles)
        self._environment.start_clock(budget or RenderBudget())
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                {
                    **(variables or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools or None,
                    "documents": documents or None,
                }
            ):
                size += len(part)
                if size > _MAX_OUTPUT_CHARS:
                    raise LimitError(f"it puts out more than {_MAX_OUTPUT_CHARS} characters")
                self._environment.check_clock()
                parts.append(part)
        except AbandonedError:
            raise
        except CpuTimeError as error:
            count = f"{len(messages):,} message{'' if len(messages) == 1 else 's'}"
            raise RequestError(
                f"{self._name} took {error} for {count}; send fewer or shorter "
                f"messages, or give the server a template that does less for each with --chat-template",
                param="messages",
                code="chat_template_error",
            ) from error
        except Exception as error:  # template code may raise anything; only this request fails
            raise RequestError(
                f"{self._name} cannot render these messages: {str(error) or type(error).__name__}; check their roles, "
                f"order and contents",
                param="messages",
                code="chat_template_error",
            ) from error
        prompt = "".join(parts)
        return _before_end(prompt, self._name) if continue_final_message else prompt

    def undeclared_variables(self) -> set[str]:
        """The variables that the template reads."""
        found = jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        return found if self._with_tools is None else found | self._with_tools.undeclared_variables()

    def _shows(self, chat: Sequence[Mapping[str, Any]], texts: Sequence[str] = (_SENTINEL,)) -> bool | None:
        """Whether these texts are in the prompt; None: the template refuses the chat, or takes long."""
        budget = RenderBudget(cpu_clock=lambda: _SENTINEL_SPEEDUP * time.thread_time())
        try:
            prompt = self.render(chat, add_generation_prompt=False, budget=budget)
        except RequestError:
            return None
        return all(text in prompt for text in texts)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning under the name that the template of gpt-oss reads, too, as in transformers."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _in_parts(messages: Sequence[Mapping[str, Any]], roles: frozenset[str]) -> Sequence[Mapping[str, Any]]:
    """The messages, with the contents of these roles as lists of parts."""
    if not roles:
        return messages
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message.get("role") in roles and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _with_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, of which the last one's content ends with a mark."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise RequestError(
            "continue_final_message needs a last message with a text as its content",
            param="continue_final_message",
        )
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END_MARK}]


def _before_end(prompt: str, name: str) -> str:
    """The prompt up to the mark; without the whitespace that the template strips from a content."""
    index = prompt.rfind(_END_MARK.strip())
    if index < 0:
        raise RequestError(
            f"{name} does not show the content of the last message; leave out continue_final_message",
            param="continue_final_message",
        )
    head = prompt[:index]
    return head if prompt.startswith(_END_MARK, index) else head.rstrip()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks the assistant's text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes HTML characters, which models are not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
