"""`scheduler_requests`: a request that was admitted as the requests that its choices are to the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from ..runtime.messages import GenerateRequest
from ..runtime.sampling_params import MAX_SEED, SamplingParams
from .generation import Choice, GenerationRequest


def scheduler_requests(
    request: GenerationRequest,
    generation_id: str,
    prompts: Sequence[array[int]],
    resolved: Sequence[SamplingParams],
    *,
    arrival_s: float,
    draw_seed: Callable[[], int],
) -> Iterator[tuple[Choice, GenerateRequest]]:
    """Each choice with its message; choice i of a prompt gets seed + i, and siblings one group.

    Args:
        prompts: [p] the token ids of each.
        resolved: [p] with `max_new_tokens` set.
        draw_seed: for prompts whose request brings none.
    """
    wishes = request.scheduling
    index = 0
    for ids, sampling in zip(prompts, resolved, strict=True):
        seed = sampling.seed if sampling.seed is not None else draw_seed()
        input_ids = ids.tobytes()  # one copy for all n
        # The first sibling's id names the group: nobody else has it.
        group = f"{generation_id}-{index}" if request.n > 1 else ""
        for i in range(request.n):
            choice = Choice(f"{generation_id}-{index}", index, ids, (seed + i) & MAX_SEED)
            index += 1
            yield (
                choice,
                GenerateRequest(
                    rid=choice.rid,
                    input_ids=input_ids,
                    sampling=replace(sampling, seed=choice.seed),
                    arrival_s=arrival_s,
                    priority=wishes.priority,
                    extra_key=wishes.extra_key,
                    tenant=wishes.tenant,
                    group=group,
                    queue_timeout_s=wishes.queue_timeout_s,
                    timeout_s=wishes.timeout_s,
                ),
            )
