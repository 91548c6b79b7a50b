"""`score_pairs`: the scores of pairs of texts, by whichever way the served model has; for rerank and score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....runtime.errors import RequestError
from ....runtime.feasibility import longest_input
from ...pooling.scoring import Pair, joined_inputs, text_inputs, uses_pairs
from ...pooling.task import check_instruction, check_task
from ..exchange import Exchange
from ..services import Services
from .bodies import PoolingUsage
from .fields import PoolingFields
from .results import scores_in_parts
from .run import pooled_request, run_pooled


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
    services: Services,
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
    check_task(services.spec, "score")
    pooling = services.spec.pooling
    assert pooling is not None
    check_instruction(pooling, instruction)
    if uses_pairs(pooling):
        limit, max_len = fields.truncate_len(), longest_input(services.manager.capacity)
        most = None if limit is None else max_len if limit < 0 else min(limit, max_len)
        inputs = joined_inputs(pooling, await services.encoder.encode_pairs(pairs, most))
    else:
        inputs = text_inputs(pooling, services.tokenizer, pairs, instruction)
    request = pooled_request(
        fields,
        services,
        exchange.caller,
        inputs.prompts,
        inputs.poolings,
        param=param,
        id_prefix=id_prefix,
        add_special_tokens=inputs.add_special_tokens,
        num_kept_tokens=inputs.num_kept_tokens,
    )
    try:
        answer = await run_pooled(exchange, services, request)
    except RequestError as error:
        raise inputs.located(error, param) from None
    scores = await scores_in_parts(pooling, inputs, answer.vectors)
    return ScoredPairs(answer.id, answer.model, scores, answer.usage)
