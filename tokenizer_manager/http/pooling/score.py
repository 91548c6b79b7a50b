"""`POST /v1/score`: scores of pairs (as in vLLM), and of labels as the next token of items (as in SGLang)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from msgspec import UNSET

from ....runtime.errors import RequestError
from ...generation import Prompt
from ...pooling.embedding import check_task
from ...pooling.scoring import Pair, label_id, label_inputs, label_scores
from ..exchange import Exchange
from ..schema.generation_fields import prompts_of
from ..schema.values import Body, check_limit, convert, show
from ..services import Engine
from .run import most_token_ids, pooled_request, run_pooled, score_pairs
from .wire import SCORE_POLICY, Score, ScoreBody, ScoreRequest

_FORMS: Final = "send text_1 and text_2, or queries and documents, or query and items with label_token_ids"
_OF_TEXTS: Final = ("text_1", "text_2")
_OF_QUERIES: Final = ("queries", "documents")
_OF_PAIRS: Final = (*_OF_TEXTS, *_OF_QUERIES, "instruction")
_OF_ITEMS: Final = ("label_token_ids", "labels", "apply_softmax", "item_first")


async def score(exchange: Exchange, engine: Engine) -> None:
    """Scores of pairs, or of labels."""
    made = await engine.read(exchange, lambda body: _read(body, engine))
    async with exchange.abort_on_disconnect():
        await exchange.send_json(await (_of_items if made.items else _of_pairs)(exchange, engine, made))


class _Checked(NamedTuple):
    """A checked body; it has pairs, or items with labels."""

    request: ScoreRequest
    warnings: list[str]
    pairs: Sequence[Pair] = ()
    param: str = ""
    items: Sequence[Prompt] = ()
    label_ids: Sequence[int] = ()


async def _of_pairs(exchange: Exchange, engine: Engine, made: _Checked) -> ScoreBody:
    scored = await score_pairs(
        exchange,
        engine,
        made.request,
        made.pairs,
        param=made.param,
        id_prefix="score",
        instruction=made.request.instruction,
    )
    return ScoreBody(
        id=scored.id,
        created=int(time.time()),
        model=scored.model,
        data=[
            Score(index, scores[0] if len(scores) == 1 else scores)
            for index, scores in enumerate(scored.scores)
        ],
        usage=scored.usage,
        warnings=made.warnings or UNSET,
    )


async def _of_items(exchange: Exchange, engine: Engine, made: _Checked) -> ScoreBody:
    inputs = label_inputs(made.items, made.label_ids)
    request = pooled_request(
        made.request,
        engine,
        exchange.caller,
        inputs.prompts,
        inputs.poolings,
        param="items",
        id_prefix="score",
    )
    answer = await run_pooled(exchange, engine, request)
    return ScoreBody(
        id=answer.id,
        object="scoring",
        created=int(time.time()),
        model=answer.model,
        scores=label_scores(answer.vectors, apply_softmax=bool(made.request.apply_softmax)),
        usage=answer.usage,
        warnings=made.warnings or UNSET,
    )


def _read(body: Body, engine: Engine) -> _Checked:
    warnings = SCORE_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, ScoreRequest)
    engine.check_model(request.model)
    if request.items is not None or request.query is not None:
        _check_unused(request, _OF_PAIRS, "query and items")
        return _read_items(request, engine, warnings)
    check_task(engine.spec, "score")
    _check_unused(request, _OF_ITEMS, "pairs of texts")
    if request.text_1 is not None or request.text_2 is not None:
        _check_unused(request, _OF_QUERIES, "text_1 and text_2")
        names, values = _OF_TEXTS, (request.text_1, request.text_2)
    else:
        names, values = _OF_QUERIES, (request.queries, request.documents)
    first, second = (_texts(value, name) for value, name in zip(values, names, strict=True))
    check_limit(names[1], len(second), "texts", engine.config.limits.max_prompts, "max_prompts")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise RequestError(
            f"{names[0]} has {len(first)} texts and {names[1]} has {len(second)}; send one text for all of them, or "
            "as many",
            param=names[0],
            code="invalid_value",
        )
    return _Checked(request, warnings, list(zip(first, second, strict=True)), names[1])


def _read_items(request: ScoreRequest, engine: Engine, warnings: list[str]) -> _Checked:
    check_task(engine.spec, "labels")
    limits, max_len = engine.config.limits, most_token_ids(request, engine)
    query, *others = prompts_of(request.query, "query", limits, max_prompt_len=max_len)
    if others:
        raise RequestError(
            f"query has {len(others) + 1} texts; send one, and a request for each of the others",
            param="query",
            code="invalid_value",
        )
    items = prompts_of(request.items, "items", limits, max_prompt_len=max_len)
    label_ids = [*(request.label_token_ids or ())]
    label_ids += [label_id(engine.tokenizer, text, "labels") for text in request.labels or ()]
    if not label_ids:
        raise RequestError(
            "label_token_ids is missing; send the tokens to judge, or their texts as labels",
            param="label_token_ids",
            code="missing_field",
        )
    check_limit("label_token_ids", len(label_ids), "labels", limits.max_logit_bias, "max_logit_bias")
    for token_id in label_ids:
        if not 0 <= token_id < engine.spec.vocab_size:
            raise RequestError(
                f"label_token_ids has {token_id}, but ids lie in [0, {engine.spec.vocab_size})",
                param="label_token_ids",
                code="invalid_value",
            )
    join = _join(bool(request.item_first), query)
    return _Checked(request, warnings, items=[join(item) for item in items], label_ids=label_ids)


def _check_unused(request: ScoreRequest, names: Sequence[str], form: str) -> None:
    """Refuse fields that belong to another form of the body; without effect they would be missed."""
    for name in names:
        if getattr(request, name) not in (None, False, "", []):
            raise RequestError(
                f"{name} has no effect on {form}; leave it out, or {_FORMS}", param=name, code="invalid_value"
            )


def _join(item_first: bool, query: Prompt) -> Callable[[Prompt], Prompt]:
    def join(item: Prompt) -> Prompt:
        first, second = (item, query) if item_first else (query, item)
        if isinstance(first, str) and isinstance(second, str):
            return first + second
        if isinstance(first, list) and isinstance(second, list):
            return first + second
        raise RequestError(
            "query and items have different forms; send texts for both, or token ids for both",
            param="items",
            code="invalid_type",
        )

    return join


def _texts(value: object, param: str) -> list[str]:
    """The texts of a field.

    Raises:
        RequestError: missing, empty, or of another type.
    """
    match value:
        case None:
            raise RequestError(f"{param} is missing; {_FORMS}", param=param, code="missing_field")
        case str():
            return [value]
        case []:
            raise RequestError(f"{param} is empty; send at least one text", param=param, code="invalid_value")
        case list() if all(isinstance(text, str) for text in value):
            return value
    raise RequestError(
        f"{param} is {show(value)}, but it must be a string or a list of strings",
        param=param,
        code="invalid_type",
    )
