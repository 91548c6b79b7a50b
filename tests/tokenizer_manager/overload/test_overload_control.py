"""What becomes of requests for which there is no room, through the manager."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from engine.runtime.config.engine_config import SchedulerConfig
from engine.runtime.errors import EngineDeadError, QueueFullError, RequestError
from engine.runtime.messages import BatchTextOutput, GenerateRequest, TextOutput
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.generation import Generation, GenerationRequest
from engine.tokenizer_manager.overload import overload_control
from engine.tokenizer_manager.scheduling_options import Scheduling
from tests.tokenizer_manager.fake_engine import LENGTH, row
from tests.tokenizer_manager.test_manager import Setup, run

ROOM = 8 + 2  # what runs, and max_queued_requests
QUEUE = {"overload": "queue"}


async def start(
    setup: Setup, priority: int = 0, *, prompt: str = "hi", n: int = 1, **wishes: Any
) -> Generation:
    scheduling = Scheduling(priority=priority, **wishes)
    request = GenerationRequest(prompts=[prompt], sampling=SamplingParams(), n=n, scheduling=scheduling)
    return await setup.manager.start(request)


async def settled() -> None:
    """Everything that can go on has."""
    for _ in range(20):
        await asyncio.sleep(0)


def finish(setup: Setup, generation: Generation) -> None:
    """The scheduler answers all of a generation."""
    messages: dict[str, GenerateRequest] = {}
    while len(messages) < len(generation.choices):
        message = setup.engine.next_request()
        if message.rid.startswith(generation.id):
            messages[message.rid] = message
    for message in messages.values():
        setup.manager.on_message(_batch(row(message, "x", finish=LENGTH)))


def _batch(output: TextOutput) -> BatchTextOutput:
    return BatchTextOutput([output])


# ---------------------------------------------------------------- refuse


def test_the_least_urgent_and_latest_makes_room_for_the_more_urgent():
    async def test(setup: Setup) -> None:
        old = await start(setup, -1)
        setup.clock.now_s += 1
        young = await start(setup, -1)
        others = [await start(setup, 0) for _ in range(ROOM - 2)]

        await start(setup, 5)
        with pytest.raises(QueueFullError, match=r"\(priority -1\); retry later") as caught:
            await anext(young)
        assert caught.value.retry_after_s >= 1
        assert setup.engine.next_abort().rid == young.choices[0].rid
        assert not old.finished
        await start(setup, 5)
        assert isinstance(old.failure, QueueFullError)
        assert all(generation.failure is None for generation in others)

    run(test, max_queued_requests=2)


def test_equals_and_more_urgent_ones_are_not_sent_away():
    async def test(setup: Setup) -> None:
        for _ in range(ROOM):
            await start(setup, 5)
        for priority in (5, 0):
            with pytest.raises(QueueFullError, match="10 requests wait, the limit is 2"):
                await start(setup, priority)
        assert setup.engine.aborts.empty()

    run(test, max_queued_requests=2)


def test_a_request_that_has_a_token_is_never_sent_away():
    async def test(setup: Setup) -> None:
        for _ in range(ROOM):
            await start(setup, -5)
        for _ in range(ROOM):
            setup.manager.on_message(_batch(row(setup.engine.next_request(), "x")))
        with pytest.raises(QueueFullError):
            await start(setup, 5)

    run(test, max_queued_requests=2)


def test_more_urgent_requests_find_room_for_their_tokens_too():
    async def test(setup: Setup) -> None:
        low = [await start(setup, -1, prompt="x" * 40) for _ in range(2)]
        with pytest.raises(
            QueueFullError, match=r"80 tokens of prompts wait, the limit is 100, and this .* 40"
        ):
            await start(setup, -1, prompt="x" * 40)
        await start(setup, 0, prompt="x" * 40)
        assert [generation.failure is not None for generation in low].count(True) == 1

    run(test, scheduler={"max_queued_tokens": 100})


@pytest.mark.parametrize(("n", "num_sent_away"), [(2, 2), (3, 0)])
def test_nobody_is_sent_away_where_that_would_not_make_room(n, num_sent_away):
    async def test(setup: Setup) -> None:
        low = [await start(setup, -1) for _ in range(2)]
        for _ in range(ROOM - 2):
            await start(setup, 5)
        if num_sent_away:
            await start(setup, 5, n=n)
        else:
            with pytest.raises(QueueFullError, match="10 requests wait"):
                await start(setup, 5, n=n)
        assert [generation.failure is not None for generation in low].count(True) == num_sent_away
        assert setup.engine.aborts.qsize() == num_sent_away

    run(test, max_queued_requests=2)


def test_what_is_refused_or_leaves_gives_its_tokens_back():
    async def test(setup: Setup) -> None:
        for _ in range(50):
            with await start(setup, prompt="x" * 40, n=2):
                pass
        first = await start(setup, prompt="x" * 90)
        finish(setup, first)
        await start(setup, prompt="x" * 90)

    run(test, scheduler={"max_queued_tokens": 100})


def test_the_position_counts_those_without_a_token():
    async def test(setup: Setup) -> None:
        positions = [(await start(setup)).queue_position for _ in range(3)]
        assert positions == [0, 1, 2]
        setup.manager.on_message(_batch(row(setup.engine.next_request(), "x")))
        assert (await start(setup)).queue_position == 2

    run(test)


# ---------------------------------------------------------------- queue


async def full(setup: Setup) -> list[Generation]:
    """A scheduler without room."""
    return [await start(setup) for _ in range(ROOM)]


def test_requests_wait_for_room_most_urgent_first_and_in_their_order():
    async def test(setup: Setup) -> None:
        running = await full(setup)
        order: list[str] = []

        async def arrive(name: str, priority: int) -> None:
            await start(setup, priority)
            order.append(name)

        names = (("a", 0), ("b", 0), ("urgent", 9), ("c", 0), ("last", -9))
        waiting = [asyncio.create_task(arrive(*arrival)) for arrival in names]
        await settled()
        assert order == []
        for i, generation in enumerate(running[:4], 1):
            generation.close()
            await settled()
            assert len(order) == i
        for generation in running[4:]:
            generation.close()
        await asyncio.gather(*waiting)
        assert order == ["urgent", "a", "b", "c", "last"]

    run(test, max_queued_requests=2, scheduler=QUEUE)


def test_nobody_overtakes_a_large_request_for_ever():
    async def test(setup: Setup) -> None:
        running = await full(setup)
        large = asyncio.create_task(start(setup, n=ROOM))
        await settled()
        small = asyncio.create_task(start(setup))
        await settled()
        running[0].close()
        await settled()
        assert not large.done()
        assert not small.done()
        for generation in running[1:]:
            generation.close()
        (await large).close()
        await small

    run(test, max_queued_requests=2, scheduler=QUEUE)


def test_waiting_for_tokens_keeps_nobody_from_waiting_for_places():
    async def test(setup: Setup) -> None:
        first = await start(setup, prompt="x" * 90)
        tokens = asyncio.create_task(start(setup, prompt="x" * 90))
        await settled()
        large = asyncio.create_task(start(setup, n=ROOM))
        await settled()
        assert not tokens.done()
        assert not large.done()
        first.close()
        (await tokens).close()
        await large

    run(test, max_queued_requests=2, scheduler=QUEUE | {"max_queued_tokens": 100})


@pytest.mark.parametrize("wish", ["queue_timeout_s", "timeout_s"])
def test_time_limits_count_while_it_waits_here(wish: str):
    async def test(setup: Setup) -> None:
        await full(setup)
        with pytest.raises(RequestError, match="waited 0.01 s for a place") as caught:
            await start(setup, **dict[str, Any]({wish: 0.01}))
        assert (caught.value.status, caught.value.code) == (503, "queue_timeout")

    run(test, max_queued_requests=2, scheduler=QUEUE)


def test_the_servers_limit_counts_too():
    async def test(setup: Setup) -> None:
        await full(setup)
        with pytest.raises(RequestError, match=r"waited 0.01 s for a place"):
            await start(setup, queue_timeout_s=5.0)

    run(test, max_queued_requests=2, scheduler=QUEUE | {"queue_timeout": 0.01})


def test_a_client_that_leaves_the_line_is_forgotten():
    async def test(setup: Setup) -> None:
        running = await full(setup)
        gone = asyncio.create_task(start(setup))
        stays = asyncio.create_task(start(setup))
        await settled()
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        running[0].close()
        await stays
        assert setup.manager._overload._num_waiting_bytes == 0

    run(test, max_queued_requests=2, scheduler=QUEUE)


def test_the_end_of_the_engine_or_of_serving_is_told_to_who_waits():
    async def died(setup: Setup) -> None:
        await full(setup)
        waiting = [asyncio.create_task(start(setup)) for _ in range(3)]
        await settled()
        setup.manager.engine_died("over")
        for task in waiting:
            with pytest.raises(EngineDeadError, match="over"):
                await task

    async def drains(setup: Setup) -> None:
        await full(setup)
        waiting = [asyncio.create_task(start(setup)) for _ in range(3)]
        await settled()
        setup.manager.drain()
        for task in waiting:
            with pytest.raises(RequestError, match="shutting down"):
                await task

    run(died, max_queued_requests=2, scheduler=QUEUE)
    run(drains, max_queued_requests=2, scheduler=QUEUE)


def test_how_much_text_waits_has_a_bound(monkeypatch):
    monkeypatch.setattr(overload_control, "_MAX_WAITING_BYTES", 100)

    async def test(setup: Setup) -> None:
        await full(setup)
        waiting = asyncio.create_task(start(setup, prompt="x" * 60))
        await settled()
        with pytest.raises(QueueFullError):
            await start(setup, prompt="x" * 60)
        waiting.cancel()

    run(test, max_queued_requests=2, scheduler=QUEUE)


def test_defaults_refuse_and_bound_tokens():
    config = SchedulerConfig()
    assert config.overload == "refuse"
    assert config.max_queued_tokens < 2**25
