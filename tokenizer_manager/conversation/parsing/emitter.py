"""`Emitter`: collects the deltas of one answer for its parser, and applies the request's options to them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from ..conversation import ReasoningOptions, Tool
from ..deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning
from ..parameters import CUSTOM_INPUT
from .json_text import JsonRepair, StringDecoder

MakeId = Callable[[str, int], str]
"""(name of the tool, index of the call) -> id of the call."""

_CUSTOM_BEGIN: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_CUSTOM_MAX_BEGIN_CHARS: Final = 256


def random_id(name: str, call: int) -> str:
    """An id as OpenAI has them."""
    return f"call_{secrets.token_hex(12)}"


class Emitter:
    """The deltas of one answer.

    Attributes:
        tools: that may be called, by name.
        num_calls: begun so far.
        current_name: of the tool of the last call.
        is_call_open: it has begun and is not complete.
        holds_space: whitespace at the end of the content waits for what follows, and may be dropped.
    """

    def __init__(
        self, tools: Mapping[str, Tool], reasoning: ReasoningOptions, make_id: MakeId = random_id
    ) -> None:
        self.tools = tools
        self.num_calls = 0
        self.current_name = ""
        self.is_call_open = False
        self.holds_space = bool(tools)
        self._options = reasoning
        self._make_id = make_id
        self._deltas: list[Delta] = []
        self._strip_begin = False
        self._space = ""  # at the end of the content: dropped if a call follows
        self._has_content = False
        self._reasoning_space = ""
        self._reasoning_begun = False
        self._reasoning_parts: list[str] = []
        self._custom: _CustomText | None = None
        self._repair = JsonRepair()
        self._has_arguments = False

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas = self._deltas
        self._deltas = []
        return deltas

    def end(self) -> None:
        """The answer has ended: what was held back goes out."""
        self.end_reasoning()
        if self.is_call_open and self._custom is None:
            self._put_arguments(self._repair.cut())
        if self._space:
            self._put(self._space)
            self._space = ""

    # ------------------------------------------------------------ content

    def content(self, text: str) -> None:
        """More content. Whitespace next to calls and after the reasoning is dropped; a newline is between contents."""
        if self._strip_begin:
            text = text.lstrip()
            if not text:
                return
            self._strip_begin = False
            if self._has_content and self.num_calls:
                text = f"\n{text}"
        if self.holds_space:
            stripped = text.rstrip()
            if not stripped:
                self._space += text
                return
            text, self._space = self._space + stripped, text[len(stripped) :]
        self._has_content = True
        self._put(text)

    def drop_space(self) -> None:
        """A mark around the answer has come; whitespace next to it is dropped."""
        self._space = ""
        self._strip_begin = True

    # ------------------------------------------------------------ reasoning

    def begin_reasoning(self, marker: str) -> None:
        """The reasoning begins."""
        if self._options.include and not self._options.separate:
            self._put(marker)

    def reasoning(self, text: str) -> None:
        """More reasoning. Whitespace around it is dropped, unless it stays in the content."""
        if not self._options.include:
            return
        if not self._options.separate:
            self._put(text)
            return
        if not self._reasoning_begun:
            text = text.lstrip()
            if not text:
                return
            self._reasoning_begun = True
        stripped = text.rstrip()
        if not stripped:
            self._reasoning_space += text
            return
        text, self._reasoning_space = self._reasoning_space + stripped, text[len(stripped) :]
        if self._options.stream:
            self._put_reasoning(text)
        else:
            self._reasoning_parts.append(text)

    def end_reasoning(self, marker: str = "") -> None:
        """The reasoning is complete, or the answer ends in it."""
        self._reasoning_space = ""
        if self._reasoning_parts:
            self._put_reasoning("".join(self._reasoning_parts))
            self._reasoning_parts = []
        if not marker:
            return
        if self._options.include and not self._options.separate:
            self._put(marker)
        else:
            self._strip_begin = True

    # ------------------------------------------------------------ calls

    def begin_call(self, name: str) -> None:
        """A call of one of `tools` begins; it ends a reasoning that is open."""
        self.end_reasoning()
        tool = self.tools[name]
        self.current_name = name
        self._space = ""
        self._custom = _CustomText() if tool.custom else None
        self._repair = JsonRepair()
        self._has_arguments = False
        self._deltas.append(CallBegin(self.num_calls, self._make_id(name, self.num_calls), name, tool.custom))
        self.num_calls += 1
        self.is_call_open = True

    def arguments(self, text: str) -> None:
        """More of the JSON arguments of the call, as the model wrote them."""
        if not text:
            return
        self._has_arguments = True
        self._put_arguments((self._repair if self._custom is None else self._custom).feed(text))

    def end_call(self) -> None:
        """The call is complete."""
        if self._custom is None and not self._has_arguments:
            self._put_arguments("{}")
        self._put_arguments((self._repair if self._custom is None else self._custom).end())
        self._deltas.append(CallEnd(self.num_calls - 1))
        self.is_call_open = False
        self._strip_begin = True

    def _put(self, text: str) -> None:
        deltas = self._deltas
        if not text:
            return
        if deltas and isinstance(deltas[-1], Content):
            deltas[-1] = Content(deltas[-1].text + text)
        else:
            deltas.append(Content(text))

    def _put_reasoning(self, text: str) -> None:
        deltas = self._deltas
        if deltas and isinstance(deltas[-1], Reasoning):
            deltas[-1] = Reasoning(deltas[-1].text + text)
        else:
            deltas.append(Reasoning(text))

    def _put_arguments(self, text: str) -> None:
        if not text:
            return
        deltas, call = self._deltas, self.num_calls - 1
        if deltas and isinstance(deltas[-1], CallArguments):
            deltas[-1] = CallArguments(call, deltas[-1].text + text)
        else:
            deltas.append(CallArguments(call, text))


class _CustomText:
    """The text in `{"input": "..."}`; arguments of another shape are the text themselves."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False
        self._raw = False
        self._ended = False
        self._decoder = StringDecoder()

    def feed(self, text: str) -> str:
        if self._raw:
            return text
        if self._ended:
            return ""
        self._held += text
        if not self._begun:
            match = _CUSTOM_BEGIN.match(self._held)
            if match is None:
                if len(self._held) > _CUSTOM_MAX_BEGIN_CHARS:
                    self._raw = True
                    return self.end()
                return ""
            self._begun = True
            self._held = self._held[match.end() :]
        decoded, pos, self._ended = self._decoder.decode(self._held, 0, False)
        self._held = self._held[pos:]
        return decoded

    def end(self) -> str:
        """End the arguments; return the held text if they have another shape."""
        held, self._held = self._held, ""
        return "" if self._begun else held
