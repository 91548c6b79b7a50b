"""`GET /v1/sessions`; `POST /open_session` and `/close_session` (SGLang's) and `/v1/kv_hints`: what clients know of a
session's next turn.

They name a session as its turns do, see `session_of`.
"""

from __future__ import annotations

import uuid
from typing import Final, Literal, TypeVar

import msgspec
from msgspec import UNSET

from ....runtime.messages import HintAction, HintOutcome
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.field_types import Int, Salt, Seconds
from ..schema.kv_hints import ACTIONS_POLICY, HintResult, HintsBody, KvHints, checked_hints
from ..schema.values import Body, convert, refused, show
from ..services import Engine

MAX_LISTED: Final = 256


class OpenSessionRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /open_session`."""

    session_id: Salt | None = None
    cache_salt: Salt | None = None
    capacity_of_str_len: Int | None = None
    timeout: Seconds | None = None


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /close_session`."""

    session_id: Salt
    cache_salt: Salt | None = None


class HintsRequest(KvHints, kw_only=True):
    """Body of `POST /v1/kv_hints`; the session may also be named by a header."""

    session_id: Salt | None = None
    cache_salt: Salt | None = None


class SessionBody(msgspec.Struct, kw_only=True):
    """One session; `session` is a digest of its key."""

    session: str
    turns: int
    conversations: int
    cached_tokens: int
    idle_s: float


class SessionsBody(msgspec.Struct, kw_only=True):
    """The listed sessions, and the number of all."""

    object: Literal["list"] = "list"
    total: int
    data: list[SessionBody]


_OPEN_POLICY: Final = FieldPolicy(OpenSessionRequest, {"streaming": (False,)}, no_effect=())
_CLOSE_POLICY: Final = FieldPolicy(CloseSessionRequest, {}, no_effect=())
_HINTS_POLICY: Final = FieldPolicy(HintsRequest, {}, no_effect=(), nested={"actions": ACTIONS_POLICY})
T = TypeVar("T", OpenSessionRequest, CloseSessionRequest, HintsRequest)


async def _read(
    exchange: Exchange, engine: Engine, target: type[T], policy: FieldPolicy
) -> tuple[T, list[str]]:
    def build(body: Body) -> tuple[T, list[str]]:
        warnings = policy.check(body, strict=engine.config.server.strict)
        return convert(body, target), warnings

    return await engine.read(exchange, build)


async def sessions(exchange: Exchange, engine: Engine) -> None:
    """The sessions with the latest turns, in numbers."""
    async with exchange.abort_on_disconnect():
        answer = await engine.manager.control.list_sessions(MAX_LISTED)
        listed = [SessionBody(**msgspec.structs.asdict(each)) for each in answer.sessions]
        await exchange.send_json(SessionsBody(total=answer.total, data=listed))


async def open_session(exchange: Exchange, engine: Engine) -> None:
    """Keep a session before its first turn; the answer is its id, a new one if the body has none."""
    request, _ = await _read(exchange, engine, OpenSessionRequest, _OPEN_POLICY)
    request.session_id = request.session_id or uuid.uuid4().hex
    scheduling = exchange.caller.scheduling(request)
    async with exchange.abort_on_disconnect():
        done = await engine.manager.control.hint(
            scheduling.session, HintAction.OPEN, tenant=scheduling.tenant
        )
        if done.outcome is HintOutcome.REJECTED:
            raise refused(
                "session_id", f"{show(request.session_id)} {done.detail}; close it, or leave the field out"
            )
        await exchange.send_json(request.session_id)


async def close_session(exchange: Exchange, engine: Engine) -> None:
    """End a session; pages that only its conversations cover are evicted first."""
    request, _ = await _read(exchange, engine, CloseSessionRequest, _CLOSE_POLICY)
    session = exchange.caller.scheduling(request).session
    if not session:
        raise refused("session_id", "is empty; it must be the one of the session's turns")
    async with exchange.abort_on_disconnect():
        done = await engine.manager.control.hint(session, HintAction.CLOSE)
        await exchange.send_json(HintResult(outcome=done.outcome, detail=done.detail))


async def kv_hints(exchange: Exchange, engine: Engine) -> None:
    """Do what a client asks for the pages of a session, action by action."""
    request, warnings = await _read(exchange, engine, HintsRequest, _HINTS_POLICY)
    hints = checked_hints(request)
    session = exchange.caller.scheduling(request).session
    if not session:
        raise refused("session_id", "is missing; name the session as its turns do, here or in a header")
    async with exchange.abort_on_disconnect():
        results = [await engine.hinted(session, hint) for hint in hints]
        await exchange.send_json(
            HintsBody(message_id=request.message_id or UNSET, results=results, warnings=warnings or UNSET)
        )
