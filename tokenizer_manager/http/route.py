"""`Route`: one endpoint, with its bodies and its handler; `get`, `post` and `answering` make several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from .exchange import Exchange
from .services import Services

Handler = Callable[[Exchange, Services], Awaitable[None]]


class Route(NamedTuple):
    """One method of one path; `{...}` matches any text at its place.

    Attributes:
        request: the type of the body; None for no body.
        answer: the type of a successful JSON response; None for another media type.
        events: the type of the JSON of each event, if it can stream.
        fails: statuses of failures beyond those of every route, or of every route with a body.
        admin: it affects all requests, and needs an admin.
        stream_type: media type of the stream.
        media_type: of a successful response.
        bodiless: the body may be left out.
        request_type: media type of the body.
        query: the parameters after the path.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[msgspec.Struct] | None = None
    answer: Any = None
    events: type[msgspec.Struct] | None = None
    fails: tuple[int, ...] = ()
    admin: bool = False
    stream_type: str = "text/event-stream"
    media_type: str = "application/json"
    bodiless: bool = False
    request_type: str = "application/json"
    query: tuple[str, ...] = ()


_GENERATING: Final = (404, 504)


def get(paths: str, handler: Handler, summary: str, answer: Any = None, **more: Any) -> list[Route]:
    """A route for each of these paths, which blanks separate; the first one is the usual one."""
    return [Route("GET", path, handler, summary, None, answer, **more) for path in paths.split()]


def post(
    paths: str, handler: Handler, summary: str, request: type[msgspec.Struct] | None, answer: Any, **more: Any
) -> list[Route]:
    """As `get`, with a body."""
    return [Route("POST", path, handler, summary, request, answer, **more) for path in paths.split()]


def answering(
    paths: str,
    handler: Handler,
    summary: str,
    request: type[msgspec.Struct],
    answer: Any,
    events: type[msgspec.Struct] | None = None,
    **more: Any,
) -> list[Route]:
    """As `post`, for what the model is asked for."""
    return post(paths, handler, summary, request, answer, events=events, fails=_GENERATING, **more)
