"""`POST /v1/chat/completions/control`: ends the reasoning of an answer while it is generated, as llama-server does."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.errors import RequestError
from ...request_log import LoggedRequest
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.values import convert, show
from ..services import Engine


class ControlRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/chat/completions/control`."""

    id: str
    action: Literal["reasoning_end"]
    model: str | None = None


class ControlBody(msgspec.Struct, kw_only=True):
    """Whether a reasoning block ends; `message`: why none does."""

    success: bool
    message: str = ""
    warnings: list[str] | UnsetType = UNSET


_POLICY: Final = FieldPolicy(ControlRequest, {})


async def control(exchange: Exchange, engine: Engine) -> None:
    """Let the open reasoning of an answer end with its next token, for the client that the answer is for."""
    body = await engine.read_object(exchange)
    warnings = _POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, ControlRequest)
    engine.check_model(request.model)
    caller = exchange.caller
    live = [
        logged
        for logged in engine.manager.request_log.live(request.id)
        if caller.admin or logged.generation.scheduling.owner == caller.owner
    ]
    if not live:
        raise RequestError(
            f"no answer with the id {show(request.id)} is generated: it has ended, or the id is not the one that its "
            f"stream begins with",
            param="id",
            code="request_not_found",
            status=404,
        )
    async with exchange.abort_on_disconnect():
        message = await _end_reasoning(engine, live)
        await exchange.send_json(
            ControlBody(success=not message, message=message, warnings=warnings or UNSET)
        )


async def _end_reasoning(engine: Engine, live: list[LoggedRequest]) -> str:
    """End the reasoning of all choices that are reasoning; the reason why there is none, or ""."""
    plan = live[0].generation.request.plan
    if plan is None or plan.reasoning is None:
        return "the answer has no reasoning"
    controlled = [logged for logged in live if logged.reasoning is not None]
    if not controlled:
        return "the reasoning of this answer cannot be ended; send the chat with reasoning_control: true"
    num_ended = 0
    for logged in controlled:
        if await engine.manager.control.end_reasoning(logged.rid):
            logged.end_reasoning()
            num_ended += 1
    return "" if num_ended else "the answer is not reasoning now"
