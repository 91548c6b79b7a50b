"""`AnswerForm`: what `--schema` and `--tools` ask of every answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.errors import RequestError
from ..json_input import read_json


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of the answers.

    Attributes:
        schema: JSON Schema that each answer matches; None: free text.
        tools: tools that the model may call, in OpenAI's form.
    """

    schema: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, schema: Path | None, tools: Path | None) -> AnswerForm:
        """Read the files of the options.

        Raises:
            ConfigError: a file cannot be read, or is not JSON.
            RequestError: it has another content.
        """
        form = cls()
        if schema is not None:
            value = read_json(schema, f"--schema {schema}")
            if not isinstance(value, dict):
                raise RequestError(f"--schema {schema} must hold a JSON Schema, which is an object")
            form = cls(value, form.tools)
        if tools is not None:
            form = cls(form.schema, tuple(_tools_of(read_json(tools, f"--tools {tools}"), tools)))
        return form

    def response_format(self) -> dict[str, Any] | None:
        """The field of a chat request; None for free text."""
        if self.schema is None:
            return None
        name = "answer"
        return {"type": "json_schema", "json_schema": {"name": name, "schema": self.schema}}

    def body(self) -> dict[str, Any]:
        """The fields of a chat request."""
        fields: dict[str, Any] = {}
        if (response_format := self.response_format()) is not None:
            fields["response_format"] = response_format
        if self.tools:
            fields["tools"] = list(self.tools)
        return fields


def _tools_of(value: Any, path: Path) -> list[dict[str, Any]]:
    """A list of tools, or one tool; each may be OpenAI's object or only its function."""
    entries = value if isinstance(value, list) else [value]
    tools = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not ("function" in entry or "name" in entry):
            raise RequestError(
                f'--tools {path}: entry {number} is no tool; one is {{"type": "function", "function": '
                f'{{"name": ..., "parameters": ...}}}}'
            )
        tools.append(entry if "function" in entry else {"type": "function", "function": entry})
    return tools
