"""`POST /v1/rerank`, `/rerank` and `/v2/rerank`, in the form of Jina and Cohere."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import UNSET

from ....runtime.errors import RequestError
from ....runtime.request_checks import check_integer
from ....runtime.sampling_params import MAX_COUNT
from ...pooling.embedding import check_ranking
from ..exchange import Exchange
from ..schema.values import Body, check_limit, convert, show
from ..services import Engine
from .run import score_pairs
from .wire import RERANK_POLICY, Ranked, RankedText, RerankBody, RerankRequest


async def rerank(exchange: Exchange, engine: Engine) -> None:
    """Documents by their relevance to a query."""
    made = await engine.read(exchange, lambda body: _read(body, engine))
    request, documents = made.request, made.documents
    async with exchange.abort_on_disconnect():
        scored = await score_pairs(
            exchange,
            engine,
            request,
            [(request.query, document) for document in documents],
            param="documents",
            id_prefix="rerank",
            instruction=request.instruction,
        )
        results = [
            Ranked(index, score, RankedText(documents[index]) if made.with_documents else UNSET)
            for index, (score, *_) in enumerate(scored.scores)
        ]
        results.sort(key=lambda ranked: (-ranked.relevance_score, ranked.index))
        body = RerankBody(
            id=scored.id,
            model=scored.model,
            results=results[: request.top_n or len(results)],
            usage=scored.usage,
            warnings=made.warnings or UNSET,
        )
        await exchange.send_json(body)


class _Checked(NamedTuple):
    """A checked body."""

    request: RerankRequest
    documents: list[str]
    with_documents: bool
    warnings: list[str]


def _read(body: Body, engine: Engine) -> _Checked:
    warnings = RERANK_POLICY.check(body, strict=engine.config.server.strict)
    request = convert(body, RerankRequest)
    engine.check_model(request.model)
    check_ranking(engine.spec, "/v1/score")
    check_limit(
        "documents", len(request.documents), "documents", engine.config.limits.max_prompts, "max_prompts"
    )
    if not request.documents:
        raise RequestError("documents is empty; send at least one", param="documents", code="invalid_value")
    documents = [_text_of(document, f"documents[{i}]") for i, document in enumerate(request.documents)]
    if request.top_n is not None:
        check_integer("top_n", request.top_n, 0, MAX_COUNT)
    if request.max_tokens_per_doc is not None:
        if request.truncate_prompt_tokens is not None:
            raise RequestError(
                "max_tokens_per_doc is another name of truncate_prompt_tokens; send one of them",
                param="max_tokens_per_doc",
                code="invalid_value",
            )
        request.truncate_prompt_tokens = check_integer(
            "max_tokens_per_doc", request.max_tokens_per_doc, 1, MAX_COUNT
        )
    return _Checked(request, documents, bool(request.return_documents), warnings)


def _text_of(document: Any, param: str) -> str:
    match document:
        case str():
            return document
        case {"text": str(text)}:
            return text
    raise RequestError(
        f"{param} is {show(document)}, but it must be a string, or an object with a string under text",
        param=param,
        code="invalid_type",
    )
