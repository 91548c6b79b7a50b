"""`POST /v1/cache/pins`: keep the cached prefix of a prompt or chat for a time, or unpin it."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from msgspec import UNSET

from ....runtime.errors import RequestError
from ...generation import Prompt
from ...scheduling_options import Scheduling, checked_salt
from ..exchange import Exchange
from ..openai.messages import template_messages
from ..schema.field_policy import FieldPolicy, first_warnings
from ..schema.field_types import MAX_TTL_S
from ..schema.generation_fields import prompts_of
from ..schema.values import Body, convert
from ..services import Engine
from .tokenizing import rendered_conversation
from .wire import PinnedBody, PinRequest

_POLICY: Final = FieldPolicy(PinRequest, {})


async def pin_prefix(exchange: Exchange, engine: Engine) -> None:
    """Pin the cached part of a prefix; the response has the number of pinned tokens, and why it is not all."""
    made = await engine.read(exchange, lambda body: _read(body, engine))
    request, prompt, warnings = made.request, made.prompt, made.warnings
    async with exchange.abort_on_disconnect():
        if made.messages is not None:
            # Without a generation prompt by default: later requests go on with more messages.
            conversation = rendered_conversation(
                request, made.messages, warnings, add_generation_prompt=bool(request.add_generation_prompt)
            )
            placed = await engine.placed(await engine.plan_chat(conversation), "messages")
            engine.images.release(placed.media)
            if placed.media:
                raise RequestError(
                    "messages has images, but only prefixes of text can be pinned; leave them out",
                    param="messages",
                    code="unsupported_value",
                )
            prompt = placed.text if placed.ids is None else placed.ids.tolist()
            add_special_tokens, param = bool(request.add_special_tokens), "messages"
        else:
            add_special_tokens, param = request.add_special_tokens is not False, "prompt"
        done = await engine.manager.control.pin(
            prompt,
            ttl_s=request.ttl,
            extra_key=exchange.caller.namespace(checked_salt(request.cache_salt)),
            add_special_tokens=add_special_tokens,
            param=param,
            lora_id=engine.with_adapter(Scheduling(), request.model).lora_id,
        )
        await exchange.send_json(
            PinnedBody(
                pinned_tokens=done.pinned_tokens,
                asked_tokens=done.asked_tokens,
                reason=done.reason,
                warnings=warnings or UNSET,
            )
        )


class _Checked(NamedTuple):
    """A checked body; `messages` is None for a prompt."""

    request: PinRequest
    prompt: Prompt
    messages: list[dict[str, Any]] | None
    warnings: list[str]


def _read(body: Body, engine: Engine) -> _Checked:
    strict = engine.config.server.strict
    warnings = _POLICY.check(body, strict=strict)
    request = convert(body, PinRequest)
    engine.check_model(request.model)
    if not (math.isfinite(request.ttl) and 0 <= request.ttl <= MAX_TTL_S):
        raise RequestError(
            f"ttl is {request.ttl:g}, but it must lie in [0, {MAX_TTL_S:g}] seconds; 0 unpins",
            param="ttl",
            code="invalid_value",
        )
    if request.prompt is not None and not request.messages:  # an empty list asks for nothing
        request.messages = None
    if (request.prompt is None) == (request.messages is None):
        raise RequestError(
            "prompt and messages are two forms of the prefix; send exactly one",
            param="prompt",
            code="invalid_value",
        )
    if request.messages is not None:
        messages, more_warnings = template_messages(
            request.messages, strict=strict, limits=engine.config.limits, sees_images=engine.images.are_seen
        )
        return _Checked(request, "", messages, first_warnings(warnings + more_warnings))
    prompts = prompts_of(request.prompt, "prompt", max_prompt_len=engine.manager.capacity.max_model_len)
    if len(prompts) > 1:
        raise RequestError(
            f"prompt has {len(prompts)} prompts, but one prefix is pinned at a time; send several requests",
            param="prompt",
            code="invalid_value",
        )
    return _Checked(request, prompts[0], None, warnings)
