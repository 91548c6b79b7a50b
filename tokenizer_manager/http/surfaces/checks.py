"""Checks of values that the agent APIs share; errors name the client's own path."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from ....runtime.errors import RequestError
from ...conversation.conversation import ReasoningOptions
from ..schema.json_body import Body, convert, show, without_nulls
from ..schema.media_parts import check_is_no_media
from .history import TEXT_SEPARATOR

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


def one_of(value: object, allowed: Sequence[str], at: str) -> str:
    """A string from a set.

    Raises:
        RequestError: it is another value.
    """
    if isinstance(value, str) and value in allowed:
        return value
    raise refused(at, f"is {show(value)}, but it must be one of {', '.join(allowed)}")


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


def text_of(value: object, at: str, kinds: Collection[str]) -> str:
    """A text, or the texts of a list of parts, joined by newlines.

    Args:
        value: a string, or a list of objects with `type` and `text`.
        at: its path.
        kinds: types of text parts.

    Raises:
        RequestError: it is something else; a part of another type is named.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(at, f"is {show(value)}, but it must be a string or a list of parts", "invalid_type")
    return TEXT_SEPARATOR.join(part_text(part, place, kinds) for place, part in objects(value, at))


def part_text(part: Body, at: str, kinds: Collection[str]) -> str:
    """The text of one part.

    Raises:
        RequestError: it is no text part.
    """
    kind = part.get("type")
    if kind not in kinds:
        check_is_no_media(kind, at)
        raise RequestError(
            f"{at}.type is {show(kind)}, but only {', '.join(sorted(kinds))} can be read here; this model takes text",
            param=f"{at}.type",
            code="unsupported_value",
        )
    key = "refusal" if kind == "refusal" else "text"
    return convert(part.get(key), str, f"{at}.{key}")


def effort_options(effort: object, at: str) -> ReasoningOptions:
    """Reasoning options for an effort; None: as the template does.

    Raises:
        RequestError: there is no such effort.
    """
    if effort is None or effort == "":
        return ReasoningOptions()
    return ReasoningOptions(effort=one_of(effort, EFFORTS, at))
