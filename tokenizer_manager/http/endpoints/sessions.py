"""`GET /v1/sessions`; `POST /open_session` and `/close_session` (SGLang's) and `/v1/kv_hints`: what clients know of a
session's next turn.

They name a session as its turns do, see `session_of`.
"""

from __future__ import annotations

import uuid
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.messages import HintAction, HintOutcome
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.field_types import MAX_TTL_S, Int, Salt, Seconds
from ..schema.values import Body, convert, objects, refused, show
from ..services import Engine

MAX_ACTIONS: Final = 64
MAX_LISTED: Final = 256
PROTOCOL_VERSION: Final = 1
_ACTIONS: Final = {
    "release": HintAction.CLOSE,
    "demote": HintAction.DEMOTE,
    "retain": HintAction.RETAIN,
    "pin": HintAction.RETAIN,
}


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


class HintsRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/kv_hints`; the session may also be named by a header."""

    protocol_version: int
    actions: list[dict[str, Any]]
    message_id: str | None = None
    session_id: Salt | None = None
    cache_salt: Salt | None = None


class HintFields(msgspec.Struct, kw_only=True):
    """One of the `actions`."""

    action_id: str
    action_type: str
    action_version: int = 1
    payload: dict[str, Any] = {}


class HintResult(msgspec.Struct, kw_only=True):
    """The outcome of an action, with figures or a reason."""

    action_id: str | UnsetType = UNSET
    outcome: HintOutcome
    detail: str


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


class HintsBody(msgspec.Struct, kw_only=True):
    """Results of the actions, in their order."""

    message_id: str | UnsetType = UNSET
    results: list[HintResult]
    warnings: list[str] | UnsetType = UNSET


_OPEN_POLICY: Final = FieldPolicy(OpenSessionRequest, {"streaming": (False,)}, no_effect=())
_CLOSE_POLICY: Final = FieldPolicy(CloseSessionRequest, {}, no_effect=())
_HINTS_POLICY: Final = FieldPolicy(
    HintsRequest, {}, no_effect=(), nested={"actions": FieldPolicy(HintFields, {}, no_effect=())}
)
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
    actions = _checked(request)
    session = exchange.caller.scheduling(request).session
    if not session:
        raise refused("session_id", "is missing; name the session as its turns do, here or in a header")
    async with exchange.abort_on_disconnect():
        results = [await _result(engine, session, action) for action in actions]
        await exchange.send_json(
            HintsBody(message_id=request.message_id or UNSET, results=results, warnings=warnings or UNSET)
        )


def _checked(request: HintsRequest) -> list[HintFields]:
    """The actions of an envelope.

    Raises:
        RequestError: it is malformed, or of another version.
    """
    if request.protocol_version != PROTOCOL_VERSION:
        raise refused("protocol_version", f"is {request.protocol_version}, but it must be {PROTOCOL_VERSION}")
    if len(request.actions) > MAX_ACTIONS:
        raise refused(
            "actions", f"has {len(request.actions)} actions, the limit is {MAX_ACTIONS}; send several"
        )
    return [convert(action, HintFields, at) for at, action in objects(request.actions, "actions")]


async def _result(engine: Engine, session: str, action: HintFields) -> HintResult:
    ttl_s, detail = 0.0, ""
    todo = _ACTIONS.get(action.action_type)
    if todo is None:
        detail = f"{show(action.action_type)} is not supported; {', '.join(_ACTIONS)} are"
    elif action.action_version != 1:
        detail = f"action_version is {action.action_version}, but it must be 1"
    elif todo is HintAction.RETAIN:
        ttl_s, detail = _ttl_of(action.payload)
    if todo is None or detail:
        return HintResult(action_id=action.action_id, outcome=HintOutcome.REJECTED, detail=detail)
    done = await engine.manager.control.hint(session, todo, ttl_s=ttl_s)
    return HintResult(action_id=action.action_id, outcome=done.outcome, detail=done.detail)


def _ttl_of(payload: Body) -> tuple[float, str]:
    """The time of a payload, and why it is none."""
    value = payload.get("ttl_s")
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_TTL_S:
        return float(value), ""
    return 0.0, f"payload.ttl_s is {show(value)}, but it must be a number in (0, {MAX_TTL_S:g}] seconds"
