"""A manager with `--disaggregation-mode both`: the halves of a request, and life without the prefill replica."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from engine.runtime.messages import BatchTextOutput, GenerateRequest, KVHandoff, MediaItem
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.dispatch.handoffs import MIN_PROMPT_TOKENS, Pair
from engine.tokenizer_manager.generation import GenerationRequest

from ..fake_engine import CAPACITY, LENGTH, WAIT_S, FakeEngine, row
from ..test_manager import Setup, texts

LONG = list(range(1, MIN_PROMPT_TOKENS + 2))
SHORT = [1, 2, 3]
PEER = "127.0.0.1:8998"


def run(test: Callable[[Setup, FakeEngine], Awaitable[None]]) -> None:
    """Run a test on a manager whose first engine is the prefill replica."""

    async def main() -> None:
        decode = FakeEngine()
        async with asyncio.timeout(WAIT_S):
            await test(Setup(others=[decode], pair=Pair(PEER)), decode)

    asyncio.run(main())


def test_a_long_prompt_is_sent_to_both_in_one_room():
    async def test(setup: Setup, decode: FakeEngine) -> None:
        stream = await setup.start(LONG)
        first, second = setup.engine.next_request(), decode.next_request()
        assert second.rid == stream.choices[0].rid != first.rid
        assert first.handoff is not None and second.handoff is not None
        assert first.handoff == KVHandoff(second.handoff.bootstrap_room) and second.handoff.peer == PEER
        assert (first.input_ids, first.sampling) == (second.input_ids, second.sampling)

        # The row of the prefill half is dropped, with or without the end of the request.
        setup.manager.on_message(BatchTextOutput([row(first, "x", finish=LENGTH)]))
        setup.manager.on_message(BatchTextOutput([row(second, "a", finish=LENGTH)]))
        setup.manager.on_message(BatchTextOutput([row(first, "x", finish=LENGTH)]))
        assert await texts(stream) == ["a"]

    run(test)


def test_only_the_half_with_the_stream_reports_progress():
    """Rows of progress about the other half would belong to no request of the log, which is aborted for them."""

    async def test(setup: Setup, decode: FakeEngine) -> None:
        await setup.manager.start(GenerationRequest(prompts=[LONG], reports_progress=True))
        assert not setup.engine.next_request().reports_progress
        assert decode.next_request().reports_progress

    run(test)


def test_a_short_prompt_is_sent_to_the_decode_replica_alone():
    async def test(setup: Setup, decode: FakeEngine) -> None:
        await setup.start(SHORT)
        assert decode.next_request().handoff is None
        assert setup.engine.generate.empty()

    run(test)


def test_an_abort_ends_both_halves():
    async def test(setup: Setup, decode: FakeEngine) -> None:
        stream = await setup.start(LONG)
        first, second = setup.engine.next_request(), decode.next_request()
        setup.manager.abort(stream.id, "no reason")
        assert {setup.engine.next_abort().rid for _ in range(2)} == {first.rid, second.rid}
        assert decode.next_abort().rid == second.rid

    run(test)


def test_without_the_prefill_replica_the_other_one_does_all():
    async def test(setup: Setup, decode: FakeEngine) -> None:
        setup.manager.peers_lost("prefill is lost", replica=0)
        await setup.start(LONG)
        assert decode.next_request().handoff is None
        setup.manager.peers_back(CAPACITY, replica=0)
        await setup.start(LONG)
        assert decode.next_request().handoff is not None

    run(test)


def test_without_the_decode_replica_the_prefill_replica_does_all():
    async def test(setup: Setup, decode: FakeEngine) -> None:
        stream = await setup.start(LONG)
        setup.engine.next_request()
        decode.next_request()
        setup.manager.peers_lost("decode is lost", replica=1)
        request = setup.engine.next_request()
        assert request.handoff is None
        setup.manager.on_message(BatchTextOutput([row(request, "b", finish=LENGTH)]))
        assert await texts(stream) == ["b"]

    run(test)


def test_images_are_computed_by_the_replica_that_decodes():
    params = SamplingParams(max_new_tokens=4, seed=0)
    message = GenerateRequest("r", array("i", LONG).tobytes(), params)
    item = MediaItem(b"d" * 32, array("i", [1, 4]).tobytes(), "", (1, 4, 4, 3))
    assert Pair(PEER).halves(message) is not None
    assert Pair(PEER).halves(replace(message, media=(item,))) is None
