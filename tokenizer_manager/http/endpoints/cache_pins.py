"""`POST /v1/cache/pins`: keep the cached prefix of a prompt or chat for a time, or unpin it."""

from __future__ import annotations

import math
from typing import Final

from msgspec import UNSET

from ....runtime.errors import RequestError
from ...generation import Prompt
from ...scheduling_options import checked_salt
from ..exchange import Exchange
from ..schema.answers import PinnedBody
from ..schema.chat_messages import template_messages
from ..schema.field_policy import FieldPolicy, first_warnings
from ..schema.field_types import MAX_TTL_S
from ..schema.json_body import convert
from ..schema.protocol import PinRequest, checked_template_variables, prompts_of
from ..services import Services

_POLICY: Final = FieldPolicy(PinRequest, {})


async def pin_prefix(exchange: Exchange, services: Services) -> None:
    """Pin the cached part of a prefix; the response has the number of pinned tokens, and why it is not all."""
    body = await services.read_object(exchange)
    strict = services.config.server.strict
    warnings = _POLICY.check(body, strict=strict)
    request = convert(body, PinRequest)
    services.check_model(request.model)
    if not (math.isfinite(request.ttl) and 0 <= request.ttl <= MAX_TTL_S):
        raise RequestError(
            f"ttl is {request.ttl:g}, but it must lie in [0, {MAX_TTL_S:g}] seconds; 0 unpins",
            param="ttl",
            code="invalid_value",
        )
    if (request.prompt is None) == (request.messages is None):
        raise RequestError(
            "prompt and messages are two forms of the prefix; send exactly one",
            param="prompt",
            code="invalid_value",
        )
    prompt: Prompt
    if request.messages is not None:
        messages, more_warnings = template_messages(
            request.messages, strict=strict, limits=services.config.limits
        )
        warnings = first_warnings(warnings + more_warnings)
        prompt = services.require_chat_template().render(
            messages,
            add_generation_prompt=bool(
                request.add_generation_prompt
            ),  # later requests go on with more messages
            variables=checked_template_variables(request.chat_template_kwargs),
        )
        add_special_tokens, param = bool(request.add_special_tokens), "messages"
    else:
        prompts = prompts_of(request.prompt, "prompt")
        if len(prompts) > 1:
            raise RequestError(
                f"prompt has {len(prompts)} prompts, but one prefix is pinned at a time; send several requests",
                param="prompt",
                code="invalid_value",
            )
        [prompt] = prompts
        add_special_tokens, param = request.add_special_tokens is not False, "prompt"
    async with exchange.abort_on_disconnect():
        done = await services.manager.control.pin(
            prompt,
            ttl_s=request.ttl,
            extra_key=exchange.caller.namespace(checked_salt(request.cache_salt)),
            add_special_tokens=add_special_tokens,
            param=param,
        )
        await exchange.send_json(
            PinnedBody(
                pinned_tokens=done.pinned_tokens,
                asked_tokens=done.asked_tokens,
                reason=done.reason,
                warnings=warnings or UNSET,
            )
        )
