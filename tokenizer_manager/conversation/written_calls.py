"""`written_calls`: tool calls as the text that a model would have written, for templates that show nothing of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .parsing.families import Form, ToolFamily


def written_calls(family: ToolFamily, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of calls, of which each is a name and arguments; the parser reads it back. Not for whole answers."""
    texts = []
    for index, (name, arguments) in enumerate(calls):
        body = _body(family, index, name, arguments)
        texts.append("".join((*family.call_begin, body, *family.call_end)))
    return "".join((*family.section_begin, "".join(family.separator).join(texts), *family.section_end))


def _body(family: ToolFamily, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    full_name = f"{family.name_prefix}{name}{f':{index}' if family.indexed_name else ''}"
    match family.form:
        case Form.JSON if not family.name_key:
            return _json({name: arguments})
        case Form.JSON:
            number = {family.id_key: str(index)} if family.id_key else {}
            return _json({**number, family.name_key: name, family.arguments_keys[0]: arguments})
        case Form.NAMED:
            return "".join((full_name, *family.arguments_begin, _json(arguments)))
        case Form.TAGGED:
            parts = [full_name, *family.arguments_begin]
            for key, value in arguments.items():
                flag = f' string="{str(isinstance(value, str)).lower()}">' if family.string_flag else ""
                text = value if isinstance(value, str) else _json(value)
                parts += [*family.parameter_begin, key, *family.parameter_middle, flag, text]
                parts += family.parameter_end
            return "".join(parts)
        case _:
            opening, assign, separator, closing = family.syntax
            members = (f"{key}{assign}{_quoted(family, value)}" for key, value in arguments.items())
            return f"{full_name}{opening}{separator.join(members)}{closing}"


def _quoted(family: ToolFamily, value: Any) -> str:
    """A value of a pythonic call."""
    if not family.quote:
        return repr(value) if value is None or isinstance(value, bool) else _json(value)
    if isinstance(value, str):
        return f"{family.quote}{value}{family.quote}"
    if isinstance(value, list):
        return f"[{','.join(_quoted(family, item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_quoted(family, item)}' for key, item in value.items())}}}"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
