"""`--overlap` and `--no-overlap` on real servers: the same answers, also among clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .serving import DEADLINE_S, EngineServe

pytestmark = pytest.mark.real_process

NUM_CLIENTS = 16
ARGUMENTS = (
    *("--dtype", "float32", "--page-size", "4", "--max-total-tokens", "480", "--max-running-requests", "12"),
    *("--chunked-prefill-size", "16", "--schedule-conservativeness", "0.1", "--chaos", "retract=0.2:40"),
)


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[dict[str, EngineServe]]:
    """One of each kind, both with too little memory, small chunks, and requests that are retracted at random."""
    with (
        EngineServe(str(model), *ARGUMENTS, "--no-overlap") as plain,
        EngineServe(str(model), *ARGUMENTS, "--overlap") as overlapped,
    ):
        engines = {"plain": plain, "overlapped": overlapped}
        yield {name: engine.wait_until_ready() for name, engine in engines.items()}
        for engine in engines.values():
            assert engine.stop() == 0, engine.log
            assert engine.leftovers() == []
            assert "Traceback" not in engine.log


def body(number: int, **fields: Any) -> dict[str, Any]:
    beginning = "the quick brown fox jumps over the lazy dog. " if number % 2 else ""
    return {
        "model": "small-llama",
        "prompt": f"{beginning}client {number} " * (1 + number % 3),
        "max_tokens": 8 + 3 * number,
        "min_tokens": 8 if number % 4 else 0,
        "temperature": number % 3 / 2,
        "seed": number,
    } | fields


async def answer(client: httpx.AsyncClient, fields: dict[str, Any]) -> Any:
    response = await client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return [
        (choice["text"], choice["finish_reason"], (choice["logprobs"] or {}).get("tokens"))
        for choice in response.json()["choices"]
    ]


async def leave(client: httpx.AsyncClient, number: int) -> None:
    """Read a few events of a long answer, and go."""
    fields = body(100 + number, max_tokens=300, min_tokens=300, stream=True)
    async with client.stream("POST", "/v1/completions", json=fields) as response:
        num_events = 0
        async for line in response.aiter_lines():
            num_events += bool(line)
            if num_events > number:
                return


def answers(engine: EngineServe, bodies: list[dict[str, Any]], *, num_leaving: int = 0) -> Any:
    """Of all clients at once."""

    async def all_at_once() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=engine.url, timeout=DEADLINE_S, limits=limits) as client:
            staying = [asyncio.ensure_future(answer(client, fields)) for fields in bodies]
            await asyncio.gather(*(leave(client, number) for number in range(num_leaving)))
            return await asyncio.gather(*staying)

    return asyncio.run(all_at_once())


@pytest.mark.slow
def test_the_setting_arrives(servers):
    for name, engine in servers.items():
        resolved = httpx.get(f"{engine.url}/server_info", timeout=DEADLINE_S).text
        value = json.dumps(name == "overlapped")
        assert f'"overlap":{value}' in resolved.replace(": ", ":")


@pytest.mark.slow
def test_everybody_gets_the_same_text(servers):
    bodies = [body(number) for number in range(NUM_CLIENTS)]
    bodies += [body(20, n=3, temperature=1.0), body(21, logprobs=2)]

    plain = answers(servers["plain"], bodies)
    overlapped = answers(servers["overlapped"], bodies)

    assert overlapped == plain
    assert len({text for choices in plain for text, *_ in choices}) > NUM_CLIENTS // 2
    assert servers["overlapped"].idle_metrics()["retracted_reqs_total"] > 0


@pytest.mark.slow
def test_a_text_ends_at_its_stop_string(servers):
    """It is found by another process, while the next tokens are computed already."""
    free = answers(servers["plain"], [body(number, max_tokens=60, min_tokens=60) for number in range(4)])
    texts = [choices[0][0] for choices in free]
    bodies = [
        body(number, max_tokens=60, stop=text[len(text) // 2 : len(text) // 2 + 3])
        for number, text in enumerate(texts)
    ]

    plain = answers(servers["plain"], bodies)

    assert {choices[0][1] for choices in plain} == {"stop"}
    assert answers(servers["overlapped"], bodies) == plain


@pytest.mark.slow
def test_among_clients_that_leave(servers):
    bodies = [body(number) for number in range(8)]
    expected = answers(servers["plain"], bodies)

    for engine in servers.values():
        assert answers(engine, bodies, num_leaving=6) == expected
        metrics = engine.idle_metrics()
        flushed = httpx.post(f"{engine.url}/flush_cache", timeout=DEADLINE_S).json()
        assert flushed == {"flushed_tokens": metrics["kv_cached_tokens"], "kept_tokens": 0, "success": True}
