"""Tools and tool choices in OpenAI's forms: nested (chat completions), flat (responses), and the old functions.

`ToolSchemas` checks the schemas of strict tools, for the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ....grammar.backend import GrammarError
from ....grammar.regex_syntax import RegexError, checked_regex
from ....grammar.schema.check import check_schema
from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.grammar_use import GrammarKind, GrammarSpec
from ...conversation.conversation import ChoiceMode, Tool, ToolChoice
from ..schema.values import shortened, show, without_nulls

_MODES: Final = {
    "none": ChoiceMode.NONE,
    "auto": ChoiceMode.AUTO,
    "required": ChoiceMode.REQUIRED,
    "any": ChoiceMode.REQUIRED,  # the word of Mistral's and Anthropic's APIs
}
_MAX_SHOWN: Final = 60


def tools_of(values: Sequence[object], at: str, warnings: list[str]) -> tuple[Tool, ...]:
    """Tools in either form: `{"type": "function", "function": {...}}` or `{"type": "function", "name": ...}`.

    Args:
        values: the list of the request.
        at: its path.
        warnings: get one for each tool that the server would have to run, which is left out.

    Raises:
        RequestError: an entry is no tool; names its path.
    """
    made = (tool_of(value, f"{at}[{i}]", warnings) for i, value in enumerate(values))
    return tuple(tool for tool in made if tool is not None)


def tool_of(value: object, at: str, warnings: list[str]) -> Tool | None:
    """One tool; None, with a warning, for one that the server would have to run.

    Raises:
        RequestError: it is none.
    """
    entry = _object(value, at)
    kind = entry.get("type", "function" if "function" in entry else None)
    if isinstance(kind, str) and kind not in ("function", "custom"):
        warnings.append(f"{at} ({shortened(kind, _MAX_SHOWN)}) was left out: this server does not run tools")
        return None
    if kind not in ("function", "custom"):
        raise _refused(f'{at}.type is {show(kind)}, but it must be "function" or "custom"', f"{at}.type")
    inner, place = (entry[kind], f"{at}.{kind}") if kind in entry else (entry, at)
    inner = _object(inner, place)
    if kind == "custom":
        return Tool(
            name=_text(inner, "name", place),
            description=_text(inner, "description", place, ""),
            custom=True,
            custom_grammar=_custom_grammar(inner.get("format"), f"{place}.format"),
        )
    return function_of(inner, place)


def function_of(value: object, at: str) -> Tool:
    """A function, `{"name", "description"?, "parameters"?, "strict"?}`.

    Raises:
        RequestError: it is none.
    """
    entry = _object(value, at)
    parameters = entry.get("parameters")
    strict = entry.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _refused(f"{at}.strict is {show(strict)}, but it must be true or false", f"{at}.strict")
    return Tool(
        name=_text(entry, "name", at),
        description=_text(entry, "description", at, ""),
        parameters=None if parameters is None else _any_object(parameters, f"{at}.parameters"),
        strict=bool(strict),
    )


def choice_of(value: object, parallel: bool | None, at: str = "tool_choice") -> ToolChoice:
    """`tool_choice` in either form, with `parallel_tool_calls`.

    Raises:
        RequestError: it is no choice.
    """
    parallel = parallel is not False
    if value is None or value == "":
        return ToolChoice(parallel=parallel)
    if isinstance(value, str):
        if value not in _MODES:
            raise _refused(
                f"{at} is {show(value)}, but it must be none, auto, required, or an object that names a tool",
                at,
            )
        return ToolChoice(mode=_MODES[value], parallel=parallel)
    entry = _object(value, at)
    kind = entry.get("type")
    if kind in ("function", "custom"):
        return ToolChoice(mode=ChoiceMode.NAMED, name=_name_in(entry, str(kind), at), parallel=parallel)
    if isinstance(kind, str) and kind in _MODES:
        return ToolChoice(mode=_MODES[kind], parallel=parallel)
    if kind == "allowed_tools":
        inner, place = entry, at
        if "allowed_tools" in entry:
            inner, place = _object(entry["allowed_tools"], f"{at}.allowed_tools"), f"{at}.allowed_tools"
        return _allowed(inner, place, parallel)
    raise _refused(
        f"{at}.type is {show(kind)}, but it must be function, custom or allowed_tools", f"{at}.type"
    )


def function_choice_of(value: object) -> ToolChoice:
    """The old `function_call`: none, auto, or `{"name": ...}`.

    Raises:
        RequestError: it is no choice.
    """
    if isinstance(value, dict):
        return ToolChoice(mode=ChoiceMode.NAMED, name=_text(value, "name", "function_call"), parallel=False)
    if value not in (None, "", "none", "auto"):
        raise _refused(
            f"function_call is {show(value)}, but it must be none, auto or an object with a name",
            "function_call",
        )
    return ToolChoice(mode=_MODES[str(value or "auto")], parallel=False)


def _allowed(entry: dict[str, Any], at: str, parallel: bool) -> ToolChoice:
    mode = entry.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise _refused(f"{at}.mode is {show(mode)}, but it must be auto or required", f"{at}.mode")
    tools = entry.get("tools")
    if not isinstance(tools, list):
        raise _refused(f"{at}.tools is {show(tools)}, but it must be a list of tools", f"{at}.tools")
    names = []
    for i, tool in enumerate(tools):
        place = f"{at}.tools[{i}]"
        named = _object(tool, place)
        names.append(_name_in(named, str(named.get("type", "function")), place))
    return ToolChoice(mode=_MODES[mode], allowed=tuple(names), parallel=parallel)


def _name_in(entry: dict[str, Any], kind: str, at: str) -> str:
    if kind in entry:
        return _text(_object(entry[kind], f"{at}.{kind}"), "name", f"{at}.{kind}")
    return _text(entry, "name", at)


def _custom_grammar(value: object, at: str) -> GrammarSpec | None:
    if value is None:
        return None
    entry = _object(value, at)
    kind = entry.get("type")
    if kind == "text":
        return None
    if kind != "grammar":
        raise _refused(f"{at}.type is {show(kind)}, but it must be text or grammar", f"{at}.type")
    inner, place = entry, at
    if "grammar" in entry:
        inner, place = _object(entry["grammar"], f"{at}.grammar"), f"{at}.grammar"
    syntax, text = _text(inner, "syntax", place), _text(inner, "definition", place)
    if syntax not in ("lark", "regex"):
        raise _refused(f"{place}.syntax is {show(syntax)}, but it must be lark or regex", f"{place}.syntax")
    if syntax == "regex":
        try:
            text = checked_regex(text, whole=True)
        except RegexError as error:
            param = f"{place}.definition"
            raise _refused(f"{param}: {error}", param, "invalid_regex") from None
    return GrammarSpec(GrammarKind(syntax), text)


def _object(value: object, at: str) -> dict[str, Any]:
    """An object without its null members."""
    return without_nulls(_any_object(value, at))


def _any_object(value: object, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refused(f"{at} is {show(value)}, but it must be an object", at, "invalid_type")
    return value


def _text(entry: dict[str, Any], name: str, at: str, default: str | None = None) -> str:
    value = entry.get(name, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        missing = name not in entry
        what = "is missing" if missing else f"is {show(value)}, but it must be a string"
        raise _refused(f"{at}.{name} {what}", f"{at}.{name}", "missing_field" if missing else "invalid_type")
    return value


def _refused(message: str, param: str, code: str = "invalid_value") -> RequestError:
    return RequestError(message, param=param, code=code)


class ToolSchemas:
    """Checks the schemas of tools under one server's limits."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits

    def __call__(self, schema: dict[str, Any], at: str, strict: bool) -> tuple[dict[str, Any], list[str]]:
        """The schema to compile, and warnings.

        Args:
            schema: of the arguments.
            at: the client's path of it.
            strict: a keyword that cannot be enforced is an error, not a warning.

        Raises:
            RequestError: it is no schema, or a keyword cannot be enforced.
        """
        try:
            report = check_schema(schema, strict=strict, at=at, limits=self._limits)
        except GrammarError as error:
            raise RequestError(error.message, param=error.at or at, code=error.code) from None
        return (report.schema if isinstance(report.schema, dict) else {}), report.warnings
