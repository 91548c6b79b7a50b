"""`POST /v1/chat/completions/render` and `POST /v1/completions/render`: the prompts of a request as token ids.

vLLM has these endpoints and their form: one object for a chat, a list for completions. Routers use them to find the
worker that has most of a prompt in its cache. A request is read, planned and checked by the code that answers it, so it
is refused for the same reasons; but nothing is scheduled, and a full queue does not matter.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.sampling_params import SamplingParams
from ...generation import GenerationRequest
from ...preparation import PreparedPrompt
from ...prompt_encoder import NO_BOS, second_bos
from ..exchange import Exchange
from ..schema.constraint_fields import ConstraintFields
from ..schema.field_policy import first_warnings
from ..schema.generation_fields import GenerationFields
from ..services import Engine
from .chat import read_chat
from .completions import read_completion
from .wire import RenderedBody

_NATIVE_NAMES: Final = {"include_stop_str_in_output": "no_stop_trim"}
"""Fields of `SamplingParams` whose name in `sampling_params` of `/generate` is another one."""
_ELSEWHERE: Final = ("logprobs", "prompt_logprobs", "dry_breaker_ids", "bad_words_ids")
"""Fields of `SamplingParams` that `/generate` has outside of `sampling_params`, or finds itself."""
_GRAMMAR_IS_LEFT_OUT: Final = (
    "the answer of this chat has a grammar for tool calls, or one that begins after its reasoning; sampling_params has "
    "no field for it, so send the chat itself"
)
_IMAGES_ARE_LEFT_OUT: Final = (
    "the chat has images, of which token_ids has only the placeholders; send the chat itself for an answer"
)


class _EncodedBody(msgspec.Struct, kw_only=True):
    """`RenderedBody` with ids that are JSON already: millions of them are encoded off the event loop."""

    token_ids: msgspec.Raw
    prompt: str | UnsetType
    model: str
    sampling_params: dict[str, Any]
    stream: bool
    priority: int
    cache_salt: str | UnsetType
    lora_path: str | UnsetType
    return_logprob: bool | UnsetType
    top_logprobs_num: int | UnsetType
    warnings: list[str] | UnsetType


assert _EncodedBody.__struct_fields__ == RenderedBody.__struct_fields__


async def render_chat(exchange: Exchange, engine: Engine) -> None:
    """The prompt of a chat."""
    fields, request = await engine.read(exchange, lambda body: read_chat(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        request, [prompt] = await engine.prepare(exchange, request)
        assert request.conversation is not None and request.plan is not None
        warnings = request.warnings
        if request.media:
            warnings = first_warnings([*warnings, _IMAGES_ARE_LEFT_OUT])
        has_tools = bool(request.conversation.tools)
        has_fields = request.grammar is None or (request.plan.reasoning is None and not has_tools)
        if not has_fields:
            warnings = first_warnings([*warnings, _GRAMMAR_IS_LEFT_OUT])
        body = await _body(engine, fields, request, 0, prompt, fields if has_fields else None)
        body.warnings = warnings or UNSET
        await exchange.send_json(body)


async def render_completions(exchange: Exchange, engine: Engine) -> None:
    """The prompts of completions, in their order; warnings are in the first."""
    fields, request = await engine.read(exchange, lambda body: read_completion(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        request, prompts = await engine.prepare(exchange, request)
        bodies = [
            await _body(engine, fields, request, index, prompt, fields)
            for index, prompt in enumerate(prompts)
        ]
        warnings = request.warnings
        if request.add_special_tokens:
            encoded = [prompt.ids for prompt in prompts]
            warnings = warnings + second_bos(engine.tokenizer, request.prompts, encoded, "prompt", NO_BOS)
        bodies[0].warnings = warnings or UNSET
        await exchange.send_json(bodies)


async def _body(
    engine: Engine,
    fields: GenerationFields,
    request: GenerationRequest,
    index: int,
    prompt: PreparedPrompt,
    constraint: ConstraintFields | None,
) -> _EncodedBody:
    """The answer for prompt `index` of a request; `constraint`: the fields that say what the answer is."""
    text, scheduling, sampling = request.prompts[index], request.scheduling, prompt.sampling
    return _EncodedBody(
        token_ids=msgspec.Raw(await engine.encoder.json_of(prompt.ids)),
        prompt=text if isinstance(text, str) else UNSET,
        model=scheduling.served_as or engine.served_model,
        sampling_params=_sampling_params(sampling, request, constraint),
        stream=bool(fields.stream),
        priority=scheduling.priority,
        cache_salt=fields.cache_salt or UNSET,
        lora_path=scheduling.served_as or UNSET,
        return_logprob=UNSET if sampling.logprobs is None else True,
        top_logprobs_num=sampling.logprobs or UNSET,
        warnings=UNSET,
    )


def _sampling_params(
    sampling: SamplingParams, request: GenerationRequest, constraint: ConstraintFields | None
) -> dict[str, Any]:
    """`sampling_params` of `/generate` for the same answer; None: without the constraint of the request."""
    params = {
        _NATIVE_NAMES.get(name, name): value
        for name, value in msgspec.structs.asdict(sampling).items()
        if value is not None and value != () and name not in _ELSEWHERE
    }
    num_returned = request.n if request.num_returned is None else request.num_returned
    if num_returned > 1:
        params["n"] = num_returned
    if request.is_ranked:
        params["best_of"] = request.n
    if constraint is not None:
        given = ((name, getattr(constraint, name)) for name in ConstraintFields.__struct_fields__)
        params |= {name: value for name, value in given if value is not None}
    return params
