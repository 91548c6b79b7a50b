"""`POST /v1/embeddings`, as OpenAI has it."""

from __future__ import annotations

import base64
import time
from array import array
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ...generation import GenerationRequest
from ...pooling.embedding import check_task, embedding_params, prompt_text, with_prompt
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.generation_fields import prompts_of
from ..schema.values import Body, convert
from ..services import Engine
from .run import json_in_parts, most_token_ids, pooled_request, run_pooled
from .wire import EMBEDDINGS_POLICY, Embedding, EmbeddingsBody, EmbeddingsRequest, PoolingUsage


async def embeddings(exchange: Exchange, engine: Engine) -> None:
    """Vectors of texts."""
    made = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        answer = await run_pooled(exchange, engine, made.generation)
        data = await json_in_parts(answer.vectors, _base64 if made.as_base64 else _floats)
        body = _WrittenBody(
            id=answer.id,
            created=int(time.time()),
            model=answer.model,
            data=data,
            usage=answer.usage,
            warnings=made.warnings or UNSET,
        )
        await exchange.send_json(body)


class _WrittenBody(msgspec.Struct, kw_only=True):
    """`EmbeddingsBody` with vectors that are JSON already: thousands are encoded in parts, between other work."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[msgspec.Raw]
    usage: PoolingUsage
    warnings: list[str] | UnsetType = UNSET


assert _WrittenBody.__struct_fields__ == EmbeddingsBody.__struct_fields__


class _Checked(NamedTuple):
    """A checked body."""

    generation: GenerationRequest
    as_base64: bool
    warnings: list[str]


def _read(body: Body, engine: Engine, caller: Caller) -> _Checked:
    warnings = EMBEDDINGS_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, EmbeddingsRequest)
    engine.check_model(request.model)
    check_task(engine.spec, "embed")
    pooling = engine.spec.pooling
    assert pooling is not None
    prompts = prompts_of(
        request.input, "input", engine.config.limits, max_prompt_len=most_token_ids(request, engine)
    )
    text = prompt_text(pooling, prompt_name=request.prompt_name, input_type=request.input_type)
    asked = "prompt_name" if request.prompt_name else "input_type" if request.input_type else ""
    params = embedding_params(pooling, dimensions=request.dimensions, normalize=request.normalize)
    generation = pooled_request(
        request,
        engine,
        caller,
        with_prompt(prompts, text, asked),
        [params] * len(prompts),
        param="input",
        id_prefix="embd",
        add_special_tokens=request.add_special_tokens is not False,
    )
    return _Checked(generation, request.encoding_format == "base64", warnings)


def _floats(index: int, vector: bytes) -> Embedding:
    return Embedding(index, array("f", vector).tolist())


def _base64(index: int, vector: bytes) -> Embedding:
    return Embedding(index, base64.b64encode(vector).decode())
