"""`POST /classify` and `POST /pooling`, as vLLM has them: the result of the model's head for single texts.

`/classify` names the likeliest label of a classifier; `/pooling` has the numbers alone, of embedders too.
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET

from ....models.spec.encoder_spec import PoolingSpec
from ....models.spec.model_spec import ModelSpec
from ....runtime.errors import RequestError
from ....runtime.pooling import PoolingKind, PoolingParams
from ...generation import GenerationRequest
from ...pooling.embedding import check_task, embedding_params
from ...pooling.scoring import ScoredInputs
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.field_policy import FieldPolicy
from ..schema.generation_fields import prompts_of
from ..schema.values import Body, convert, refused
from ..services import Engine
from .run import PooledAnswer, most_token_ids, pooled_request, run_pooled, scores_in_parts
from .wire import (
    CLASSIFY_POLICY,
    POOLING_POLICY,
    Classification,
    ClassificationsBody,
    ClassifyRequest,
    PooledBody,
    PooledData,
    PoolingRequest,
)


class _Checked(NamedTuple):
    """A checked body."""

    request: ClassifyRequest
    generation: GenerationRequest
    warnings: list[str]


async def classify(exchange: Exchange, engine: Engine) -> None:
    """Probabilities of the labels of texts."""
    made = await engine.read(
        exchange, lambda body: _read(body, engine, exchange.caller, CLASSIFY_POLICY, ClassifyRequest)
    )
    async with exchange.abort_on_disconnect():
        answer = await run_pooled(exchange, engine, made.generation)
        pooling = _pooling(engine)
        scores = await _scores(pooling, made.generation, answer)
        await exchange.send_json(
            ClassificationsBody(
                id=answer.id,
                created=int(time.time()),
                model=answer.model,
                data=[
                    Classification(index, _label(pooling, probs), probs, len(probs))
                    for index, probs in enumerate(scores)
                ],
                usage=answer.usage,
                warnings=made.warnings or UNSET,
            )
        )


async def pooled(exchange: Exchange, engine: Engine) -> None:
    """Vectors or scores of texts."""
    made = await engine.read(
        exchange, lambda body: _read(body, engine, exchange.caller, POOLING_POLICY, PoolingRequest)
    )
    async with exchange.abort_on_disconnect():
        answer = await run_pooled(exchange, engine, made.generation)
        pooling = _pooling(engine)
        results = (
            [array("f", vector) for vector in answer.vectors]
            if pooling.task == "embed"
            else [array("f", scores) for scores in await _scores(pooling, made.generation, answer)]
        )
        as_base64 = isinstance(made.request, PoolingRequest) and made.request.encoding_format == "base64"
        await exchange.send_json(
            PooledBody(
                id=answer.id,
                created=int(time.time()),
                model=answer.model,
                data=[
                    PooledData(
                        index, base64.b64encode(result.tobytes()).decode() if as_base64 else result.tolist()
                    )
                    for index, result in enumerate(results)
                ],
                usage=answer.usage,
                warnings=made.warnings or UNSET,
            )
        )


def _pooling(engine: Engine) -> PoolingSpec:
    pooling = engine.spec.pooling
    assert pooling is not None  # checked by `_read`
    return pooling


async def _scores(
    pooling: PoolingSpec, generation: GenerationRequest, answer: PooledAnswer
) -> list[list[float]]:
    pairs = [(n,) for n in range(len(answer.vectors))]
    inputs = ScoredInputs(list(generation.prompts), list(generation.poolings), pairs)
    return await scores_in_parts(pooling, inputs, answer.vectors)


def _label(pooling: PoolingSpec, probs: Sequence[float]) -> str | None:
    """The name of the likeliest label; None: the model's files have none."""
    best = max(range(len(probs)), key=probs.__getitem__)
    return pooling.labels[best] if best < len(pooling.labels) else None


def _read(
    body: Body, engine: Engine, caller: Caller, policy: FieldPolicy, kind: type[ClassifyRequest]
) -> _Checked:
    """Check a body.

    Raises:
        RequestError: it is refused, or the model does something else.
    """
    warnings = policy.check(body, strict=engine.config.server.strict)
    request = convert(body, kind)
    engine.check_model(request.model)
    params = _params(request, engine.spec)
    prompts = prompts_of(
        request.input, "input", engine.config.limits, max_prompt_len=most_token_ids(request, engine)
    )
    generation = pooled_request(
        request,
        engine,
        caller,
        prompts,
        [params] * len(prompts),
        param="input",
        id_prefix="pool" if isinstance(request, PoolingRequest) else "classify",
        add_special_tokens=request.add_special_tokens is not False,
    )
    return _Checked(request, generation, warnings)


def _params(request: ClassifyRequest, spec: ModelSpec) -> PoolingParams:
    """The parameters of each text.

    Raises:
        RequestError: the model does something else.
    """
    pooling = spec.pooling
    task = "score"
    if isinstance(request, PoolingRequest) and request.task != "classify":
        task = "embed" if request.task == "embed" or pooling is None else pooling.task
    check_task(spec, "embed" if task == "embed" else "score")
    assert pooling is not None
    if task == "embed" and isinstance(request, PoolingRequest):
        return embedding_params(pooling, dimensions=request.dimensions, normalize=request.normalize)
    if pooling.task == "embed" or pooling.label_tokens:
        does = "makes vectors" if pooling.task == "embed" else "judges a query with a document"
        raise RequestError(
            f"this model {does}, and has no labels of single texts; use "
            f"{'/v1/embeddings' if pooling.task == 'embed' else '/v1/score'}, or serve a classifier",
            param="input",
            code="unsupported_task",
        )
    if isinstance(request, PoolingRequest):
        for name in ("dimensions", "normalize"):
            if getattr(request, name) not in (None, False):
                raise refused(name, "has no effect on scores; leave it out")
    return PoolingParams(PoolingKind.SCORE, all_tokens=pooling.pooling != "last")
