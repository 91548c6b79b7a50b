"""64 grammars that cannot be compiled beside 64 streams: refused in time, no process and no memory left.

What the storm costs the streams is measured by `benchmarks/structured.py --storm`.
"""

from __future__ import annotations

import asyncio
import json
import time
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
