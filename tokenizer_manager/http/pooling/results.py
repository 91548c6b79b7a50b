"""`json_in_parts` and `scores_in_parts`: the vectors of thousands of inputs as a response, without blocking the loop.

2,048 vectors of 4,096 numbers take a second; other requests are answered in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ....models.spec.pooling_spec import PoolingSpec
from ...pooling.scoring import ScoredInputs, scores_of

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
