"""`POST /api/embed`, and the older `POST /api/embeddings`: vectors in the form of Ollama's API."""

from __future__ import annotations

from array import array
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from ...generation import GenerationRequest
from ...pooling.embedding import check_task, embedding_params, prompt_text, with_prompt
from ..exchange import Exchange
from ..guards.auth import Caller
from ..pooling.run import json_in_parts, most_token_ids, pooled_request, run_pooled
from ..pooling.wire import PoolingFields
from ..schema.field_policy import FieldPolicy
from ..schema.field_types import Count, Prompts
from ..schema.generation_fields import prompts_of
from ..schema.values import Body, convert
from ..services import Engine

_NS_PER_S: Final = 1_000_000_000


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /api/embed`."""

    input: Prompts
    model: str | None = None
    truncate: bool | None = None
    dimensions: Count | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None  # accepted, without effect


class OllamaOldEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /api/embeddings`."""

    prompt: str
    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None  # accepted, without effect


class OllamaEmbedBody(msgspec.Struct, kw_only=True):
    """The vectors of all inputs; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int
    warnings: list[str] | UnsetType = UNSET


class _WrittenBody(msgspec.Struct, kw_only=True):
    """`OllamaEmbedBody` with vectors that are JSON already, see `json_in_parts`."""

    model: str
    embeddings: list[msgspec.Raw]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int
    warnings: list[str] | UnsetType = UNSET


assert _WrittenBody.__struct_fields__ == OllamaEmbedBody.__struct_fields__


class OllamaOldEmbedBody(msgspec.Struct):
    """The vector of one prompt."""

    embedding: list[float]


_POLICY: Final = FieldPolicy(OllamaEmbedRequest, {})
_OLD_POLICY: Final = FieldPolicy(OllamaOldEmbedRequest, {})


class _Checked(NamedTuple):
    """A checked body, and the model's name in it."""

    generation: GenerationRequest
    model: str
    warnings: list[str]


async def ollama_embed(exchange: Exchange, engine: Engine) -> None:
    """Vectors of texts; longer ones are cut unless `truncate` is false, as in Ollama."""
    made = await engine.read(exchange, lambda body: _read(body, engine, exchange.caller))
    started_s = engine.manager.now_s()
    async with exchange.abort_on_disconnect():
        answer = await run_pooled(exchange, engine, made.generation)
        body = _WrittenBody(
            model=made.model,
            embeddings=await json_in_parts(answer.vectors, lambda _, vector: array("f", vector).tolist()),
            total_duration=int((engine.manager.now_s() - started_s) * _NS_PER_S),
            prompt_eval_count=answer.usage.prompt_tokens,
            warnings=made.warnings or UNSET,
        )
        await exchange.send_json(body)


async def ollama_embeddings(exchange: Exchange, engine: Engine) -> None:
    """The vector of one prompt."""
    made = await engine.read(exchange, lambda body: _read_old(body, engine, exchange.caller))
    async with exchange.abort_on_disconnect():
        answer = await run_pooled(exchange, engine, made.generation)
        await exchange.send_json(OllamaOldEmbedBody(array("f", answer.vectors[0]).tolist()))


def _read(body: Body, engine: Engine, caller: Caller) -> _Checked:
    warnings = _POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, OllamaEmbedRequest)
    truncate = request.truncate is not False
    return _checked(
        engine, caller, request.model, request.input, "input", request.dimensions, truncate, warnings
    )


def _read_old(body: Body, engine: Engine, caller: Caller) -> _Checked:
    warnings = _OLD_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, OllamaOldEmbedRequest)
    return _checked(engine, caller, request.model, request.prompt, "prompt", None, True, warnings)


def _checked(
    engine: Engine,
    caller: Caller,
    model: str | None,
    value: object,
    param: str,
    dimensions: int | None,
    truncate: bool,
    warnings: list[str],
) -> _Checked:
    engine.check_model(model)
    check_task(engine.spec, "embed")
    pooling = engine.spec.pooling
    assert pooling is not None
    fields = PoolingFields(model=model, truncate=truncate)
    prompts = prompts_of(value, param, engine.config.limits, max_prompt_len=most_token_ids(fields, engine))
    params = embedding_params(pooling, dimensions=dimensions)
    generation = pooled_request(
        fields,
        engine,
        caller,
        with_prompt(prompts, prompt_text(pooling)),
        [params] * len(prompts),
        param=param,
        id_prefix="ollama",
    )
    return _Checked(generation, model or engine.served_model, warnings)
