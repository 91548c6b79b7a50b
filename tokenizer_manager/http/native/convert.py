"""`POST /generate`: the engine's own API, from texts or token ids.

The format is SGLang's: `sampling_params` is a nested object, `meta_info` is beside the text, and each chunk has all
text so far, which is quadratic in the length. With `incremental` a chunk has only the new text.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ....runtime.config.request_limits import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.messages import Finish, FinishKind
from ....runtime.sampling_defaults import SamplingDefaults
from ....runtime.sampling_params import SamplingParams
from ...generation import Choice, Generation, GenerationRequest, Row
from ...prompt_encoder import NO_BOS
from ..delivery import Collected, Wanted, best_answers, collect, stream, wanted_answers
from ..exchange import Exchange
from ..framing import event
from ..guards.auth import Caller
from ..schema.accounting import truncated_of
from ..schema.constraints import check_room, constraint_of
from ..schema.errors import renamed_fields
from ..schema.field_policy import SAMPLING_NOT_YET, FieldPolicy
from ..schema.generation_fields import at_least_one, prompts_of
from ..schema.values import Body, convert
from ..services import Services
from ..token_logprobs import TokenLogprob
from .wire import GenerateBody, LogprobRow, MetaInfo, NativeRequest, NativeSampling

DEFAULT_MAX_NEW_TOKENS: Final = 128
_POLICY: Final = FieldPolicy(
    NativeRequest,
    {
        "audio_data": (),
        "background": (False,),
        "image_data": (),
        "input_embeds": (),
        "return_bytes": (False,),
        "return_entropy": (False,),
        "return_hidden_states": (False,),
        "return_text_in_logprobs": (False,),
        "session_params": (),
        "token_ids_logprob": (),
        "video_data": (),
    },
    no_effect={"log_metrics", "no_logs"},
    nested={"sampling_params": FieldPolicy(NativeSampling, SAMPLING_NOT_YET)},
)
_OUR_NAMES: Final = {
    **{name: f"sampling_params.{name}" for name in ("n", "best_of", *SamplingParams.__struct_fields__)},
    "max_tokens": "sampling_params.max_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
"""Usual name of a field -> its path in `NativeRequest`."""


async def generate(exchange: Exchange, services: Services) -> None:
    """Generate from texts or token ids."""
    made = await services.read(exchange, lambda body: _read(body, services, exchange.caller))
    request, warnings = made.request, made.warnings
    async with exchange.abort_on_disconnect():
        with renamed_fields(_OUR_NAMES):
            generation = await services.start(exchange, made.generation)
        with generation:
            warnings += services.second_bos(generation, made.generation, NO_BOS)
            if request.stream:
                writer = _NativeStream(
                    services, generation, incremental=bool(request.incremental), warnings=warnings
                )
                await stream(exchange, generation, writer)
                return
            answers = []
            for choice, answer in best_answers(generation, await collect(generation), made.wanted):
                if not request.return_logprob:
                    answer.logprobs = []  # were for ranking
                answers.append(_body(services, generation, choice, answer))
            answers[0].warnings = warnings or UNSET
            await exchange.send_json(answers if made.is_batch or len(answers) > 1 else answers[0])


class _Checked(NamedTuple):
    """A checked body.

    Attributes:
        generation: the request to generate.
        wanted: what of it is returned.
        is_batch: the client sent a list of prompts.
    """

    request: NativeRequest
    generation: GenerationRequest
    wanted: Wanted
    is_batch: bool
    warnings: list[str]


def _read(body: Body, services: Services, caller: Caller) -> _Checked:
    warnings = _POLICY.check(body, strict=services.config.server.strict)
    request = convert(body, NativeRequest)
    if request.rid is not None:
        warnings.append(
            "rid was ignored: ids are made by the server; requests are aborted by the id in meta_info"
        )
    if request.stream and request.return_logprob and not request.incremental:
        raise RequestError(
            "incremental is not true, so that each chunk of the stream would hold the log-probabilities of all tokens "
            "so far; set it, or leave out return_logprob",
            param="incremental",
            code="unsupported_value",
        )
    sampling = convert(request.sampling_params or {}, NativeSampling, "sampling_params")
    generation_request, wanted, is_batch = _generation_request(
        request,
        sampling,
        caller,
        services.config.limits,
        services.sampling_defaults,
        services.manager.capacity.max_model_len,
    )
    generation_request = _with_adapters(generation_request, request, services)
    constraint = constraint_of(
        sampling,
        services.config.answers,
        services.config.limits,
        strict_server=services.config.server.strict,
        at="sampling_params",
    )
    if constraint is not None:
        max_new_tokens = generation_request.sampling.max_new_tokens
        check_room(constraint, max_new_tokens, "sampling_params.max_new_tokens", services.tokenizer)
        warnings += constraint.warnings
        generation_request = replace(
            generation_request, grammar=constraint.use, grammar_param=constraint.param
        )
    return _Checked(request, generation_request, wanted, is_batch, warnings)


def _with_adapters(
    generation: GenerationRequest, request: NativeRequest, services: Services
) -> GenerationRequest:
    """The request with the adapter that it names, or with one for each prompt.

    Raises:
        RequestError: an adapter is unknown, or there are more or fewer of them than prompts.
    """
    paths = request.lora_path or None  # as for other neutral values, an empty list is no adapter
    if not isinstance(paths, list):
        scheduling = services.with_adapter(generation.scheduling, None, paths)
        return msgspec.structs.replace(generation, scheduling=scheduling)
    if len(paths) != len(generation.prompts):
        raise RequestError(
            f"lora_path has {len(paths)} names and there are {len(generation.prompts)} prompts; send one for each, or "
            "one name for all",
            param="lora_path",
            code="invalid_value",
        )
    lora_ids = [services.with_adapter(generation.scheduling, None, path).lora_id for path in paths]
    return msgspec.structs.replace(generation, lora_ids=lora_ids)


def _generation_request(
    request: NativeRequest,
    sampling: NativeSampling,
    caller: Caller,
    limits: RequestLimits,
    defaults: SamplingDefaults,
    max_prompt_len: int,
) -> tuple[GenerationRequest, Wanted, bool]:
    """The generation request, the numbers of answers, and whether the client sent a list of prompts.

    Raises:
        RequestError: fields contradict each other, or a field has a wrong type.
    """
    if request.text is not None and request.input_ids is not None:  # an empty one asks for nothing
        request = msgspec.structs.replace(
            request, text=request.text or None, input_ids=request.input_ids or None
        )
    if (request.text is None) == (request.input_ids is None):
        raise RequestError(
            "text and input_ids are two forms of the prompt; send exactly one",
            param="text",
            code="invalid_value",
        )
    param = "text" if request.input_ids is None else "input_ids"
    value = request.text if request.input_ids is None else request.input_ids
    prompts = prompts_of(value, param, limits, max_prompt_len=max_prompt_len)
    top = (request.top_logprobs_num or 0) if request.return_logprob else None
    wants_prompt = request.logprob_start_len is not None and request.logprob_start_len >= 0
    if wants_prompt and request.logprob_start_len != 0:
        raise RequestError(
            f"logprob_start_len is {request.logprob_start_len}, but only 0 (the whole prompt) and -1 (none of it) are "
            f"supported",
            param="logprob_start_len",
            code="unsupported_value",
        )
    with renamed_fields(_OUR_NAMES):
        max_new_tokens = at_least_one(sampling.max_new_tokens, "max_new_tokens")
        wanted = wanted_answers(
            sampling.num_choices(limits), sampling.best_of, limits, stream=bool(request.stream)
        )
        generation_request = GenerationRequest(
            prompts=prompts,
            sampling=sampling.sampling(
                limits,
                defaults,
                max_new_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
                min_new_tokens=sampling.min_new_tokens,
                keep_stop=sampling.no_stop_trim,
                logprobs=wanted.logprobs(top),
                prompt_logprobs=top if wants_prompt else None,
            ),
            n=wanted.generated,
            id_prefix="gen",
            scheduling=caller.scheduling(request),
            add_special_tokens=request.add_special_tokens is not False,
            prompt_param=param,
        )
    return generation_request, wanted, isinstance(value, list) and isinstance(value[0], str | list)


class _NativeStream:
    """Writes one event per row."""

    def __init__(
        self, services: Services, generation: Generation, *, incremental: bool, warnings: list[str]
    ) -> None:
        self._services = services
        self._generation = generation
        self._incremental = incremental
        self._warnings = warnings
        self._so_far = [Collected() for _ in generation.choices]

    def events(self, row: Row) -> bytes:
        """The event for one row."""
        choice = row.choice
        if self._incremental:
            self._so_far[choice.index] = Collected()
        collected = self._so_far[choice.index]
        collected.add(row.output, choice.prompt_ids)
        body = _body(self._services, self._generation, choice, collected)
        if len(self._so_far) > 1:
            body.index = choice.index
        if self._warnings:
            body.warnings, self._warnings = self._warnings, []
        return event(body)

    def closing(self) -> bytes:
        """Nothing: the event of the last row has everything."""
        return b""


def _body(services: Services, generation: Generation, choice: Choice, collected: Collected) -> GenerateBody:
    usage = choice.usage
    meta = MetaInfo(
        id=generation.id,
        finish_reason=_finish_reason(choice.finish),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        seed=choice.seed,
        queue_time=usage.queue_s,
        e2e_latency=(choice.last_token_s or generation.arrival_s) - generation.arrival_s,
    )
    if choice.guided is not None and choice.finish is not None:
        meta.grammar = choice.guided.report(services.tokenizer) or UNSET
        meta.truncated = truncated_of(choice, services.tokenizer)
    if collected.prompt_logprobs:
        entries = collected.prompt_logprobs
        first: LogprobRow = (None, *_named(services, choice.prompt_ids[0]))
        meta.input_token_logprobs = [first, *_own(services, entries)]
        meta.input_top_logprobs = [None, *_top(services, entries)]
    if collected.logprobs:
        meta.output_token_logprobs = _own(services, collected.logprobs)
        meta.output_top_logprobs = _top(services, collected.logprobs)
    return GenerateBody(collected.text, collected.token_ids.tolist(), meta)


def _finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    if finish is None:
        return None
    reason: dict[str, Any] = {"type": finish.kind.value}
    if finish.kind is FinishKind.STOP:
        reason["matched"] = finish.matched
    if finish.message:
        reason["message"] = finish.message
    return reason


def _own(services: Services, entries: list[TokenLogprob]) -> list[LogprobRow]:
    return [(entry.logprob, *_named(services, entry.token_id)) for entry in entries]


def _top(services: Services, entries: list[TokenLogprob]) -> list[list[LogprobRow]]:
    return [[(value, *_named(services, token_id)) for token_id, value in entry.top] for entry in entries]


def _named(services: Services, token_id: int) -> tuple[int, str]:
    return token_id, services.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
