"""Visitors: clients who come at random moments, whatever the server answers, and what becomes of each of them.

Each must get exactly one end: its answer, or a refusal that says when to come back, which is compared with the time at
which there really was room.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

HUNG_S: Final = 300.0
MAX_RUNNING: Final = 8
MAX_QUEUED: Final = 32
STEP_S: Final = 0.04
"""Of the server: cheap in CPU, so that its rate is the model's whatever else the machine does."""
SERVER: Final = (
    *("--dtype", "bfloat16", "--chaos", f"slow={STEP_S}", "--max-running-requests", str(MAX_RUNNING)),
    *("--max-queued-requests", str(MAX_QUEUED), "--max-total-tokens", "4096", "--max-restarts", "0"),
)
_WORDS: Final = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "then",
    "one",
    "two",
    "three",
)
_WAITING: Final = re.compile(r"(\d+) requests wait, the limit is (\d+)")


@dataclass
class Tally:
    """What came of the visits.

    Attributes:
        outcomes: of requests: answered, refused, shed (for a more urgent one), queue timeout, lost, hung.
        num_offered, num_choices: choices that were asked for, and of requests that were answered.
        ttft_s, e2e_s: of admitted requests that stream, and of all that were answered.
        early_s: by how much refusals named a moment before there was room; late_s: after it.
        retry_after_s: as they said.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    num_offered: int = 0
    num_choices: int = 0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    early_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    retry_after_s: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For people."""
        lines = [f"requests: {dict(sorted(self.outcomes.items()))}"]
        for what, values in (("time to first token", self.ttft_s), ("whole answer", self.e2e_s)):
            lines.append(f"{what}: {quantiles(values)}")
        num_judged = len(self.early_s) + len(self.late_s)
        lines.append(f"Retry-After: {dict(sorted(self.retry_after_s.items()))} (s: times)")
        lines.append(f"  too early in {len(self.early_s)} of {num_judged}, by {quantiles(self.early_s)}")
        lines.append(f"  after there was room in the others, by {quantiles(self.late_s)}")
        return "\n".join(lines)


def quantiles(values: Sequence[float]) -> str:
    """Median, 99 % and maximum, in seconds."""
    if not values:
        return "-"
    ordered = sorted(values)
    return (
        f"{statistics.median(ordered):.2f} s median, {ordered[int(0.99 * (len(ordered) - 1))]:.2f} s 99 %, "
        f"{ordered[-1]:.2f} s at most"
    )


def make_body(choose: random.Random) -> dict[str, Any]:
    """One of many kinds of requests."""
    words = choose.choices(_WORDS, k=choose.randrange(4, 40))
    body: dict[str, Any] = {
        "prompt": " ".join(words),
        "max_tokens": choose.randrange(8, 25),
        "ignore_eos": True,
        "temperature": choose.choice((0, 1.0)),
        "seed": choose.randrange(1 << 30),
        "stream": choose.random() < 0.5,
        "n": choose.choices((1, 4, 8, 24), (85, 8, 4, 3))[0],
        "priority": choose.choices(("normal", "low", "high"), (80, 10, 10))[0],
    }
    if choose.random() < 0.1:
        body["queue_timeout"] = 2.0
    return body


class Visitors:
    """Clients of one server."""

    def __init__(self, url: str, choose: random.Random) -> None:
        self.tally = Tally()
        self._url = f"{url}/v1/completions"
        self._choose = choose
        self._num_ended = 0  # choices that had been let in
        self._refusals: list[tuple[int, float, int]] = []  # room when so many have ended; said when, and what

    async def fill(self, seconds: float) -> float:
        """Measure the server's rate, in choices per second: as many as it takes in come at once, again and again."""
        end_s = time.monotonic() + seconds
        async with self._session() as session:

            async def come_again() -> None:
                while time.monotonic() < end_s:
                    await self._visit(session, make_body(self._choose) | {"n": 1})

            num_before, began_s = self.tally.num_choices, time.monotonic()
            await asyncio.gather(*(come_again() for _ in range(MAX_RUNNING + MAX_QUEUED // 2)))
            return (self.tally.num_choices - num_before) / (time.monotonic() - began_s)

    async def flood(self, choices_per_s: float, seconds: float) -> None:
        """Come at this rate for so long, and wait for all answers."""
        visits: set[asyncio.Task[None]] = set()
        async with self._session() as session:
            due_s = time.monotonic()
            end_s = due_s + seconds
            while due_s < end_s:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                body = make_body(self._choose)
                visit = asyncio.create_task(self._visit(session, body))
                visits.add(visit)
                visit.add_done_callback(visits.discard)
                due_s += self._choose.expovariate(choices_per_s) * body["n"]
            await asyncio.gather(*visits)

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=HUNG_S)
        )

    async def _visit(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        began_s = time.monotonic()
        self.tally.num_offered += body["n"]
        try:
            async with session.post(self._url, json=body) as response:
                if response.status == 200 and body["stream"]:
                    outcome = await self._read_stream(response, body, began_s)
                else:
                    outcome = self._read_whole(response, await response.json(), body)
        except TimeoutError:
            outcome = "hung"
        except aiohttp.ClientError as error:
            outcome = f"lost: {error!r}"
        if outcome == "answered":
            self.tally.num_choices += body["n"]
            self.tally.e2e_s.append(time.monotonic() - began_s)
        self.tally.outcomes[outcome.partition(":")[0]] += 1
        if outcome.partition(":")[0] in ("lost", "hung"):
            self.tally.problems.append(f"{outcome} {body}")

    def _read_whole(
        self, response: aiohttp.ClientResponse, answer: dict[str, Any], body: dict[str, Any]
    ) -> str:
        if response.status == 200:
            whole = all(choice["finish_reason"] == "length" for choice in answer["choices"])
            right = answer["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
            if not (whole and right and len(answer["choices"]) == body["n"]):
                return f"lost: not what was asked for: {answer}"
            self._ended(body["n"])
            return "answered"
        return self._refusal(answer["error"], response.headers.get("retry-after"), body["n"])

    async def _read_stream(
        self, response: aiohttp.ClientResponse, body: dict[str, Any], began_s: float
    ) -> str:
        finished: set[int] = set()
        waits = True
        async for line in response.content:
            if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                if line == b"data: [DONE]\n":
                    return "answered" if len(finished) == body["n"] else f"lost: only {finished} ended"
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return self._refusal(event["error"], None, body["n"])
            if waits:
                waits = False
                self.tally.ttft_s.append(time.monotonic() - began_s)
            for choice in event["choices"]:
                if choice["finish_reason"]:
                    finished.add(choice["index"])
                    self._ended(1)
        return "lost: the stream broke"

    def _refusal(self, error: dict[str, Any], retry_after: str | None, n: int) -> str:
        if error["code"] == "queue_timeout":
            self._ended(n)
            return "queue timeout"
        if error["code"] != "queue_full":
            return f"lost: {error}"
        counted = _WAITING.search(error["message"])
        if counted is None:
            return "shed"  # whose place another one has taken
        if retry_after is None or not retry_after.isdigit() or not 1 <= int(retry_after) <= 60:
            return f"lost: refused with Retry-After {retry_after}"
        self.tally.retry_after_s[int(retry_after)] += 1
        excess = int(counted[1]) + n - int(counted[2])
        heapq.heappush(self._refusals, (self._num_ended + excess, time.monotonic(), int(retry_after)))
        return "refused"

    def _ended(self, num_choices: int) -> None:
        """So many choices make room: whoever was refused for lack of it could have come now."""
        self._num_ended += num_choices
        now_s = time.monotonic()
        while self._refusals and self._refusals[0][0] <= self._num_ended:
            _, said_s, retry_after_s = heapq.heappop(self._refusals)
            late_s = said_s + retry_after_s - now_s
            (self.tally.late_s if late_s >= 0 else self.tally.early_s).append(abs(late_s))
