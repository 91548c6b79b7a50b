"""Fields that ask the prefix cache to keep a prompt: Anthropic's `cache_control`, OpenAI's `prompt_cache_options`.

A breakpoint keeps the whole prompt, for the longest time of the request's breakpoints. Without one a prompt is cached,
too, until its memory is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final, Literal

import msgspec

from .values import Body, convert, objects_in

CONTROL_S: Final = {"5m": 300.0, "1h": 3600.0}
_OPTIONS_S: Final = {"30m": 1800.0, "12h": 43_200.0}
_CONTROL: Final = "cache_control"
_BREAKPOINT: Final = "prompt_cache_breakpoint"
BREAKPOINTS: Final = (_CONTROL, _BREAKPOINT)
"""Fields of parts and tools."""


class CacheControl(msgspec.Struct, kw_only=True):
    """`cache_control`: a breakpoint."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheOptions(msgspec.Struct, kw_only=True):
    """`prompt_cache_options`: the time of the request's breakpoints; `explicit`: the end of the prompt is none."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None


def keep_s_of(body: Body, options: CacheOptions | None = None) -> float | None:
    """Seconds for which a request's prompt is to be kept; 0: it is not to be cached, None: the request asks nothing.

    Args:
        body: of the request, for its breakpoints.
        options: its `prompt_cache_options`.

    Raises:
        RequestError: a breakpoint has a type or a time that does not exist.
    """
    explicit = options is not None and options.mode == "explicit"
    default_s = _OPTIONS_S[(options and options.ttl) or "30m"]
    times = [] if explicit or options is None or options.ttl is None else [default_s]
    for field, value, at in _breakpoints(body):
        if field == _CONTROL:
            times.append(CONTROL_S[convert(value, CacheControl, at).ttl or "5m"])
        else:
            ttl = convert(value, CacheOptions, at).ttl
            times.append(default_s if ttl is None else _OPTIONS_S[ttl])
    return max(times, default=0.0 if explicit else None)


def _breakpoints(body: Body) -> Iterator[tuple[str, object, str]]:
    """The field, the value and the path of each breakpoint: of the request, its tools and instructions, its parts."""
    yield from _own(body, "")
    for place in ("system", "tools"):
        for at, item in objects_in(body.get(place), place):
            yield from _own(item, at)
    for place in ("messages", "input"):
        for at, message in objects_in(body.get(place), place):
            parts = chain(
                objects_in(message.get("content"), f"{at}.content"),
                objects_in(message.get("output"), f"{at}.output"),
            )
            for at_part, part in parts:
                yield from _own(part, at_part)
                for at_inner, inner in objects_in(part.get("content"), f"{at_part}.content"):
                    yield from _own(inner, at_inner)


def _own(item: Body, at: str) -> Iterator[tuple[str, object, str]]:
    for field in BREAKPOINTS:
        if item.get(field):
            yield field, item[field], f"{at}.{field}" if at else field
