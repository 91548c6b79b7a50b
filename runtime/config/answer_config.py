"""`AnswerConfig`, a group of `EngineConfig`: structured output, tool calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..grammar_use import Whitespace
from .setting_declaration import check_finite

JsonWhitespace = Literal["compact", "pretty", "any"]
ReasoningField = Literal["reasoning_content", "reasoning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig:
    """Structured output, tool calls and reasoning."""

    grammar_timeout: Annotated[
        float,
        "Seconds of CPU time that the compilation of a grammar may take; a request with a slower one is refused.",
    ] = 5.0
    json_whitespace: Annotated[
        JsonWhitespace,
        "Whitespace in JSON that a schema constrains: none; a blank or a newline with up to 32 blanks; unbounded.",
    ] = "pretty"
    tool_call_parser: Annotated[
        str,
        "Format of the model's tool calls: a name of docs/tools.md, auto (found from the template), or none.",
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        "Format of the model's reasoning: a name of docs/tools.md, auto (found from the template), or none.",
    ] = "auto"
    reasoning_field: Annotated[
        ReasoningField, "Name of the field of chat messages that has the reasoning."
    ] = "reasoning_content"

    def __post_init__(self) -> None:
        check_finite("grammar_timeout", self.grammar_timeout, 0.0, open_end=True)

    @property
    def whitespace(self) -> Whitespace:
        """`json_whitespace` as grammars have it."""
        return Whitespace(self.json_whitespace)
