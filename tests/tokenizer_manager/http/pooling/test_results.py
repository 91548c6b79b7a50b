"""`json_in_parts` and `scores_in_parts`: the same results as in one piece, with turns of the event loop in between."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Coroutine
from typing import Any

from engine.models.spec.encoder_spec import PoolingSpec
from engine.tokenizer_manager.http.pooling.run import NUMBERS_AT_ONCE, json_in_parts, scores_in_parts
from engine.tokenizer_manager.pooling.scoring import ScoredInputs

SIZE = 1024
VECTORS = [array("f", [n % 7, *([0.0] * (SIZE - 2)), 1.0]).tobytes() for n in range(200)]
NUM_PARTS = len(VECTORS) * SIZE // NUMBERS_AT_ONCE


def turns_of(call: Coroutine[Any, Any, list[Any]]) -> tuple[int, list[Any]]:
    """How many turns of the loop a call leaves to others, and its result."""

    async def count() -> tuple[int, list[Any]]:
        task, turns = asyncio.ensure_future(call), 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, task.result()

    return asyncio.run(count())


def test_vectors_are_written_in_parts():
    turns, parts = turns_of(json_in_parts(VECTORS, lambda n, vector: [n, *array("f", vector)[:1]]))

    assert [json.loads(bytes(part)) for part in parts] == [[n, n % 7] for n in range(len(VECTORS))]
    assert turns > NUM_PARTS


def test_scores_are_computed_in_parts():
    pooling = PoolingSpec(task="embed", pooling="mean", size=SIZE)
    inputs = ScoredInputs([], [], [(n, 3) for n in range(len(VECTORS))])

    turns, scores = turns_of(scores_in_parts(pooling, inputs, VECTORS))

    assert scores == [[3 * (n % 7) + 1] for n in range(len(VECTORS))]
    assert turns > NUM_PARTS
