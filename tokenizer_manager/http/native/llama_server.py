"""`POST /infill` and `POST /completion` in the form of llama-server, for llama.vim, llama.vscode and its other clients.

Sampling has llama-server's defaults here and filters before the temperature, as there. An answer has one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ....models.tokenizer.fim import Extra
from ....runtime.messages import FinishKind
from ....runtime.sampling_defaults import SamplingDefaults
from ....runtime.sampling_params import MAX_COUNT, NUMBERS, SamplingParams
from ...generation import Choice, Generation, GenerationRequest, warm_up_of
from ...prompt_encoder import NO_BOS
from ..exchange import Exchange
from ..framing import event
from ..guards.auth import Caller
from ..schema.accounting import progress_of, timings_of, usage_of
from ..schema.constraints import check_room, constraint_of
from ..schema.errors import renamed_fields
from ..schema.field_policy import SAMPLING_NOT_YET, FieldPolicy
from ..schema.field_types import NO_LIMIT
from ..schema.fim import fill_in
from ..schema.generation_fields import prompts_of
from ..schema.values import Body, convert, refused, show
from ..services import Engine
from ..token_logprobs import int32s
from .llama_wire import InfillRequest, LlamaBody, LlamaCompletionRequest, LlamaFields

DEFAULTS: Final = SamplingDefaults(
    temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, source="llama-server's default"
)
_ORDER: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "penalties": ("e", {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}),
    "dry": ("d", {"dry_multiplier": 0.0}),
    "top_n_sigma": ("s", {"top_n_sigma": -1.0}),
    "top_k": ("k", {"top_k": -1}),
    "typ_p": ("y", {"typical_p": 1.0}),
    "top_p": ("p", {"top_p": 1.0}),
    "min_p": ("m", {"min_p": 0.0}),
    "xtc": ("x", {"xtc_probability": 0.0}),
    "temperature": ("t", {"temperature": 1.0, "dynatemp_range": 0.0}),
    "infill": ("i", {}),
}
"""A sampler in the order of the engine -> its letter, and the parameters of a chain without it."""
_NAMES: Final = {"max_new_tokens": "n_predict", "max_tokens": "n_predict"}
_NO_EFFECT: Final = {
    *("cache_prompt", "id_slot", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_discard", "n_keep"),
    *("repeat_last_n", "sse_ping_interval", "t_max_prompt_ms"),
}
_NOT_YET: Final = SAMPLING_NOT_YET | {
    "adaptive_target": (-1,),
    "lora": (),
    "min_keep": (0,),
    "n_cmpl": (1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "timings_per_token": (False,),
}
_INFILL_POLICY: Final = FieldPolicy(
    InfillRequest,
    _NOT_YET,
    no_effect=_NO_EFFECT,
    nested={"input_extra": FieldPolicy(Extra, {}, no_effect=("time",))},
)
_COMPLETION_POLICY: Final = FieldPolicy(LlamaCompletionRequest, _NOT_YET, no_effect=_NO_EFFECT)


async def infill(exchange: Exchange, engine: Engine) -> None:
    """Write the text between two others."""
    await _answer(
        exchange,
        engine,
        await engine.read(exchange, lambda body: read_infill(body, engine, exchange.caller)),
    )


async def llama_completion(exchange: Exchange, engine: Engine) -> None:
    """Continue a prompt."""
    await _answer(
        exchange,
        engine,
        await engine.read(exchange, lambda body: _read_completion(body, engine, exchange.caller)),
    )


def read_infill(body: Body, engine: Engine, caller: Caller) -> tuple[LlamaFields, GenerationRequest]:
    """The request for the text between two others; a limit of its own leaves a quarter of the context to the answer.

    Raises:
        RequestError: it is refused, or the model has no tokens for it.
    """
    warnings = _INFILL_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, InfillRequest)
    context = engine.manager.capacity.max_model_len
    sampling, warnings = _sampling(request, engine, warnings)
    prompts, sampling = fill_in(
        engine.tokenizer,
        [(request.input_prefix, request.input_suffix)],
        sampling,
        room=context - min(sampling.max_new_tokens or context // 4, context // 2),
        param="input_prefix",
        written=request.prompt or "",
        extra=request.input_extra or (),
        suffix_first=engine.config.answers.spm_infill,
    )
    return request, _generation(request, prompts, sampling, warnings, engine, caller)


def _read_completion(body: Body, engine: Engine, caller: Caller) -> tuple[LlamaFields, GenerationRequest]:
    warnings = _COMPLETION_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, LlamaCompletionRequest)
    prompts = prompts_of(request.prompt, "prompt", max_prompt_len=engine.manager.capacity.max_model_len)
    sampling, warnings = _sampling(request, engine, warnings)
    return request, _generation(request, prompts, sampling, warnings, engine, caller)


def _sampling(request: LlamaFields, engine: Engine, warnings: list[str]) -> tuple[SamplingParams, list[str]]:
    n_predict = NO_LIMIT if request.n_predict is None else request.n_predict
    if n_predict < NO_LIMIT:
        raise refused(
            "n_predict", f"is {n_predict}, but it must be -1 (no limit), 0 (prompt only) or a count"
        )
    if not 0 <= (request.n_indent or 0) <= MAX_COUNT:
        raise refused("n_indent", f"is {request.n_indent}, but it must lie in [0, {MAX_COUNT}]")
    if request.n not in (None, 1):
        raise refused("n", f"is {request.n}, but this route has one answer; use /v1/completions for more")
    if request.temperature_last is None:
        request.temperature_last = True
    replaced = _without(request.samplers)
    if getattr(request, "seed", None) == -1:
        replaced["seed"] = None  # drawn
    for name, value in replaced.items():
        setattr(request, name, value)
    if "infill" in _chain(request.samplers):
        warnings.append("samplers: infill has no effect; the tokens of the model end the answer")
    with renamed_fields(_NAMES):
        sampling = request.sampling(
            engine.config.limits,
            DEFAULTS,
            max_new_tokens=None if n_predict == NO_LIMIT else max(1, n_predict),
            min_new_tokens=None,
            keep_stop=None,
        )
    return sampling, warnings


def _chain(samplers: list[str] | str | None) -> list[str]:
    """The names of a chain, which may be a string of letters.

    Raises:
        RequestError: a name is unknown, or the order is not the engine's.
    """
    by_letter = {letter: name for name, (letter, _) in _ORDER.items()}
    names = [by_letter.get(each, each) if isinstance(samplers, str) else each for each in samplers or ()]
    names = ["typ_p" if name == "typical_p" else name for name in names]
    order = list(_ORDER)
    if unknown := [name for name in names if name not in _ORDER]:
        raise refused("samplers", f"has {show(unknown[0])}, but the samplers are {', '.join(order)}")
    if names != sorted(set(names), key=order.index):
        raise refused(
            "samplers",
            f"is {show(samplers)}, but the order here is {', '.join(order)}; send it so, or leave it out",
            "unsupported_value",
        )
    return names


def _without(samplers: list[str] | str | None) -> dict[str, Any]:
    """The neutral parameters of the samplers that a chain leaves out."""
    if not samplers:  # asks for nothing, as an empty list does everywhere
        return {}
    chain = _chain(samplers)
    return {
        name: value for each, (_, off) in _ORDER.items() if each not in chain for name, value in off.items()
    }


def _generation(
    request: LlamaFields,
    prompts: Sequence[str | list[int]],
    sampling: SamplingParams,
    warnings: list[str],
    engine: Engine,
    caller: Caller,
) -> GenerationRequest:
    config = engine.config
    constraint = constraint_of(request, config.answers, config.limits, strict_server=config.server.strict)
    if constraint is not None:
        check_room(constraint, sampling.max_new_tokens, "n_predict", engine.tokenizer)
        warnings = warnings + constraint.warnings
    generation = GenerationRequest(
        prompts=prompts,
        sampling=sampling,
        id_prefix="cmpl",
        scheduling=engine.with_adapter(caller.scheduling(request), request.model),
        length_param="n_predict",
        cut_length=True,
        grammar=None if constraint is None else constraint.use,
        grammar_param="" if constraint is None else constraint.param,
        names=_NAMES,
        warnings=warnings,
        reports_progress=bool(request.stream and request.return_progress),
    )
    if request.n_predict == 0:
        return replace(warm_up_of(generation), grammar=None)
    return generation


class LineRules:
    """The ends of llama-server that depend on lines: an indentation that is too small, and a time limit.

    Attributes:
        text: the answer so far.
        ended: one of the rules has ended it.
    """

    def __init__(self, n_indent: int, max_predict_s: float) -> None:
        """Take the rules; 0: there is none."""
        self._n_indent = n_indent
        self._max_predict_s = max_predict_s
        self._line_start = 0
        self.text = ""
        self.ended = False

    def add(self, text: str, elapsed_s: float) -> str:
        """The part of new text that belongs to the answer; `elapsed_s`: since its first token.

        A line after the first that begins with fewer than `n_indent` spaces or tabs is cut after these. A new line
        that comes after the time limit ends the answer.
        """
        begin = len(self.text)
        self.text += text
        if self._n_indent:
            self._check_indent()
        if not self.ended and "\n" in text and 0 < self._max_predict_s < elapsed_s:
            self.ended = True
        return self.text[begin:]

    def _check_indent(self) -> None:
        while True:
            if self._line_start:
                line = self.text[self._line_start :]
                indent = len(line) - len(line.lstrip(" \t"))
                if indent < len(line) and line[indent] != "\n" and indent < self._n_indent:
                    self.text = self.text[: self._line_start + indent]
                    self.ended = True
                    return
            next_line = self.text.find("\n", self._line_start) + 1
            if not next_line:
                return
            self._line_start = next_line


async def _answer(exchange: Exchange, engine: Engine, read: tuple[LlamaFields, GenerationRequest]) -> None:
    body, request = read
    rules = LineRules(body.n_indent or 0, max(0, body.t_max_predict_ms or 0) / 1e3)
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:  # its end ends what still runs
            warnings = generation.request.warnings + engine.second_bos(generation, NO_BOS)
            [choice] = generation.choices
            ids: list[int] = []
            reads = body.stream and body.return_progress
            async for rows in generation:
                text, new_ids = "", []
                for _, output in rows:
                    choice.read(output)
                    first_s = choice.first_token_s
                    elapsed_s = 0.0 if first_s is None else engine.manager.now_s() - first_s
                    if not (rules.ended or choice.warm_up):
                        text += rules.add(output.text, elapsed_s)
                        new_ids += int32s(output.token_ids).tolist()
                ids += new_ids
                if body.stream:
                    if not exchange.streaming:
                        await exchange.start_events()
                    if text or reads:
                        part = _part(choice, text, new_ids, body)
                        if reads:
                            reads = choice.first_token_s is None
                            processed = choice.processed_tokens if reads else choice.usage.prompt_tokens
                            now_s = engine.manager.now_s()
                            part.prompt_progress = progress_of(generation, choice, processed, now_s)
                        await exchange.send_events(event(part))
                if rules.ended:
                    break
            last = _whole(engine, generation, rules, [] if body.stream else ids, body)
            if body.stream:
                last.content = ""
            last.warnings = warnings or UNSET
            answer: Any = last
            if body.response_fields:
                answer = chosen_fields(msgspec.to_builtins(last), body.response_fields)
            if body.stream:
                await exchange.end_events(event(answer))
            else:
                await exchange.send_json(answer)


def _part(choice: Choice, text: str, ids: list[int], body: LlamaFields) -> LlamaBody:
    usage = choice.usage
    return LlamaBody(
        content=text,
        tokens=ids if body.return_tokens else [],
        stop=False,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
    )


def _whole(
    engine: Engine, generation: Generation, rules: LineRules, ids: list[int], body: LlamaFields
) -> LlamaBody:
    [choice] = generation.choices
    sampling, usage, finish = generation.request.sampling, usage_of(generation), choice.finish
    stop_type = "limit"
    if finish is None or finish.kind is FinishKind.ABORT:
        stop_type = "limit" if rules.ended else "none"
    elif finish.kind is FinishKind.STOP and not (rules.ended or choice.warm_up):
        stop_type = "word" if isinstance(finish.matched, str) else "eos"
    settings = settings_of(sampling) | {"seed": choice.seed}
    if body.n_predict is not None:
        settings["n_predict"] = body.n_predict
    return LlamaBody(
        content=rules.text,
        tokens=ids if body.return_tokens else [],
        stop=True,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        model=engine.served_model,
        generation_settings=settings,
        prompt=engine.tokenizer.decode(choice.prompt_ids.tolist(), skip_special_tokens=False),
        has_new_line="\n" in rules.text,
        truncated=False,
        stop_type=stop_type,
        stopping_word=str(finish.matched) if finish is not None and stop_type == "word" else "",
        tokens_cached=usage.prompt_tokens + usage.completion_tokens,
        timings=timings_of(generation),
    )


def settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """The sampling parameters of an answer without a limit of its own, under llama-server's names."""
    numbers = {name: getattr(sampling, name) for name, _, _ in NUMBERS}
    return numbers | {"seed": -1, "n_predict": NO_LIMIT, "stop": list(sampling.stop)}


def chosen_fields(body: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The values at these paths, such as `timings/prompt_n`, without those that are not there; warnings stay."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = body
        for key in path.split("/"):
            value = value.get(key, UNSET) if isinstance(value, dict) else UNSET
        if value is not UNSET:
            found[path] = value
    return found | {name: body[name] for name in ("warnings",) if name in body}
