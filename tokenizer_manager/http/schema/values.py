"""Values of a request body, checked one by one: types by msgspec, counts under `RequestLimits`.

Errors name the client's path, the value and the rule.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ...conversation.conversation import ReasoningOptions

DEFAULT_LIMITS: Final = RequestLimits()


def check_limit(param: str, count: int, what: str, limit: int, setting: str) -> None:
    """Refuse a list that is too long.

    Args:
        param: the client's name of the field.
        count: of its items.
        what: the items, such as "messages".
        limit: the largest count.
        setting: the setting that raises the limit, for the error.

    Raises:
        RequestError: there are more.
    """
    if count > limit:
        raise RequestError(
            f"{param} has {count} {what}, the limit is {limit}; send fewer, or raise "
            f"--{setting.replace('_', '-')}",
            param=param,
            code="invalid_value",
        )


def check_count(param: str, count: int, low: int, limit: int, setting: str) -> None:
    """Refuse a requested number that is out of range.

    Raises:
        RequestError: it is out of range.
    """
    if not low <= count <= limit:
        raise RequestError(
            f"{param} is {count}, but it must lie in [{low}, {limit}] (--{setting.replace('_', '-')})",
            param=param,
            code="invalid_value",
        )


Body = dict[str, Any]


_PATH: Final = re.compile(r" - at (?:`key` in )?`(.*)`$")


_EXPECTED: Final = re.compile(r"^Expected `([^`]*)`(.*?)(?:, got `[^`]*`)?$")


_MISSING: Final = re.compile(r"missing required field `([^`]*)`")


_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")


_MAX_SHOWN_CHARS: Final = 60


_WORDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


T = TypeVar("T")


def convert(value: object, target: type[T], at: str = "") -> T:
    """`value` as a struct, strictly: a string is no number, a boolean is no integer. A null member counts as
    missing where it may be.

    Args:
        value: plain data from `parse_object`.
        target: the struct.
        at: path of `value` in the body, for errors.

    Raises:
        RequestError: a field is missing or of the wrong type.
    """
    if isinstance(value, dict) and inspect.is_struct_type(target):
        required = _required(target)
        value = {key: member for key, member in value.items() if member is not None or key in required}
    try:
        return msgspec.convert(value, target)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), value, at, target) from None
    except (OverflowError, RecursionError) as error:
        raise RequestError(
            f"{at or 'the body'} has a value that is out of range: {error}",
            param=at or None,
            code="invalid_value",
        ) from None


@functools.cache
def _required(target: type[msgspec.Struct]) -> frozenset[str]:
    """The fields of a struct without a default, whose null is an error."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(target) if field.required)


def without_nulls(value: Body) -> Body:
    """An object without its null members, which ask for nothing; those of objects inside it stay."""
    return {name: member for name, member in value.items() if member is not None}


def show(value: object) -> str:
    """A value for an error message or the log, as JSON and short; half of a surrogate pair is escaped."""
    try:
        text = _beginning(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return shortened(text, _MAX_SHOWN_CHARS).encode("utf-8", "backslashreplace").decode()


def _beginning(value: object) -> str:
    """The beginning of a value as JSON: of millions of items, a few are written."""
    if isinstance(value, str):
        value = value[: _MAX_SHOWN_CHARS + 1]
    text = ""
    for part in _SHOWING_ENCODER.iterencode(value):
        text += part
        if len(text) > _MAX_SHOWN_CHARS:
            break
    return text


def shortened(text: str, max_chars: int) -> str:
    """The beginning of a text."""
    return text if len(text) <= max_chars else text[:max_chars] + "…"


_SHOWING_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)


def _type_error(message: str, value: object, at: str, target: object) -> RequestError:
    """msgspec's error as a `RequestError` with field, value and rule."""
    of_keys = " at `key` in " in message
    path_match = _PATH.search(message)
    path = path_match[1] if path_match else "$"
    message = message[: path_match.start()] if path_match else message
    param = _join(at, path)
    if missing := _MISSING.search(message):
        name = _join(param, missing[1])
        return RequestError(f"{name} is missing; the request must have it", param=name, code="missing_field")
    expected = _EXPECTED.match(message)
    if choices := _choices(target, path, of_keys=of_keys) if message.startswith("Invalid") else []:
        allowed = ", ".join(map(str, choices))
        rule = f"{'its keys' if of_keys else 'it'} must be {'one of ' * (len(choices) > 1)}{allowed}"
    elif expected is None:
        rule = message[:1].lower() + message[1:]
    else:
        kinds = [_WORDS.get(kind, kind) for kind in expected[1].split(" | ") if kind != "null"]
        rule = f"it must be {' or '.join(kinds)}{expected[2]}"
    found, exact = _look_up(value, path)
    shown = f" is {show(found)}, but" if exact else " has a wrong value:"
    return RequestError(f"{param or 'the body'}{shown} {rule}", param=param or None, code="invalid_type")


def _choices(target: object, path: str, *, of_keys: bool) -> list[object]:
    """The values that a type allows at a path of msgspec's: those of a `Literal`, the tags of a union of structs.

    Args:
        target: the type of the whole value.
        path: such as `$.items[0].type`.
        of_keys: the keys of the mapping at the path are meant.
    """
    kinds = _members([inspect.type_info(target)])
    for step in _STEP.finditer(path.removeprefix("$")):
        kinds = _members(kind for parent in kinds for kind in _children(parent, step[1]))
    if of_keys:
        kinds = _members(kind.key_type for kind in kinds if isinstance(kind, inspect.DictType))
    return [value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]


def _members(kinds: Iterable[inspect.Type]) -> list[inspect.Type]:
    """Types, with the members of unions in their place."""
    return [
        member
        for kind in kinds
        for member in (kind.types if isinstance(kind, inspect.UnionType) else (kind,))
    ]


def _children(parent: inspect.Type, key: str | None) -> list[inspect.Type]:
    """The types of a member by this key, or of the items of a list where it is None."""
    match parent:
        case inspect.StructType() if key == parent.tag_field and parent.tag is not None:
            return [inspect.LiteralType((parent.tag,))]
        case inspect.StructType():
            return [field.type for field in parent.fields if field.encode_name == key]
        case inspect.DictType():
            return [parent.value_type]
        case inspect.ListType():
            return [parent.item_type]
    return []


def _join(at: str, path: str) -> str:
    inner = path.removeprefix("$").replace("[...]", "")
    joined = at + (inner if inner.startswith(("[", ".")) or not inner else f".{inner}")
    return joined.lstrip(".")


def _look_up(value: Any, path: str) -> tuple[object, bool]:
    """The value at a path of msgspec's, and whether the path is exact."""
    for step in _STEP.finditer(path.removeprefix("$")):
        key, index = step[1], step[2]
        try:
            if key is not None:
                value = value[key]
            elif index is not None:
                value = value[int(index)]
            else:
                return None, False
        except (KeyError, IndexError, TypeError):
            return None, False
    return value, True


S = TypeVar("S", bound=msgspec.Struct)

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def refused(param: str, message: str, code: str = "invalid_value") -> RequestError:
    """The error for a field; the message follows its path."""
    return RequestError(f"{param} {message}", param=param, code=code)


def objects(value: object, at: str) -> Iterator[tuple[str, Body]]:
    """The objects of a list without their null members, each with its path.

    Raises:
        RequestError: it is no list, or an item is no object.
    """
    for index, item in enumerate(convert(value, list[dict[str, Any]], at)):
        yield f"{at}[{index}]", without_nulls(item)


def objects_in(value: object, at: str) -> Iterator[tuple[str, Body]]:
    """A value that is an object, or the objects of a list, with their paths."""
    if isinstance(value, dict):
        yield at, value
    elif isinstance(value, list):
        yield from ((f"{at}[{i}]", each) for i, each in enumerate(value) if isinstance(each, dict))


def one_of(value: object, allowed: Sequence[str], at: str) -> str:
    """A string from a set.

    Raises:
        RequestError: it is another value.
    """
    if isinstance(value, str) and value in allowed:
        return value
    raise refused(at, f"is {show(value)}, but it must be one of {', '.join(allowed)}")


def number_of(query: Mapping[str, str], name: str, least: int, most: int, default: int) -> int:
    """An integer of a query.

    Raises:
        RequestError: it is none, or out of range.
    """
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise refused(name, f"is {show(text)}, but it must be an integer in [{least}, {most}]")
    return int(text)


def is_newest_first(query: Mapping[str, str]) -> bool:
    """The order of a list, from `order` in its query: desc, which is the default, or asc.

    Raises:
        RequestError: it is neither.
    """
    return one_of(query.get("order", "desc"), ("asc", "desc"), "order") == "desc"


def optional_text(value: object, at: str) -> str | None:
    """A string, or None.

    Raises:
        RequestError: it is something else.
    """
    return None if value is None else convert(value, str, at)


def optional_object(value: object, at: str) -> Body | None:
    """An object, or None.

    Raises:
        RequestError: it is something else.
    """
    return None if value is None else convert(value, dict[str, Any], at)


def effort_options(effort: object, at: str) -> ReasoningOptions:
    """Reasoning options for an effort; None: as the template does.

    Raises:
        RequestError: there is no such effort.
    """
    if effort is None or effort == "":
        return ReasoningOptions()
    return ReasoningOptions(effort=one_of(effort, EFFORTS, at))
