"""`PoolingParams`: what a request without generated text asks for: a vector, scores, or probabilities of labels.

Such a request computes its prompt and nothing else (prefill-only). It takes the same queue as a generation, and is
answered by one row with `vector`. How a model makes the vector is in its `PoolingSpec`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

import msgspec
from msgspec import structs


class PoolingKind(enum.StrEnum):
    """Kind of the result of a pooling request.

    EMBED: the text's vector, as the model's `PoolingSpec` says. SCORE: the outputs of the model's classification head,
    before any activation. LABELS: log-probabilities of some tokens as the next one.
    """

    EMBED = "embed"
    SCORE = "score"
    LABELS = "labels"


class PoolingParams(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Parameters of a pooling request.

    Attributes:
        kind: see `PoolingKind`.
        all_tokens: the result depends on the final hidden states of all tokens (mean, cls), so the whole prompt is
            computed: no cached prefix is used, and the request's KV is never swapped.
        dimensions: leading numbers of the vector to keep, before it is normalized; 0: all. For EMBED.
        normalize: scale the vector to length 1. For EMBED.
        label_ids: the tokens, at least one. For LABELS.
        second_start: of a pair of texts: position of the first token of the second one, where token types differ; 0:
            there is one text, or the model has no types.
        shared_len: first tokens that all prompts of its call have, below the length of each. For LABELS; 0: there are
            none, or it is the only prompt.
    """

    kind: PoolingKind = PoolingKind.EMBED
    all_tokens: bool = False
    dimensions: int = 0
    normalize: bool = False
    label_ids: tuple[int, ...] = ()
    second_start: int = 0
    shared_len: int = 0


def with_shared_len(poolings: Sequence[PoolingParams], prompts: Sequence[array[int]]) -> list[PoolingParams]:
    """The parameters of the prompts of one call; requests for labels get `shared_len`.

    Args:
        poolings: of each prompt, all of one kind.
        prompts: int32 token ids, none empty.
    """
    if len(poolings) < 2 or poolings[0].kind is not PoolingKind.LABELS:
        return list(poolings)
    # All others are between these two, so they have what these have in common.
    ends = min(prompts, key=array.tobytes), max(prompts, key=array.tobytes)
    shared_len = min(map(len, prompts)) - 1
    differs = (position for position, (a, b) in enumerate(zip(*ends, strict=False)) if a != b)
    shared_len = min(shared_len, next(differs, shared_len))
    return [structs.replace(each, shared_len=shared_len) for each in poolings]
