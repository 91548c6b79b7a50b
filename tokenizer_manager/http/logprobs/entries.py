"""`TokenLogprob`: the log-probabilities of one token, as the engine's messages have them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from ....runtime.transport.message_base import Logprobs

_IMPOSSIBLE: Final = -9999.0  # JSON has no infinity; OpenAI writes this


class TokenLogprob(NamedTuple):
    """One token, its log-probability, and the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def unpack(logprobs: Logprobs, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """The entries of `logprobs`, which belong to `token_ids`."""
    own, top_ids, top_values = array("f"), array("i"), array("f")
    own.frombytes(logprobs.token_logprobs)
    top_ids.frombytes(logprobs.top_ids)
    top_values.frombytes(logprobs.top_logprobs)
    k = logprobs.top_k
    return [
        TokenLogprob(
            token_id,
            _finite(logprob),
            [(top_ids[j], _finite(top_values[j])) for j in range(i * k, (i + 1) * k)],
        )
        for i, (token_id, logprob) in enumerate(zip(token_ids, own, strict=True))
    ]


def int32s(data: bytes) -> array[int]:
    """Token ids of a message."""
    ids = array("i")
    ids.frombytes(data)
    return ids


def _finite(value: float) -> float:
    return max(value, _IMPOSSIBLE) if math.isfinite(value) else _IMPOSSIBLE
