"""Many clients on a server whose memory is far too small for all of them, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import CRAMPED
from .serving import DEADLINE_S, EngineServe

pytestmark = pytest.mark.real_process

NUM_CLIENTS = 32
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def cramped(model: Path) -> Iterator[EngineServe]:
    """A server that must retract all the time."""
    with EngineServe(str(model), *CRAMPED) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


def fields(number: int) -> dict[str, Any]:
    """Different prompts, half with a common beginning; exactly so many tokens, and not by `ignore_eos`, for which the
    scheduler would set all memory aside at once."""
    beginning = "the quick brown fox jumps over the lazy dog. " if number % 2 else ""
    return {
        "model": "small-llama",
        "prompt": f"{beginning}client {number} " * (1 + number % 3),
        "max_tokens": NUM_TOKENS,
        "seed": number,
        "temperature": number % 3 / 2,
        "extra_body": {"min_tokens": NUM_TOKENS},
    }


def assert_nothing_is_held(engine) -> None:
    """All pages are free or in the cache, and no page in the cache is locked."""
    metrics = engine.idle_metrics()
    flushed = httpx.post(f"{engine.url}/flush_cache", timeout=DEADLINE_S).json()
    assert flushed == {"flushed_tokens": metrics["kv_cached_tokens"], "kept_tokens": 0, "success": True}
    assert engine.idle_metrics()["kv_cached_tokens"] == 0
    assert httpx.get(f"{engine.url}/server_info", timeout=DEADLINE_S).json()["num_live_requests"] == 0


@pytest.mark.slow
def test_all_of_many_streams_come_to_their_end(cramped):
    """They get the text that each of them gets alone, although all of them lost their memory to others."""

    async def all_at_once():
        async with openai_client(cramped) as client:
            with cramped.stopped():  # until all are there: on a fast machine the first ones would be gone
                reading = [asyncio.ensure_future(read(client, number)) for number in range(NUM_CLIENTS)]
                await asyncio.to_thread(cramped.wait_for_requests, NUM_CLIENTS)
            return await asyncio.gather(*reading)

    async def read(client, number):
        stream = await client.completions.create(
            **fields(number), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        return "".join(choice.text for chunk in chunks for choice in chunk.choices)

    async def one_by_one():
        async with openai_client(cramped) as client:
            answers = [await client.completions.create(**fields(number)) for number in range(NUM_CLIENTS)]
            return [answer.choices[0].text for answer in answers]

    before = cramped.idle_metrics()["retracted_reqs_total"]
    texts = asyncio.run(all_at_once())
    assert cramped.idle_metrics()["retracted_reqs_total"] > before
    assert_nothing_is_held(cramped)
    assert texts == asyncio.run(one_by_one())


def test_clients_that_leave_give_everything_back(slow_serve):
    """In each round half of the streams, long ones, are left after some events; the others come to their end."""
    before = slow_serve.idle_metrics()

    async def round_of_clients():
        async with httpx.AsyncClient(base_url=slow_serve.url, timeout=DEADLINE_S) as client:
            await asyncio.gather(*(stay_or_leave(client, number) for number in range(16)))

    async def stay_or_leave(client, number):
        events = []
        async with client.stream("POST", "/v1/completions", json=body(number)) as response:
            async for line in response.aiter_lines():
                if line:
                    events.append(line)
                if number % 2 and len(events) == 1 + number // 2:
                    return
        assert events[-1] == "data: [DONE]"

    def body(number):
        plain = fields(number)
        del plain["extra_body"]
        # The server does not wait for slow readers: what is left in the middle must be long.
        num_tokens = 250 if number % 2 else NUM_TOKENS
        return plain | {"max_tokens": num_tokens, "min_tokens": num_tokens, "stream": True}

    for _ in range(3):
        asyncio.run(round_of_clients())
    assert_nothing_is_held(slow_serve)
    after = slow_serve.idle_metrics()
    for reason in ("dropped", "length"):
        name = f'finished_reqs_total{{reason="{reason}"}}'
        assert after[name] - before.get(name, 0) == 3 * 8, reason


def test_a_client_that_leaves_before_its_whole_answer_gives_everything_back(slow_serve):
    dropped = 'finished_reqs_total{reason="dropped"}'
    before = slow_serve.idle_metrics()

    async def leave():
        async with httpx.AsyncClient(base_url=slow_serve.url, timeout=DEADLINE_S) as client:
            # So many and so long that their end cannot come before ours.
            sampling = {"n": 16, "max_new_tokens": 300, "min_new_tokens": 300}
            request = asyncio.create_task(
                client.post("/generate", json={"text": "x", "sampling_params": sampling})
            )
            while (await client.get("/server_info")).json()["num_live_requests"] < 16:
                assert not request.done()
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request

    asyncio.run(leave())
    assert_nothing_is_held(slow_serve)
    assert slow_serve.idle_metrics()['finished_reqs_total{reason="dropped"}'] - before.get(dropped, 0) == 16
    answer = httpx.post(
        f"{slow_serve.url}/generate",
        json={"text": "x", "sampling_params": {"max_new_tokens": 2}},
        timeout=DEADLINE_S,
    )
    assert json.loads(answer.text)["meta_info"]["completion_tokens"] <= 2


def openai_client(engine) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{engine.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
    )
