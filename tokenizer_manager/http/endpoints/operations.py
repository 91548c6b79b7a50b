"""The operators' endpoints: `/health`, `/health_generate`, `/server_info`, `/metrics`, the list of models, the live
requests and their explanations, `/abort_request` and `/flush_cache`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from msgspec import UNSET

from ....runtime.adapter_spec import LoadedAdapter
from ....runtime.config.config_fields import SECRETS, config_fields
from ....runtime.config.engine_config import EngineConfig
from ....runtime.errors import RequestError
from ....runtime.messages import LiveRequest, base_rid
from ....runtime.sampling_defaults import NAMES, OPENAI_SOURCE
from ...conversation.detection import AnswerFormats
from ...engine_state import EngineState
from ...generation import GenerationRequest
from ...pooling.embedding import POOLING_SAMPLING, probe_of
from ...scheduling_options import MAX_PRIORITY, Scheduling
from ...telemetry.instruments import CONTENT_TYPE
from ..delivery import collect
from ..exchange import Exchange
from ..schema.field_policy import FieldPolicy
from ..schema.values import convert, show
from ..services import Engine, ServerFacts, Services
from .wire import (
    AbortBody,
    AbortedBody,
    CodexEffortBody,
    CodexModelBody,
    FlushedBody,
    HealthBody,
    LiveRequestBody,
    LiveRequestsBody,
    ModelBody,
    ModelsBody,
    ReplicaBody,
    SamplingDefaultsBody,
    ServerInfoBody,
    WhyBody,
    WorldSizeBody,
)
from .worker import internal_states, tokenizer_path

MODELS_PATH: Final = "/v1/models"
REQUESTS_PATH: Final = "/v1/requests"
_CODEX_OUTPUT_BYTES: Final = 10_000
_CODEX_INSTRUCTIONS: Final = (
    "You are a coding agent that works in a terminal, in the user's workspace. Use the tools to read files, to run "
    "commands and to change files; do not guess what a command or a file would say. Keep changes small, follow the "
    "style of the code around them, and check them by running what the project has for that. Go on until the task is "
    "done, then say in a few sentences what you changed and what you saw. Ask only what the workspace cannot tell."
)
_HEALTH_GENERATE_TIMEOUT_S: Final = 30.0
_MAX_ID_CHARS: Final = 128
MAX_LISTED: Final = 256
"""The most requests that `live_requests` lists; a screen has fewer lines."""
_ABORT_POLICY: Final = FieldPolicy(AbortBody, {})


async def health(exchange: Exchange, engine: Engine) -> None:
    """200 if requests sent now are expected to work; cheap, no generation."""
    _check_healthy(engine)
    await exchange.send_json(HealthBody("ok" if engine.manager.engine.pause is None else "paused"))


async def health_generate(exchange: Exchange, engine: Engine) -> None:
    """200 if one token could be generated, or one vector made."""
    _check_healthy(engine)
    if engine.manager.engine.pause is not None:
        await exchange.send_json(HealthBody("paused"))
        return
    pooling = probe_of(engine.spec)
    request = GenerationRequest(
        prompts=[[0]],
        sampling=POOLING_SAMPLING,
        poolings=() if pooling is None else (pooling,),
        id_prefix="health",
        scheduling=Scheduling(priority=MAX_PRIORITY + 1),
        probe=True,
    )
    try:
        async with exchange.abort_on_disconnect(), asyncio.timeout(_HEALTH_GENERATE_TIMEOUT_S):
            with await engine.manager.start(request) as generation:
                await collect(generation)
            await exchange.send_json(HealthBody())
    except TimeoutError:
        raise _unhealthy(f"no token came within {_HEALTH_GENERATE_TIMEOUT_S:g} s") from None


async def metrics(exchange: Exchange, services: Services) -> None:
    """The metrics in Prometheus' text format."""
    engine = services.manager.engine
    page = services.metrics.render(
        engine.report,
        healthy=engine.unhealthy_reason() is None,
        replicas=[
            (report, engine.reason_against(number) is None) for number, report in enumerate(engine.reports)
        ],
    )
    await exchange.send_bytes(page.encode(), CONTENT_TYPE.encode())


async def version(exchange: Exchange, facts: ServerFacts) -> None:
    """The version that runs, and what it computes with."""
    await exchange.send_json(facts.build)


async def server_info(exchange: Exchange, services: Services) -> None:
    """Settings (without keys), capacity, model facts, limits, and the scheduler's latest report."""
    config: dict[str, Any] = msgspec.to_builtins(services.config)
    for name in SECRETS:
        group = config[config_fields()[name].group]
        group[name] = "(set)" if group[name] else None
    config["log"]["log_level"] = services.all_processes.log_level
    report = services.manager.engine.report
    capacity = services.manager.capacity
    mode = services.config.scheduler.disaggregation_mode
    await exchange.send_json(
        ServerInfoBody(
            version=services.version,
            model=services.served_model,
            model_path=services.source.path,
            tokenizer_path=await tokenizer_path(services),
            served_model_name=services.served_model,
            tp_size=services.config.parallel.tp,
            pp_size=services.config.parallel.pp,
            dp_size=1 if mode == "both" else services.config.parallel.dp,
            disaggregation_mode="null" if mode == "both" else mode,
            disaggregation_bootstrap_port=services.config.server.bootstrap_port
            if mode == "prefill"
            else None,
            max_running_requests=capacity.max_running_requests,
            max_total_num_tokens=capacity.num_pages * capacity.page_size,
            config=config,
            capacity=msgspec.structs.asdict(capacity),
            model_spec=services.spec,
            limits=services.config.limits,
            num_live_requests=len(services.manager.request_log),
            scheduler=None if report is None else report.flat(),
            replicas=_replicas(services.manager.engine),
            internal_states=internal_states(services),
            vllm_config=_as_vllm(services) if exchange.query.get("config_format") == "json" else UNSET,
        )
    )


def _as_vllm(services: Services) -> dict[str, Any]:
    """The settings that trainers read, under vLLM's names; no engine for the transfer of weights is there."""
    config = services.config
    lora = {
        "max_lora_rank": config.adapters.max_lora_rank,
        "max_loras": config.scheduler.max_loras_per_batch,
    }
    return {
        "model_config": {
            "dtype": f"torch.{config.model.dtype}",
            "max_model_len": services.manager.capacity.max_model_len,
        },
        "parallel_config": {
            "tensor_parallel_size": config.parallel.tp,
            "pipeline_parallel_size": config.parallel.pp,
            "data_parallel_size": config.parallel.dp,
        },
        "lora_config": lora if config.adapters.is_enabled else None,
        "weight_transfer_config": None,
    }


async def world_size(exchange: Exchange, services: Services) -> None:
    """The number of ranks; `include_dp=false`: of one replica."""
    parallel = services.config.parallel
    include_dp = exchange.query.get("include_dp", "true").lower() not in ("false", "0")
    await exchange.send_json(WorldSizeBody(parallel.tp * parallel.pp * (parallel.dp if include_dp else 1)))


def _owner(config: EngineConfig) -> str:
    """smg takes an engine's kind from it, and only to SGLang's it names a room, or a replica with `--dp-aware`."""
    mode = config.scheduler.disaggregation_mode
    speaks_as_sglang = mode in ("prefill", "decode") or (mode == "null" and config.parallel.dp > 1)
    return "sglang" if speaks_as_sglang else "engine"


def _replicas(engine: EngineState) -> list[ReplicaBody]:
    """Reports of several replicas; empty for a single one, whose report is the server's."""
    if engine.num_replicas == 1:
        return []
    return [
        ReplicaBody(
            replica=number,
            reason=engine.reason_against(number),
            scheduler=None if report is None else report.flat(),
        )
        for number, report in enumerate(engine.reports)
    ]


async def models(exchange: Exchange, engine: Engine) -> None:
    """The model, and its LoRA adapters."""
    adapters = [_adapter_model(engine, adapter) for adapter in engine.adapters.adapters]
    data = [_model(engine), *adapters]
    chats = engine.spec.pooling is None and engine.renderer is not None
    codex = [_codex_model(each, engine.planner.formats) for each in data] if chats else []
    await exchange.send_json(ModelsBody(data=data, models=codex))


async def model(exchange: Exchange, engine: Engine) -> None:
    """One model by name. A name may have slashes, so the whole path after `/v1/models/` is the name."""
    name = exchange.path.removeprefix(f"{MODELS_PATH}/")
    engine.check_model(name)
    adapter = engine.adapters.find(name)
    await exchange.send_json(_model(engine) if adapter is None else _adapter_model(engine, adapter))


async def why(exchange: Exchange, services: Services) -> None:
    """Reason why a request waited, was chunked, retracted or missed the cache: a sentence and a table."""
    request_id = exchange.path.removeprefix(f"{REQUESTS_PATH}/").removesuffix("/why")
    if len(request_id) > _MAX_ID_CHARS:
        raise _unknown_request(f"{request_id[:_MAX_ID_CHARS]}…")
    if exchange.caller.isolated:  # the answer reveals prefixes of other tenants
        services.authorizer.check_admin(exchange.caller, exchange.path)
    async with exchange.abort_on_disconnect():
        answer = await services.manager.control.explain(request_id)
        if not answer.found:
            raise _unknown_request(request_id)
        await exchange.send_json(
            WhyBody(id=request_id, sentence=answer.sentence, columns=answer.columns, rows=answer.rows)
        )


async def live_requests(exchange: Exchange, services: Services) -> None:
    """The state of the live requests in numbers, without their texts."""
    async with exchange.abort_on_disconnect():
        manager = services.manager
        answer = await manager.control.list_requests(MAX_LISTED)
        listed = [_live_request(each, manager.request_log.ttft_s(each.rid)) for each in answer.requests]
        await exchange.send_json(
            LiveRequestsBody(total=answer.total, last_pass=answer.last_pass, data=listed)
        )


async def abort_request(exchange: Exchange, services: Services) -> None:
    """Abort requests; their clients get the text so far, with `finish_reason` abort. Unknown ids are no error."""
    body = await services.read_object(exchange)
    warnings = _ABORT_POLICY.check(body, strict=services.config.server.strict)
    request = convert(body, AbortBody)
    if not request.rid and not request.abort_all:
        raise RequestError(
            "rid is missing; send the id of an answer, or abort_all: true", param="rid", code="missing_field"
        )
    caller = exchange.caller
    if request.abort_all:
        services.authorizer.check_admin(caller, "abort_all")
    num_aborted = services.manager.abort(
        None if request.abort_all else request.rid,
        "aborted by request",
        owner=None if caller.admin else caller.owner,
    )
    await exchange.send_json(AbortedBody(aborted=num_aborted, warnings=warnings or UNSET))


async def flush_cache(exchange: Exchange, engine: Engine) -> None:
    """Empty the prefix cache and its tiers, or the one that `tier` names."""
    await _flush(exchange, engine, exchange.query.get("tier", ""))


async def clear_storage(exchange: Exchange, engine: Engine) -> None:
    """Empty the tier that outlives the process, as SGLang's clients ask."""
    await _flush(exchange, engine, engine.config.cache.kv_tier or "disk")


async def _flush(exchange: Exchange, engine: Engine, only: str) -> None:
    """Empty one of the tiers, or all; answered by the tokens of the KV pool."""
    cache = engine.config.cache
    tiers = ["device", *(["host"] if cache.kv_host_size else []), *([cache.kv_tier] if cache.kv_tier else [])]
    if only and only not in tiers:
        message = (
            f"tier is {show(only)}, but this server has {' and '.join(tiers)}; leave it out to flush all"
        )
        raise RequestError(message, param="tier", code="invalid_value")
    done = await engine.manager.control.flush_cache(
        device=only in ("", "device"), tier=only in ("", cache.kv_tier), host=only in ("", "host")
    )
    if done.error:
        message = (
            f"{done.flushed_tokens} tokens of the KV pool are flushed, but the {engine.config.cache.kv_tier} may have "
            f"some of them after a crash: {done.error}; flush again when it answers"
        )
        raise RequestError(message, code="not_flushed", status=503)
    await exchange.send_json(FlushedBody(done.flushed_tokens, done.kept_tokens, not done.kept_tokens))


def _model(engine: Engine) -> ModelBody:
    pooling = engine.spec.pooling
    return ModelBody(
        owned_by=_owner(engine.config),
        id=engine.served_model,
        created=engine.created_s,
        max_model_len=engine.manager.capacity.max_model_len,
        task="generate" if pooling is None else pooling.task,
        embedding_size=UNSET if pooling is None or pooling.task != "embed" else pooling.size,
        sampling_defaults=_sampling_defaults(engine) if pooling is None else UNSET,
    )


def _codex_model(model: ModelBody, formats: AnswerFormats) -> CodexModelBody:
    efforts = ("low", "medium", "high") if "reasoning_effort" in formats.variables else ()
    return CodexModelBody(
        slug=model.id,
        display_name=model.id,
        supported_reasoning_levels=[CodexEffortBody(effort, f"{effort} effort") for effort in efforts],
        base_instructions=_CODEX_INSTRUCTIONS,
        supports_reasoning_summaries=formats.reasoning is not None,
        truncation_policy={"mode": "bytes", "limit": _CODEX_OUTPUT_BYTES},
        context_window=model.max_model_len,
    )


def _adapter_model(engine: Engine, adapter: LoadedAdapter) -> ModelBody:
    return msgspec.structs.replace(
        _model(engine), id=adapter.spec.name, root=adapter.spec.path, parent=engine.served_model
    )


def _sampling_defaults(facts: ServerFacts) -> SamplingDefaultsBody:
    defaults = facts.sampling_defaults
    params = defaults.params()
    return SamplingDefaultsBody(
        **{name: getattr(params, name) for name in NAMES},
        source=defaults.source or OPENAI_SOURCE,
    )


def _live_request(request: LiveRequest, ttft_s: float | None) -> LiveRequestBody:
    return LiveRequestBody(
        id=base_rid(request.rid),  # the id for /abort_request and /why
        phase=request.phase,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.output_len,
        max_tokens=request.max_new_tokens,
        age_s=round(request.age_s, 4),
        ttft_s=ttft_s,
        num_retractions=request.num_retractions,
        priority=request.priority,
        reason=request.reason,
        why=request.why,
        need=request.need,
        have=request.have,
        service_tier="flex" if request.background else "default",
    )


def _unknown_request(request_id: str) -> RequestError:
    return RequestError(
        f"nothing is remembered of the request {request_id!r}; use the id of an answer, or of one of its choices, "
        f"soon after the answer",
        code="request_not_found",
        status=404,
    )


def _check_healthy(engine: Engine) -> None:
    reason = engine.manager.engine.unhealthy_reason()
    if reason is not None:
        raise _unhealthy(reason)


def _unhealthy(reason: str) -> RequestError:
    return RequestError(f"unhealthy: {reason}", code="unhealthy", status=503)
