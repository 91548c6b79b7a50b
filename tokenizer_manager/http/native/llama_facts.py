"""`/props`, `/slots`, `/lora-adapters`, `/apply-template` and `/embedding`: the routes of llama-server that generate no
text. A slot is a running request here; it keeps no prompt when it ends, so there are no files of slots.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ....runtime.errors import RequestError
from ...generation import GenerationRequest
from ...pooling.embedding import check_task, embedding_params, prompt_text, with_prompt
from ..endpoints.operations import MAX_LISTED
from ..exchange import Exchange
from ..guards.auth import Caller
from ..openai.chat import read_chat
from ..pooling.run import json_in_parts, most_token_ids, pooled_request, run_pooled
from ..schema.field_policy import NO_EFFECT, FieldPolicy
from ..schema.generation_fields import prompts_of
from ..schema.values import Body, convert, one_of, refused
from ..services import Engine
from .llama_server import DEFAULTS, settings_of
from .llama_wire import (
    AppliedTemplateBody,
    LlamaEmbedding,
    LlamaEmbeddingRequest,
    LoraBody,
    NextToken,
    PropsBody,
    SlotBody,
)

NO_SLOT_FILES: Final = "prompts are cached by their tokens, not by slot; /v1/cache/pins keeps one"
_RUNNING: Final = ("prefill", "decode")
_NORMS: Final = {None: True, -1: False, 2: True}
"""`embd_normalize` -> whether vectors have length 1."""
_EMBEDDING_POLICY: Final = FieldPolicy(LlamaEmbeddingRequest, {}, no_effect=NO_EFFECT)


async def props(exchange: Exchange, engine: Engine) -> None:
    """The model and the settings of the server."""
    special = engine.tokenizer.special_tokens
    slot = _slot(engine, 0, NextToken(has_next_token=False, n_remain=-1, n_decoded=0))
    slot.params = settings_of(DEFAULTS.params())
    await exchange.send_json(
        PropsBody(
            default_generation_settings=slot,
            total_slots=_num_slots(engine),
            model_alias=engine.served_model,
            model_path=engine.source.path,
            modalities={"vision": engine.images.are_seen, "audio": False},
            bos_token=special.get("bos_token", ""),
            eos_token=special.get("eos_token", ""),
            chat_template="" if engine.renderer is None else engine.renderer.template.source,
            build_info=engine.version,
        )
    )


async def slots(exchange: Exchange, engine: Engine) -> None:
    """The running requests of all clients in numbers; `fail_on_no_slot`: 503 if no further one can run."""
    fails = one_of(exchange.query.get("fail_on_no_slot", "0"), ("0", "1"), "fail_on_no_slot") == "1"
    async with exchange.abort_on_disconnect():
        listed = (await engine.manager.control.list_requests(MAX_LISTED)).requests
        running = [each for each in listed if each.phase in _RUNNING]
        num_running = max(len(running), _num_running(engine))
        if fails and num_running >= _num_slots(engine):
            raise RequestError(
                f"{num_running} requests run, which is the limit; retry later, or raise --max-running-requests",
                code="no_slot",
                status=503,
            )
        await exchange.send_json(
            [
                _slot(
                    engine,
                    number,
                    NextToken(
                        has_next_token=True,
                        n_remain=each.max_new_tokens - each.output_len,
                        n_decoded=each.output_len,
                    ),
                    each.prompt_len,
                )
                for number, each in enumerate(running)
            ]
        )


def _slot(engine: Engine, number: int, next_token: NextToken, prompt_len: int | None = None) -> SlotBody:
    """The row of a running request; `prompt_len` None: of no request."""
    return SlotBody(
        id=number,
        n_ctx=engine.manager.capacity.max_model_len,
        speculative=engine.config.scheduler.speculative != "off",
        is_processing=prompt_len is not None,
        n_prompt_tokens=prompt_len or 0,
        next_token=next_token,
    )


def _num_running(engine: Engine) -> int:
    report = engine.manager.engine.report
    return 0 if report is None else report.num_running_reqs


def _num_slots(engine: Engine) -> int:
    return engine.manager.capacity.max_running_requests * engine.manager.engine.num_replicas


async def lora_adapters(exchange: Exchange, engine: Engine) -> None:
    """The LoRA adapters, numbered in the order in which they were loaded."""
    adapters = engine.adapters.adapters
    await exchange.send_json([LoraBody(number, each.spec.path) for number, each in enumerate(adapters)])


async def apply_template(exchange: Exchange, engine: Engine) -> None:
    """The prompt of a chat, which `/completion` can continue."""
    _, request = await engine.read(exchange, lambda body: read_chat(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        request, _ = await engine.prepare(exchange, request)
        assert request.plan is not None
        await exchange.send_json(
            AppliedTemplateBody(prompt=request.plan.prompt, warnings=request.warnings or UNSET)
        )


class _WrittenEmbedding(msgspec.Struct, kw_only=True):
    """`LlamaEmbedding` with a vector that is JSON already, see `json_in_parts`."""

    index: int
    embedding: list[msgspec.Raw]
    warnings: list[str] | UnsetType = UNSET


assert _WrittenEmbedding.__struct_fields__ == LlamaEmbedding.__struct_fields__


class _Checked(NamedTuple):
    """A checked body."""

    generation: GenerationRequest
    warnings: list[str]


async def embedding(exchange: Exchange, engine: Engine) -> None:
    """Vectors of texts, each in a list, as llama-server may have one for each token."""
    made = await engine.read(exchange, lambda body: _read_embedding(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        answer = await run_pooled(exchange, engine, made.generation)
        vectors = await json_in_parts(answer.vectors, lambda _, vector: array("f", vector).tolist())
        rows = [_WrittenEmbedding(index=index, embedding=[each]) for index, each in enumerate(vectors)]
        rows[0].warnings = made.warnings or UNSET
        await exchange.send_json(rows)


def _read_embedding(body: Body, engine: Engine, caller: Caller) -> _Checked:
    warnings = _EMBEDDING_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, LlamaEmbeddingRequest)
    engine.check_model(request.model)
    check_task(engine.spec, "embed")
    pooling = engine.spec.pooling
    assert pooling is not None
    if request.embd_normalize not in _NORMS:
        raise refused(
            "embd_normalize",
            f"is {request.embd_normalize}, but it must be 2 (length 1) or -1 (not normalized)",
            "unsupported_value",
        )
    prompts = prompts_of(
        request.content, "content", engine.config.limits, max_prompt_len=most_token_ids(request, engine)
    )
    params = embedding_params(pooling, normalize=_NORMS[request.embd_normalize])
    generation = pooled_request(
        request,
        engine,
        caller,
        with_prompt(prompts, prompt_text(pooling), ""),
        [params] * len(prompts),
        param="content",
        id_prefix="embd",
    )
    return _Checked(generation, warnings)
