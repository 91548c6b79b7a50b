"""`POST /generate`: the engine's own API, from texts or token ids.

The format is SGLang's: `sampling_params` is a nested object, `meta_info` is beside the text, and each chunk has all
text so far, which is quadratic in the length. With `incremental` a chunk has only the new text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ....models.tokenizer.tokenizer import Tokenizer
from ....runtime.config.answer_config import RequestLimits
from ....runtime.errors import RequestError
from ....runtime.messages import Finish, FinishKind
from ....runtime.sampling_defaults import SamplingDefaults
from ....runtime.sampling_params import SamplingParams
from ...conversation.deltas import Delta
from ...generation import Choice, Generation, GenerationRequest, Row
from ...prompt_encoder import NO_BOS
from ..delivery import Collected, best_answers, collect, num_generated, stream
from ..exchange import Exchange
from ..framing import DONE, event
from ..guards.auth import Caller
from ..schema.accounting import truncated_of
from ..schema.cache_fields import SessionParams
from ..schema.constraints import check_room, constraint_of
from ..schema.errors import renamed_fields
from ..schema.field_policy import SAMPLING_NOT_YET, FieldPolicy
from ..schema.generation_fields import at_least_one, prompts_of
from ..schema.image_parts import RequestImages
from ..schema.parts import ONLY_TEXT
from ..schema.values import Body, convert, refused
from ..services import Engine
from ..token_logprobs import TokenLogprob
from .wire import GenerateBody, LogprobRow, MetaInfo, NativeRequest, NativeSampling

DEFAULT_MAX_NEW_TOKENS: Final = 128
_POLICY: Final = FieldPolicy(
    NativeRequest,
    {
        "audio_data": (),
        "background": (False,),
        "input_embeds": (),
        "return_bytes": (False,),
        "return_entropy": (False,),
        "return_hidden_states": (False,),
        "return_text_in_logprobs": (False,),
        "video_data": (),
    },
    no_effect={"log_metrics", "no_logs"},
    nested={
        "sampling_params": FieldPolicy(NativeSampling, SAMPLING_NOT_YET),
        "session_params": FieldPolicy(
            SessionParams,
            {"rid": (), "offset": (), "replace": (False,), "drop_previous_output": (False,)},
            no_effect=(),
        ),
    },
)
_SAMPLING: Final = "sampling_params"


def _names_in(at: str) -> dict[str, str]:
    """Usual name of a field -> its path in `NativeRequest`, whose sampling parameters are at this path."""
    return {
        **{name: f"{at}.{name}" for name in ("n", "best_of", *SamplingParams.__struct_fields__)},
        "max_tokens": f"{at}.max_new_tokens",
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "top_logprobs_num",
        "prompt_logprobs_start": "logprob_start_len",
        "logprob_token_ids": "token_ids_logprob",
    }


_OUR_NAMES: Final = _names_in(_SAMPLING)


async def generate(exchange: Exchange, engine: Engine) -> None:
    """Generate from texts or token ids."""
    body, request = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            del request  # it has the files of images, and an answer may take long
            warnings = generation.request.warnings + engine.second_bos(generation, NO_BOS)
            if body.stream:
                incremental = bool(body.incremental)
                writer = _NativeStream(engine, generation, incremental=incremental, warnings=warnings)
                await stream(exchange, generation, writer)
                return
            answers = []
            for choice, answer in best_answers(generation, await collect(generation)):
                if not body.return_logprob:
                    answer.logprobs = []  # were for ranking
                answers.append(_body(engine, generation, choice, answer))
            answers[0].warnings = warnings or UNSET
            await exchange.send_json(answers if _is_batch(body) or len(answers) > 1 else answers[0])


def _is_batch(body: NativeRequest) -> bool:
    """Whether the client sent a list of prompts."""
    value = body.text or body.input_ids
    return isinstance(value, list) and isinstance(value[0], str | list)


def _read(body: Body, engine: Engine, caller: Caller) -> tuple[NativeRequest, GenerationRequest]:
    warnings = _POLICY.check(body, strict=engine.config.server.strict)
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
    given = request.sampling_params or {}
    objects = (
        {_SAMPLING: given}
        if isinstance(given, dict)
        else {f"{_SAMPLING}[{i}]": each for i, each in enumerate(given)}
    )
    samplings = {at: convert(each, NativeSampling, at) for at, each in objects.items()}
    generation = _generation_request(
        request,
        samplings,
        caller,
        engine.config.limits,
        engine.sampling_defaults,
        engine.manager.capacity.max_model_len,
    )
    generation = _with_images(_with_adapters(generation, request, engine), request, engine)
    constraints = [
        constraint_of(
            sampling,
            engine.config.answers,
            engine.config.limits,
            strict_server=engine.config.server.strict,
            at=at,
        )
        for at, sampling in samplings.items()
    ]
    constraint = constraints[0]
    for at, other in zip(samplings, constraints, strict=True):
        if (None if other is None else other.use) != (None if constraint is None else constraint.use):
            raise refused(
                at, "has another constraint than the first; send a request for each", "unsupported_value"
            )
    if constraint is not None:
        for at, sampling_params in zip(
            samplings, generation.samplings or (generation.sampling,), strict=True
        ):
            max_new_tokens = sampling_params.max_new_tokens
            check_room(constraint, max_new_tokens, f"{at}.max_new_tokens", engine.tokenizer)
        warnings += constraint.warnings
        generation = replace(generation, grammar=constraint.use, grammar_param=constraint.param)
    return request, replace(generation, names=_OUR_NAMES, warnings=warnings)


def _with_adapters(
    generation: GenerationRequest, request: NativeRequest, engine: Engine
) -> GenerationRequest:
    """The request with the adapter that it names, or with one for each prompt.

    Raises:
        RequestError: an adapter is unknown, or there are more or fewer of them than prompts.
    """
    paths = request.lora_path or None  # as for other neutral values, an empty list is no adapter
    if not isinstance(paths, list):
        scheduling = engine.with_adapter(generation.scheduling, None, paths)
        return msgspec.structs.replace(generation, scheduling=scheduling)
    if len(paths) != len(generation.prompts):
        raise RequestError(
            f"lora_path has {len(paths)} names and there are {len(generation.prompts)} prompts; send one for each, or "
            "one name for all",
            param="lora_path",
            code="invalid_value",
        )
    lora_ids = [engine.with_adapter(generation.scheduling, None, path).lora_id for path in paths]
    return msgspec.structs.replace(generation, lora_ids=lora_ids)


def _with_images(generation: GenerationRequest, request: NativeRequest, engine: Engine) -> GenerationRequest:
    """The request with its images.

    Raises:
        RequestError: one cannot be used, or the text has not a marker for each.
    """
    if not request.image_data:
        return generation
    vision, [text, *others] = engine.spec.vision, generation.prompts
    if vision is None or not engine.images.are_seen:
        raise refused("image_data", f"is set, {ONLY_TEXT}", "unsupported_value")
    if others or not isinstance(text, str):
        raise refused("image_data", "belongs to one text; send a request for each, without input_ids")
    images = RequestImages(engine.config.limits).image_data(request.image_data, "image_data")
    if (count := text.count(vision.marker)) != len(images):
        raise refused(
            "text",
            f"has {count} of {vision.marker!r}, and image_data {len(images)} images; write one in the place of each",
        )
    request.image_data = None
    return msgspec.structs.replace(generation, images=images)


def _generation_request(
    request: NativeRequest,
    samplings: Mapping[str, NativeSampling],
    caller: Caller,
    limits: RequestLimits,
    defaults: SamplingDefaults,
    max_prompt_len: int,
) -> GenerationRequest:
    """The request, without adapters and constraint; `samplings`: by their paths, one for all prompts or one for each.

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
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    is_list = isinstance(request.sampling_params, list) and bool(request.sampling_params)
    if is_list and len(samplings) != len(prompts):
        raise refused(
            _SAMPLING,
            f"has {len(samplings)} objects and there are {len(prompts)} prompts; send one for each, or one for all",
        )
    made: list[SamplingParams] = []
    n = generated = 0
    counts: set[tuple[int, int]] = set()  # returned and generated answers per prompt
    for at, sampling in samplings.items():
        with renamed_fields(_names_in(at)):
            max_new_tokens = at_least_one(sampling.max_new_tokens, "max_new_tokens")
            n = sampling.num_choices(limits)
            generated = num_generated(n, sampling.best_of, limits, stream=bool(request.stream))
            made.append(
                sampling.sampling(
                    limits,
                    defaults,
                    max_new_tokens=DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
                    min_new_tokens=sampling.min_new_tokens,
                    keep_stop=sampling.no_stop_trim,
                    logprobs=0 if top is None and generated > n else top,
                    prompt_logprobs=top if start >= 0 else None,
                    prompt_logprobs_start=max(0, start),
                    logprob_token_ids=request.token_ids_logprob if top is not None else None,
                )
            )
        counts.add((n, generated))
        if len(counts) > 1:
            raise refused(
                f"{at}.n", f"is {n}, but all prompts of a request have as many answers, with best_of too"
            )
    with renamed_fields(_OUR_NAMES):
        scheduling = caller.scheduling(request)
    return GenerationRequest(
        prompts=prompts,
        sampling=made[0],
        samplings=made if is_list else (),
        n=generated,
        num_returned=n,
        id_prefix="gen",
        scheduling=scheduling,
        add_special_tokens=request.add_special_tokens is not False,
        prompt_param=param,
    )


class _NativeStream:
    """Writes one event per row."""

    def __init__(
        self, engine: Engine, generation: Generation, *, incremental: bool, warnings: list[str]
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._incremental = incremental
        self._warnings = warnings
        self._so_far = [Collected() for _ in generation.choices]

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The event for one row."""
        choice = row.choice
        if self._incremental:
            self._so_far[choice.index] = Collected()
        collected = self._so_far[choice.index]
        collected.add(row.output, choice.prompt_ids)
        body = _body(self._engine, self._generation, choice, collected)
        if len(self._so_far) > 1:
            body.index = choice.index
        if self._warnings:
            body.warnings, self._warnings = self._warnings, []
        return event(body)

    def closing(self) -> bytes:
        """Only the mark of the end: the event of the last row has everything."""
        return DONE


def _body(engine: Engine, generation: Generation, choice: Choice, collected: Collected) -> GenerateBody:
    usage, tokenizer = choice.usage, engine.tokenizer
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
    by_tier = {"host": usage.host_tokens, engine.config.cache.kv_tier: usage.loaded_tokens}
    if used := {tier: tokens for tier, tokens in by_tier.items() if tokens}:
        meta.cached_tokens_by_tier = used
    if choice.guided is not None and choice.finish is not None:
        meta.grammar = choice.guided.report(tokenizer) or UNSET
        meta.truncated = truncated_of(choice, tokenizer)
    if collected.prompt_logprobs:
        entries = collected.prompt_logprobs
        before = choice.prompt_ids[len(choice.prompt_ids) - len(entries) - 1]
        first: LogprobRow = (None, *_named(tokenizer, before))
        meta.input_token_logprobs = [first, *_own(tokenizer, entries)]
        meta.input_top_logprobs = [None, *_top(tokenizer, entries)]
        if entries[0].chosen:
            meta.input_token_ids_logprobs = [None, *_chosen(tokenizer, entries)]
    if collected.logprobs:
        meta.output_token_logprobs = _own(tokenizer, collected.logprobs)
        meta.output_top_logprobs = _top(tokenizer, collected.logprobs)
        if collected.logprobs[0].chosen:
            meta.output_token_ids_logprobs = _chosen(tokenizer, collected.logprobs)
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


def _own(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> list[LogprobRow]:
    return [(entry.logprob, *_named(tokenizer, entry.token_id)) for entry in entries]


def _top(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> list[list[LogprobRow]]:
    return [[(value, *_named(tokenizer, token_id)) for token_id, value in entry.top] for entry in entries]


def _chosen(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> list[list[LogprobRow]]:
    return [[(value, *_named(tokenizer, token_id)) for token_id, value in entry.chosen] for entry in entries]


def _named(tokenizer: Tokenizer, token_id: int) -> tuple[int, str]:
    return token_id, tokenizer.token_bytes(token_id).decode("utf-8", "replace")
