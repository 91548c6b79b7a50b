"""`/pause_generation` and `/continue_generation` in SGLang's form, `/pause`, `/resume` and `/is_paused` in vLLM's."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from ....runtime.errors import RequestError
from ....runtime.messages import PauseMode
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.values import convert, show
from ..services import Engine

_SGLANG_MODES: Final = {"abort": None, "retract": PauseMode.RETRACT, "in_place": PauseMode.KEEP}
_VLLM_MODES: Final = {"abort": None, "wait": PauseMode.WAIT, "keep": PauseMode.KEEP}


class PauseRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class PauseBody(msgspec.Struct, kw_only=True):
    """Answer to `/pause_generation` and `/continue_generation`."""

    status: str = "ok"
    message: str


class PauseStatusBody(msgspec.Struct):
    """Answer to `/pause` and `/resume`."""

    status: Literal["paused", "resumed"]


class IsPausedBody(msgspec.Struct):
    """Answer to `/is_paused`."""

    is_paused: bool


_POLICY: Final = FieldPolicy(PauseRequest, {}, no_effect=())


async def pause_generation(exchange: Exchange, engine: Engine) -> None:
    """Stop generating; running requests are aborted, put back into the queue, or left as they are."""
    body = await engine.read_object(exchange, optional=True)
    _POLICY.check(body, strict=engine.config.server.strict)
    mode = convert(body, PauseRequest).mode or "abort"
    await _pause(engine, _SGLANG_MODES[mode])
    await exchange.send_json(PauseBody(message="Generation is paused."))


async def continue_generation(exchange: Exchange, engine: Engine) -> None:
    """Go on after a pause."""
    await engine.manager.control.resume()
    await exchange.send_json(PauseBody(message="Generation goes on."))


async def pause(exchange: Exchange, engine: Engine) -> None:
    """Stop generating; running requests are aborted, waited for, or left as they are."""
    mode = exchange.query.get("mode", "abort")
    if mode not in _VLLM_MODES:
        message = f"mode is {show(mode)}, but must be one of {', '.join(_VLLM_MODES)}"
        raise RequestError(message, param="mode", code="invalid_value")
    await _pause(engine, _VLLM_MODES[mode])
    await exchange.send_json(PauseStatusBody("paused"))


async def resume(exchange: Exchange, engine: Engine) -> None:
    """Go on after a pause."""
    await engine.manager.control.resume()
    await exchange.send_json(PauseStatusBody("resumed"))


async def is_paused(exchange: Exchange, engine: Engine) -> None:
    """Whether the server is paused."""
    await exchange.send_json(IsPausedBody(engine.manager.engine.pause is not None))


async def _pause(engine: Engine, mode: PauseMode | None) -> None:
    """Pause; None: and end all live requests, those that came meanwhile too."""
    await engine.manager.control.pause(mode or PauseMode.KEEP)
    if mode is None:
        engine.manager.abort(None, "the server was paused")
