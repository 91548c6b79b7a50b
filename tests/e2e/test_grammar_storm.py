"""64 grammars that cannot be compiled beside 64 streams: refused in time, no process and no memory left; and small
schemas on a machine with other work: none of them refused.

What the storm costs the streams is measured by `benchmarks/structured.py --storm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest

from .conftest import StartServe
from .grammar_bombs import bomb
from .serving import DEADLINE_S, EngineServe

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

COUNT: Final = 64
TIMEOUT_S: Final = 2.0
SLACK_S: Final = 20.0  # for reading the bodies on a machine with other work
MAX_GROWTH_BYTES: Final = 64 << 20


class Refusal(NamedTuple):
    """The answer to a bomb."""

    status: int
    code: str
    seconds: float


async def storm(engine: EngineServe, first: int) -> tuple[list[str], list[Refusal]]:
    """Streams and bombs at the same time: the last lines of the streams, and the refusals."""
    limits = httpx.Limits(max_connections=None)
    bodies = [
        json.dumps({"prompt": "x", "max_tokens": 8, **bomb(number)}).encode()
        for number in range(first, first + COUNT)
    ]
    async with httpx.AsyncClient(base_url=engine.url, timeout=4 * DEADLINE_S, limits=limits) as client:

        async def stream(number: int) -> str:
            body = {"prompt": f"stream {number}", "max_tokens": 150, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
            return lines[-1]

        async def explode(body: bytes) -> Refusal:
            began_s = time.monotonic()
            reply = await client.post("/v1/completions", content=body)
            seconds = time.monotonic() - began_s
            return Refusal(reply.status_code, reply.json().get("error", {}).get("code"), seconds)

        streams = asyncio.gather(*map(stream, range(COUNT)))
        bombs = asyncio.gather(*map(explode, bodies))
        return await streams, await bombs


def sandboxes(engine: EngineServe) -> list[int]:
    """The processes that compile grammars; each compilation is a child of one."""
    parent = engine.pids["tokenizer_manager"]
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def resident_bytes(engine: EngineServe) -> dict[str, int]:
    """Memory of the processes that see grammars."""
    roles = ("tokenizer_manager", "scheduler")
    pages = {role: Path(f"/proc/{engine.pids[role]}/statm").read_text().split()[1] for role in roles}
    return {role: int(count) * 4096 for role, count in pages.items()}


def test_a_storm_of_bombs(start_serve: StartServe, model: Path, monkeypatch: pytest.MonkeyPatch):
    # oneDNN keeps up to 1,024 primitives, new ones for each number of rows: the streams' memory, not that of grammars.
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    arguments = ("--dtype", "float32", "--grammar-timeout", str(TIMEOUT_S), "--max-running-requests", "64")
    engine = start_serve(str(model), *arguments).wait_until_ready()
    good: Any = {"prompt": "x", "max_tokens": 8, "regex": "[a-c]{3}"}
    before: dict[str, int] = {}
    for number in range(3):
        ends, refusals = asyncio.run(storm(engine, number * COUNT))

        assert ends == ["data: [DONE]"] * COUNT
        assert {refusal.status for refusal in refusals} <= {400, 429}
        assert {refusal.code for refusal in refusals} <= {
            *("schema_too_complex", "queue_full", "invalid_grammar", "invalid_json")
        }
        # A second more than the time limit on an idle machine.
        assert max(refusal.seconds for refusal in refusals) < TIMEOUT_S + SLACK_S
        engine.idle_metrics()
        assert len(sandboxes(engine)) == 1
        assert httpx.post(f"{engine.url}/v1/completions", json=good, timeout=DEADLINE_S).status_code == 200
        after = resident_bytes(engine)
        growth = {role: after[role] - before.get(role, after[role]) for role in after}
        assert max(growth.values()) < MAX_GROWTH_BYTES, growth
        before = before or after
    left = sandboxes(engine)
    assert engine.stop() == 0, engine.log
    assert engine.leftovers() == []
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in engine.log


NUM_BUSY: Final = 10


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Processes that never wait, at the usual priority."""
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_BUSY):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def small_schema(number: int) -> dict[str, Any]:
    properties = {f"name_{number}": {"type": "string"}, "age": {"type": "integer", "minimum": number}}
    return {"type": "object", "properties": properties, "required": list(properties)}


async def ask(client: httpx.AsyncClient, number: int) -> list[httpx.Response]:
    """Send a new small schema, again after `Retry-After` as long as the compiler starts; the answers."""
    replies: list[httpx.Response] = []
    while not replies or "Retry-After" in replies[-1].headers:
        if replies:
            await asyncio.sleep(float(replies[-1].headers["Retry-After"]))
        body = {"prompt": "x", "max_tokens": 60, "guided_json": small_schema(number)}
        replies.append(await client.post("/v1/completions", json=body))
    return replies


def test_small_schemas_on_a_busy_machine(busy_machine: None, start_serve: StartServe, model: Path):
    engine = start_serve(str(model), "--dtype", "float32").wait_until_ready()

    async def run() -> None:
        async with httpx.AsyncClient(base_url=engine.url, timeout=4 * DEADLINE_S) as client:
            first = await ask(client, 0)
            assert {reply.status_code for reply in first[:-1]} <= {503}, [reply.text for reply in first]
            rest = await asyncio.gather(*(ask(client, number) for number in range(1, 25)))
            assert [reply.status_code for replies in rest for reply in replies] == [200] * 24
            body = {"prompt": "x", "max_tokens": 60, "guided_json": small_schema(99)}
            with pytest.raises(
                httpx.TimeoutException
            ):  # a client that gives up does not lose the compilation
                await client.post("/v1/completions", json=body, timeout=0.05)
            assert [reply.status_code for reply in await ask(client, 99)] == [200]

    asyncio.run(run())
