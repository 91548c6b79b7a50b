"""Fields for the prefix cache: the session of a request, and how long its prompt is kept.

`session_of` knows the fields and headers by which SGLang, OpenAI, Anthropic and coding agents name a session.
Anthropic's `cache_control` and OpenAI's `prompt_cache_options` have breakpoints: a breakpoint keeps the whole prompt,
for the longest time of the request's breakpoints. Without one a prompt is cached, too, until its memory is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final, Literal

import msgspec

from ...scheduling_options import checked_salt, digest_of
from .values import Body, convert, objects_in, one_of

CONTROL_S: Final = {"5m": 300.0, "1h": 3600.0}
_OPTIONS_S: Final = {"30m": 1800.0, "12h": 43_200.0}
_CONTROL: Final = "cache_control"
_BREAKPOINT: Final = "prompt_cache_breakpoint"
BREAKPOINTS: Final = (_CONTROL, _BREAKPOINT)
"""Fields of parts and tools."""
RETENTIONS: Final = ("24h", "in_memory", "in-memory")
"""Values of `prompt_cache_retention`; OpenAI has had both forms of the second."""
SESSION_HEADERS: Final = (
    b"x-session-id",
    b"x-claude-code-session-id",
    b"session-id",  # Codex
    b"session_id",
    b"x-session-affinity",  # opencode
)
"""Headers that name a session, the first present counts."""


class CacheControl(msgspec.Struct, kw_only=True):
    """`cache_control`: a breakpoint."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheOptions(msgspec.Struct, kw_only=True):
    """`prompt_cache_options`: the time of the request's breakpoints; `explicit`: the end of the prompt is none.

    `comparison_response_id`: see `prompt_parts.py`; without effect outside of responses.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class SessionParams(msgspec.Struct, kw_only=True):
    """SGLang's `session_params`: the session of a prompt that is sent in full."""

    id: str | None = None


def session_header(headers: Mapping[bytes, bytes]) -> tuple[str, str]:
    """The name and the value of the header that names a session; two empty texts: none does."""
    found = next((name for name in SESSION_HEADERS if headers.get(name)), b"")
    return found.decode(), headers.get(found, b"").decode("latin-1")


def session_of(
    request: msgspec.Struct, header: tuple[str, str], owner: str, namespace: str, user_session: str | None
) -> str:
    """A digest of the key of a request's session, its owner and its namespace; "": the request names no session.

    Args:
        request: its body, with the fields of its API.
        header: from `session_header`.
        owner: of the request; the sessions of two API keys are different ones.
        namespace: of the prefix cache, without the adapter.
        user_session: in APIs where the name of the user contains it.

    Raises:
        RequestError: the key is too long.
    """
    params: SessionParams | None = getattr(request, "session_params", None)
    keys = (
        ("session_id", getattr(request, "session_id", None)),
        ("session_params.id", params and params.id),
        header,
        ("prompt_cache_key", getattr(request, "prompt_cache_key", None)),
        ("metadata.user_id", user_session),
    )
    for param, key in keys:
        if key:
            parts = owner, namespace, checked_salt(key, param) or ""
            return digest_of("\0".join(parts).encode("utf-8", "surrogatepass"))
    return ""


def is_kept_in_memory(retention: str | None) -> bool:
    """Whether `prompt_cache_retention` forbids to write the prompt to a disk.

    Raises:
        RequestError: it is another value.
    """
    return bool(retention) and one_of(retention, RETENTIONS, "prompt_cache_retention") != "24h"


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
