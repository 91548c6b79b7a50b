"""Pooling requests: started, awaited, scored, and written in parts that do not block the event loop.

2,048 vectors of 4,096 numbers take a second to encode; other requests are answered in between.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from ....models.spec.encoder_spec import PoolingSpec
from ....runtime.errors import RequestError
from ....runtime.feasibility import longest_input
from ....runtime.messages import FinishKind
from ....runtime.pooling import PoolingParams
from ....runtime.sampling_params import MAX_COUNT
from ...generation import Generation, GenerationRequest, Prompt
from ...pooling.embedding import POOLING_SAMPLING, check_instruction, check_task
from ...pooling.scoring import Pair, ScoredInputs, joined_inputs, scores_of, text_inputs, uses_pairs
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.accounting import usage_of
from ..services import Engine
from .wire import PoolingFields, PoolingUsage


class PooledAnswer(NamedTuple):
    """The results of a request.

    Attributes:
        id: of the request.
        model: the name of what computed it.
        vectors: float32 bytes of each prompt.
        usage: tokens of all prompts.
        prompt_ids: [prompt_len] int32 of each prompt.
    """

    id: str
    model: str
    vectors: list[bytes]
    usage: PoolingUsage
    prompt_ids: list[array[int]]


def pooled_request(
    fields: PoolingFields,
    engine: Engine,
    caller: Caller,
    prompts: Sequence[Prompt],
    poolings: Sequence[PoolingParams],
    *,
    param: str,
    id_prefix: str,
    add_special_tokens: bool = True,
    num_kept_tokens: int = 0,
) -> GenerationRequest:
    """The request of checked fields.

    Args:
        prompts: of each result.
        poolings: of each prompt.
        param: the field that errors name.
        id_prefix: first part of the request's id.
        add_special_tokens: whether tokenization adds special tokens to texts.
        num_kept_tokens: see `ScoredInputs`.

    Raises:
        RequestError: a scheduling option is out of range.
    """
    return GenerationRequest(
        prompts=prompts,
        sampling=POOLING_SAMPLING,
        id_prefix=id_prefix,
        scheduling=engine.with_adapter(caller.scheduling(fields), fields.model, fields.lora_path),
        add_special_tokens=add_special_tokens,
        prompt_param=param,
        poolings=poolings,
        truncate_len=fields.truncate_len(),
        num_kept_tokens=num_kept_tokens,
    )


def most_token_ids(fields: PoolingFields, engine: Engine) -> int:
    """Token ids that an input may have: any number if the request wants longer ones to be cut."""
    return engine.manager.capacity.max_model_len if fields.truncate_len() is None else MAX_COUNT


async def run_pooled(exchange: Exchange, engine: Engine, request: GenerationRequest) -> PooledAnswer:
    """Start a request and wait for its results; call it where a disconnect cancels.

    Raises:
        EngineError: a prompt failed, or the request is refused.
    """
    generation = await engine.start(exchange, request)
    vectors = [b""] * len(generation.choices)
    with generation:
        async for rows in generation:
            for row in rows:
                row.choice.read(row.output)
                finish = row.output.finish
                if finish is not None and finish.kind is FinishKind.ABORT:
                    raise RequestError("the request was aborted; send it again", code="aborted", status=409)
                vectors[row.choice.index] = row.output.vector
    model = request.scheduling.served_as or engine.served_model
    prompt_ids = [choice.prompt_ids for choice in generation.choices]
    return PooledAnswer(generation.id, model, vectors, _usage(generation), prompt_ids)


def _usage(generation: Generation) -> PoolingUsage:
    usage = usage_of(generation)
    return PoolingUsage(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details)


NUMBERS_AT_ONCE: Final = 64 << 10
"""Handled between two turns of the event loop: 5 ms."""
_encoder: Final = msgspec.json.Encoder()


async def json_in_parts(vectors: Sequence[bytes], form: Callable[[int, bytes], object]) -> list[msgspec.Raw]:
    """The JSON of each vector.

    Args:
        vectors: float32 bytes of each result.
        form: index and vector -> what is written.
    """
    parts: list[msgspec.Raw] = []
    num_numbers = 0
    for index, vector in enumerate(vectors):
        parts.append(msgspec.Raw(_encoder.encode(form(index, vector))))
        num_numbers += len(vector) // 4
        if num_numbers >= NUMBERS_AT_ONCE:
            num_numbers = 0
            await asyncio.sleep(0)
    return parts


async def scores_in_parts(
    pooling: PoolingSpec, inputs: ScoredInputs, vectors: Sequence[bytes]
) -> list[list[float]]:
    """Turn the classifier's outputs into scores, input by input; other tasks run in between."""
    num_pairs = max(1, NUMBERS_AT_ONCE // max(1, pooling.size))
    scores: list[list[float]] = []
    for start in range(0, len(inputs.pairs), num_pairs):
        if start:
            await asyncio.sleep(0)
        scores += scores_of(pooling, inputs._replace(pairs=inputs.pairs[start : start + num_pairs]), vectors)
    return scores


class ScoredPairs(NamedTuple):
    """The scores of a request's pairs.

    Attributes:
        id: of the request.
        model: the name of what computed it.
        scores: of each pair: one number, or one per label of a classifier.
        usage: tokens of all prompts.
    """

    id: str
    model: str
    scores: list[list[float]]
    usage: PoolingUsage


async def score_pairs(
    exchange: Exchange,
    engine: Engine,
    fields: PoolingFields,
    pairs: Sequence[Pair],
    *,
    param: str,
    id_prefix: str,
    instruction: str | None = None,
) -> ScoredPairs:
    """Score pairs; call it where a disconnect cancels.

    Args:
        fields: the request.
        param: the field of the second texts, which errors name.
        instruction: what makes a document relevant, for models that take one.

    Raises:
        EngineError: a pair failed, or the request is refused.
    """
    check_task(engine.spec, "score")
    pooling = engine.spec.pooling
    assert pooling is not None
    check_instruction(pooling, instruction)
    if uses_pairs(pooling):
        limit, max_len = fields.truncate_len(), longest_input(engine.manager.capacity)
        most = None if limit is None else max_len if limit < 0 else min(limit, max_len)
        inputs = joined_inputs(pooling, await engine.encoder.encode_pairs(pairs, most))
    else:
        inputs = text_inputs(pooling, engine.tokenizer, pairs, instruction)
    request = pooled_request(
        fields,
        engine,
        exchange.caller,
        inputs.prompts,
        inputs.poolings,
        param=param,
        id_prefix=id_prefix,
        add_special_tokens=inputs.add_special_tokens,
        num_kept_tokens=inputs.num_kept_tokens,
    )
    try:
        answer = await run_pooled(exchange, engine, request)
    except RequestError as error:
        raise inputs.located(error, param) from None
    scores = await scores_in_parts(pooling, inputs, answer.vectors)
    return ScoredPairs(answer.id, answer.model, scores, answer.usage)
