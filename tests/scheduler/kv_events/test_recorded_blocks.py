"""What a scheduler records while requests come and go: the blocks of its prefix cache. No decision depends on it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduler.prefix_cache.base import namespace_of
from engine.scheduler.prefix_cache.block_events import BlockEvents
from tests.scheduler.harness import Harness
from tests.scheduler.prefix_cache.block_consumer import BlockConsumer

BLOCK = 16  # four pages of the harness


def run(harness: Harness, consumer: BlockConsumer | None) -> None:
    """A mix of requests in a pool that is too small for them: evictions, retractions, aborts, a flush."""
    rng = np.random.default_rng(7)
    shared = [int(token) for token in rng.integers(1, 90, 40)]
    for number in range(15):
        cut, own = int(rng.integers(0, 40)), [int(token) for token in rng.integers(1, 90, 20)]
        message = {"lora_id": "fp"} if number % 3 == 1 else {}
        salt = "private" if number % 5 == 4 else ""
        rid = harness.submit(prompt=shared[:cut] + own, max_new_tokens=30, extra_key=salt, message=message)
        for _ in range(int(rng.integers(1, 12))):
            harness.step()
            check(harness, consumer)
        if number % 7 == 6:
            harness.abort(rid)
            check(harness, consumer)
    harness.run_until_idle()
    check(harness, consumer)
    harness.unload_adapter("fp")
    harness.flush()
    check(harness, consumer)


def check(harness: Harness, consumer: BlockConsumer | None) -> None:
    if consumer is None:
        return
    consumer.apply(harness.scheduler.take_block_events())
    cache = harness.prefix_cache
    for lora_id, tokens in consumer.known.values():
        token_ids = np.array(tokens, dtype=np.int32).tobytes()
        assert cache.match(namespace_of("", lora_id), token_ids, len(tokens)).num_pages * 4 == len(tokens)
    blocks = harness.scheduler._parts.block_events
    assert isinstance(blocks, BlockEvents)
    assert blocks.hashes() == set(consumer.known)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_consumer_has_the_blocks_of_the_cache_and_no_decision_changes(overlap):
    recording, plain = (
        Harness(
            num_pages=48,
            max_running_requests=6,
            overlap=overlap,
            chaos="retract=0.2:20",
            records_blocks=records_blocks,
        )
        for records_blocks in (True, False)
    )
    consumer = BlockConsumer(BLOCK)

    run(recording, consumer)
    run(plain, None)

    report = recording.scheduler.report(0.0)
    assert report.totals.evicted_tokens > 0 < report.totals.retracted_reqs
    assert consumer.known == {}
    assert recording.scheduler.decisions.since(0) == plain.scheduler.decisions.since(0)
    assert plain.scheduler.take_block_events() == ()
