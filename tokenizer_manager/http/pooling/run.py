"""`run_pooled`: starts a pooling request and waits for all of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....runtime.errors import RequestError
from ....runtime.messages import FinishKind
from ....runtime.pooling import PoolingParams
from ....runtime.sampling_params import MAX_COUNT
from ...generation import Generation, GenerationRequest, Prompt
from ...pooling.task import POOLING_SAMPLING
from ...scheduling_options import Scheduling, checked_priority, checked_salt, checked_timeout
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.accounting import usage_of
from ..services import Services
from .bodies import PoolingUsage
from .fields import PoolingFields


class PooledAnswer(NamedTuple):
    """The results of a request.

    Attributes:
        id: of the request.
        model: the name of what computed it.
        vectors: float32 bytes of each prompt.
        usage: tokens of all prompts.
    """

    id: str
    model: str
    vectors: list[bytes]
    usage: PoolingUsage


def pooled_request(
    fields: PoolingFields,
    services: Services,
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
    scheduling = Scheduling(
        priority=checked_priority(fields.priority),
        tenant=caller.tenant(fields.user),
        extra_key=caller.namespace(checked_salt(fields.cache_salt)),
        queue_timeout_s=checked_timeout(fields.queue_timeout, "queue_timeout"),
        timeout_s=checked_timeout(fields.timeout, "timeout"),
        replica=fields.data_parallel_rank,
        owner=caller.owner,
    )
    return GenerationRequest(
        prompts=prompts,
        sampling=POOLING_SAMPLING,
        id_prefix=id_prefix,
        scheduling=services.with_adapter(scheduling, fields.model, fields.lora_path),
        add_special_tokens=add_special_tokens,
        prompt_param=param,
        poolings=poolings,
        truncate_len=fields.truncate_len(),
        num_kept_tokens=num_kept_tokens,
    )


def most_token_ids(fields: PoolingFields, services: Services) -> int:
    """Token ids that an input may have: any number if the request wants longer ones to be cut."""
    return services.manager.capacity.max_model_len if fields.truncate_len() is None else MAX_COUNT


async def run_pooled(exchange: Exchange, services: Services, request: GenerationRequest) -> PooledAnswer:
    """Start a request and wait for its results; call it where a disconnect cancels.

    Raises:
        EngineError: a prompt failed, or the request is refused.
    """
    generation = await services.start(exchange, request)
    vectors = [b""] * len(generation.choices)
    with generation:
        async for rows in generation:
            for row in rows:
                row.choice.read(row.output)
                finish = row.output.finish
                if finish is not None and finish.kind is FinishKind.ABORT:
                    raise RequestError("the request was aborted; send it again", code="aborted", status=409)
                vectors[row.choice.index] = row.output.vector
    model = request.scheduling.served_as or services.served_model
    return PooledAnswer(generation.id, model, vectors, _usage(generation))


def _usage(generation: Generation) -> PoolingUsage:
    usage = usage_of(generation)
    return PoolingUsage(usage.prompt_tokens, usage.prompt_tokens, usage.prompt_tokens_details)
