"""`ChatSettings`: how answers are sampled; `read_form`: what `--schema` and `--tools` ask of them."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...runtime.config.answer_config import RequestLimits
from ...runtime.errors import RequestError
from ...runtime.sampling_defaults import OPENAI_DEFAULTS
from ..options import read_json

_ENCLOSED: Final = frozenset({('"', '"'), ("'", "'"), ("[", "]")})
_NONE_WORDS: Final = frozenset({"none", "auto", "default", "off"})


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Sampling parameters by the names of the OpenAI API; None leaves the choice to the model's defaults.

    Raises:
        RequestError: an invalid value.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        from ...tokenizer_manager.http.schema.errors import OPENAI_NAMES, renamed_fields
        from ...tokenizer_manager.http.schema.generation_fields import SamplingFields

        fields = self.body()
        max_tokens = fields.pop("max_tokens", None)
        with renamed_fields(OPENAI_NAMES):  # the checks of a server, so that no question fails for a setting
            SamplingFields(**fields).sampling(
                RequestLimits(),
                OPENAI_DEFAULTS,
                max_new_tokens=max_tokens,
                min_new_tokens=None,
                keep_stop=None,
            )

    def body(self) -> dict[str, Any]:
        """The fields of a request to `/v1/chat/completions`; only the set ones, because servers differ."""
        values = {name: getattr(self, name) for name in PARAMETERS}
        values["stop"] = list(self.stop)
        return {name: value for name, value in values.items() if value not in (None, [])}

    def changed(self, name: str, text: str) -> ChatSettings:
        """A copy with one parameter set from text; `none` takes it back to its default.

        Raises:
            RequestError: an unknown parameter, or an invalid value.
        """
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PARAMETERS)}"
            raise RequestError(f"unknown parameter {name!r}; {hint}", param=name)
        if text.lower() in _NONE_WORDS:
            value = getattr(DEFAULTS, name)
        else:
            try:
                value = PARAMETERS[name](text)
            except ValueError:
                wants = "a whole number" if PARAMETERS[name] is int else "a number"
                raise RequestError(f"{name} is {text!r}, but it must be {wants}", param=name) from None
        return dataclasses.replace(self, **{name: value})


def _stop_strings(text: str) -> tuple[str, ...]:
    """Stop strings from text: `END`, `"END"` with the escapes of JSON, or several as a JSON list.

    Without quotes, backslash-n and backslash-t are a line break and a tab.

    Raises:
        RequestError: quotes or a list that JSON cannot read.
    """
    if len(text) >= 2 and (text[0], text[-1]) in _ENCLOSED:
        quoted = '"' + text[1:-1].replace('"', '\\"') + '"' if text[0] == "'" else text
        try:
            value = json.loads(quoted)
        except ValueError as error:
            raise RequestError(
                f'stop is {text}, which JSON cannot read: {error}; write END, "END" or ["a", "b"]',
                param="stop",
            ) from None
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) for each in values):
            raise RequestError(f'stop is {text}, but each stop string must be text: ["a", "b"]', param="stop")
        return tuple(values)
    return (text.replace("\\n", "\n").replace("\\t", "\t"),)


_READERS: Final[dict[str, Callable[[str], Any]]] = {"float | None": float, "int | None": int}
PARAMETERS: Final = {
    field.name: _READERS.get(str(field.type), _stop_strings) for field in dataclasses.fields(ChatSettings)
}
"""Parameter -> how its value is read from text."""
DEFAULTS: Final = ChatSettings()


def read_form(schema: Path | None, tools: Path | None) -> dict[str, Any]:
    """The fields of a chat request, and arguments of `LLM.chat`, that ask for a form of the answers.

    Args:
        schema: file with the JSON Schema that each answer matches; None: free text.
        tools: file with the tools that the model may call.

    Raises:
        ConfigError: a file cannot be read, or is not JSON.
        RequestError: it has another content.
    """
    form: dict[str, Any] = {}
    if schema is not None:
        value = read_json(schema, f"--schema {schema}")
        if not isinstance(value, dict):
            raise RequestError(f"--schema {schema} must hold a JSON Schema, which is an object")
        form["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}
    if tools is not None and (found := _tools_of(read_json(tools, f"--tools {tools}"), tools)):
        form["tools"] = found
    return form


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
