"""What structured output costs: free and guided requests in turn, against one or two running servers.

    engine serve &                                        # http://127.0.0.1:30000
    python benchmarks/structured.py --url http://127.0.0.1:30000 [--peer http://127.0.0.1:8080] [--rounds 5]

For each number of concurrent requests and each round, free requests and guided requests follow each other, with equal
prompts and exactly `--output-len` tokens each: the schema is an array that cannot be complete earlier. It is sent as
a grammar (`start: %json {...}`), since a schema would be refused: its shortest answer is longer. The table has the
medians of output tokens per second, and the ratio guided to free of the same round (median, and range). The peer is
any server with the chat API of OpenAI and `response_format` (`llama-server` of llama.cpp).

    python benchmarks/structured.py --storm [--rounds 3] [--output-len 250]

measures instead what 64 grammars cost 64 streams that can be compiled in time one by one at most: the times between
tokens of rounds with and without them, in turn, and how long the refusals take.

    python benchmarks/structured.py --near

needs no server, but the default model's tokenizer. Random tokens are checked, masked where they are refused, and
accepted, up to the limit of an answer. The table has the CPU times of the second half of each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from typing import Any, Final, NamedTuple

import aiohttp
import jsonschema_rs

_PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "color": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "color"],
    "additionalProperties": False,
}
ENDLESS: Final = {
    "type": "object",
    "properties": {"people": {"type": "array", "minItems": 100, "items": _PERSON}},
    "required": ["people"],
    "additionalProperties": False,
}
COMPLETE: Final = {
    "type": "object",
    "properties": {
        **_PERSON["properties"],  # type: ignore[dict-item]
        "email": {"type": "string", "pattern": "^[a-z]{3,8}@[a-z]{3,8}[.]com$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "color", "email", "tags"],
    "additionalProperties": False,
}

_LONG: Final = {"type": "string", "minLength": 60}
_LISTED: Final = {"enum": ["x" * 80, "y" * 70]}
NEAR: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "open, four long texts": (
        {"type": "object", "properties": dict.fromkeys("abcd", _LONG), "required": [*"abcd"]},
        330,
    ),
    "open, four long enums": (
        {"type": "object", "properties": dict.fromkeys("abcd", _LISTED), "required": [*"abcd"]},
        220,
    ),
    "open, in a list": (
        {
            "type": "array",
            "minItems": 3,
            "items": {"type": "object", "properties": {"a": _LONG, "b": _LONG}, "required": ["a", "b"]},
        },
        330,
    ),
    "with a pattern": (COMPLETE, 90),
}
"""Schemas with long required values, and limits of tokens."""


STORM: Final = 64  # streams, and bombs


class Batch(NamedTuple):
    """The answers of requests that were sent together, their tokens, and the seconds that they took."""

    texts: list[str]
    num_tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds


class Server:
    """One server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, temperature: float, *, is_peer: bool
    ) -> None:
        self._is_peer = is_peer
        self._session = session
        self._url = url.rstrip("/")
        self._temperature = temperature

    async def run(self, count: int, max_tokens: int, seed: int, schema: dict[str, Any] | None) -> Batch:
        """Answer `count` requests at once."""
        started_s = time.perf_counter()
        bodies = [self._body(n, max_tokens, seed, schema) for n in range(count)]
        answers = await asyncio.gather(*map(self._answer, bodies))
        seconds = time.perf_counter() - started_s
        return Batch([text for text, _ in answers], sum(tokens for _, tokens in answers), seconds)

    def _body(self, n: int, max_tokens: int, seed: int, schema: dict[str, Any] | None) -> dict[str, Any]:
        prompt = (
            f"Invent people with name, age and favorite color, as JSON. Begin with number {seed * 1000 + n}."
        )
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": self._temperature,
            "seed": seed * 1000 + n,
        }
        if schema is None:
            return {**body, "ignore_eos": True}
        if schema is ENDLESS and not self._is_peer:
            return {**body, "grammar": f"start: %json {json.dumps(schema)}"}
        response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return {**body, "response_format": response_format}

    async def _answer(self, body: dict[str, Any]) -> tuple[str, int]:
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"{self._url}: HTTP {response.status}: {answer}")
        return answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"]


async def measure(server: Server, arguments: argparse.Namespace) -> None:
    """Measure one server, and print its tables."""
    await server.run(2, 8, 999, None)
    await server.run(2, 8, 999, ENDLESS)
    print("| concurrent | free, tok/s | guided, tok/s | guided to free |\n|---|---|---|---|")
    for count in arguments.concurrency:
        free: list[float] = []
        guided: list[float] = []
        for round_number in range(arguments.rounds):
            free.append((await server.run(count, arguments.output_len, round_number, None)).rate)
            batch = await server.run(count, arguments.output_len, round_number, ENDLESS)
            assert batch.num_tokens == count * arguments.output_len, "an answer ended early"
            guided.append(batch.rate)
        ratios = [b / a for a, b in zip(free, guided, strict=True)]
        print(
            f"| {count} | {statistics.median(free):,.0f} | {statistics.median(guided):,.0f} | "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    validator = jsonschema_rs.validator_for(COMPLETE)
    batches = [
        await server.run(max(arguments.concurrency), 256, n, COMPLETE) for n in range(arguments.rounds)
    ]
    texts = [text for batch in batches for text in batch.texts]
    num_valid = sum(_is_valid(validator, text) for text in texts)
    print(
        f"valid: {num_valid} of {len(texts)}; {statistics.median(batch.rate for batch in batches):,.0f} tok/s\n"
    )


def _is_valid(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


class Intervals(NamedTuple):
    """Seconds between tokens, with the time at which each ended."""

    ends_s: list[float]
    seconds: list[float]

    def within(self, begin_s: float, end_s: float) -> list[float]:
        """Those that ended in a span of time, in ascending order."""
        pairs = zip(self.ends_s, self.seconds, strict=True)
        return sorted(seconds for at_s, seconds in pairs if begin_s <= at_s <= end_s)


class Storm:
    """Streams of free text, and grammars that take too long to compile, each with its own text."""

    def __init__(self, session: aiohttp.ClientSession, url: str, output_len: int) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._output_len = output_len
        self._num_begun = 0
        self._begun = asyncio.Event()

    async def run(self, first_bomb: int | None) -> tuple[list[float], list[tuple[int, float]]]:
        """The times between tokens while the bombs are there, or of a whole round without; statuses and times."""
        bombs = [] if first_bomb is None else [bomb(first_bomb + n) for n in range(STORM)]
        self._num_begun = 0
        self._begun.clear()
        streams = [asyncio.create_task(self._stream(n)) for n in range(STORM)]
        await self._begun.wait()
        begin_s = time.perf_counter()
        refusals = await asyncio.gather(*map(self._refused, bombs))
        end_s = time.perf_counter() if bombs else float("inf")
        found = await asyncio.gather(*streams)
        return sorted(value for one in found for value in one.within(begin_s, end_s)), refusals

    async def _stream(self, number: int) -> Intervals:
        body = {
            "prompt": f"Write a story about number {number}.",
            "max_tokens": self._output_len,
            "ignore_eos": True,
            "stream": True,
        }
        found = Intervals([], [])
        last_s: float | None = None
        async with self._session.post(self._url, json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.perf_counter()
                if last_s is None:
                    self._num_begun += 1
                    if self._num_begun == STORM:
                        self._begun.set()
                else:
                    found.ends_s.append(now_s)
                    found.seconds.append(now_s - last_s)
                last_s = now_s
        return found

    async def _refused(self, body: bytes) -> tuple[int, float]:
        began_s = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            await response.read()
        return response.status, time.perf_counter() - began_s


def bomb(number: int) -> bytes:
    """A request with 6,000 optional properties: the time of its compilation is quadratic."""
    properties = {f"{number}_{i}": {"type": "integer"} for i in range(6000)}
    schema = {"type": "object", "properties": properties}
    return json.dumps({"prompt": "x", "max_tokens": 8, "guided_json": schema}).encode()


async def measure_storm(session: aiohttp.ClientSession, url: str, arguments: argparse.Namespace) -> None:
    """Measure rounds without and with bombs, and print a table."""
    storm = Storm(session, url, arguments.output_len)
    first = int(time.time()) * 1000  # no result of an earlier run is known to the server
    await storm.run(None)
    print(
        "| round | bombs | between tokens, ms: p50 | p99 | most | refused | longest, s |\n|---|---|---|---|---|---|---|"
    )
    ratios = []
    for round_number in range(arguments.rounds):
        p99s = []
        for first_bomb in (None, first + round_number * STORM):
            seconds, refusals = await storm.run(first_bomb)
            p50, p99 = (1e3 * seconds[int(len(seconds) * share)] for share in (0.5, 0.99))
            p99s.append(p99)
            statuses = dict(Counter(status for status, _ in refusals))
            longest = max((taken for status, taken in refusals if status != 200), default=0.0)
            print(
                f"| {round_number} | {len(refusals)} | {p50:.0f} | {p99:.0f} | {1e3 * seconds[-1]:.0f} | {statuses} "
                f"| {longest:.1f} |"
            )
        ratios.append(p99s[1] / p99s[0])
    print(f"\np99 with to without: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def measure_near() -> None:
    """Measure the tokens of answers near their limit, and print a table."""
    import numpy as np

    from engine.grammar.guided import GuidedMatcher, prepare
    from engine.grammar.llguidance_backend import LLGuidanceBackend
    from engine.grammar.vocabulary import TokenizerVocabulary
    from engine.models.source import resolve_source
    from engine.models.tokenizer.tokenizer import load_tokenizer
    from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse

    tokenizer = load_tokenizer(resolve_source(None))
    vocabulary = TokenizerVocabulary(tokenizer, 49_152, tokenizer.eos_token_ids)
    print("| schema | tokens | ms a token: mean | p50 | p99 |\n|---|---|---|---|---|")
    for name, (schema, limit) in NEAR.items():
        use = GrammarUse(spec=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)), complete=True)
        prepare(use, vocabulary)
        compiled = tuple(map(LLGuidanceBackend(vocabulary).compile, use.specs))
        mask, times, rng = np.zeros(vocabulary.size // 32, np.int32), [], np.random.default_rng(0)
        for _ in range(3):
            matcher = GuidedMatcher(use, compiled, vocabulary)
            matcher.limit(limit)
            for number in range(limit):
                token_id, begin_s = int(rng.integers(vocabulary.size)), time.thread_time()
                if not matcher.allows(token_id):
                    matcher.fill(mask)
                    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                    token_id = int(rng.choice(allowed))
                matcher.accept((token_id,))
                if number >= limit // 2:
                    times.append(1e3 * (time.thread_time() - begin_s))
                if matcher.ended:
                    break
        p50, p99 = np.percentile(times, (50, 99))
        print(f"| {name} | {len(times)} | {statistics.mean(times):.2f} | {p50:.2f} | {p99:.2f} |")


async def main() -> None:
    """Measure the servers, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--peer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--storm", action="store_true")
    parser.add_argument("--near", action="store_true")
    arguments = parser.parse_args()
    if arguments.near:
        measure_near()
        return
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        if arguments.storm:
            await measure_storm(session, arguments.url, arguments)
            return
        for url in filter(None, (arguments.url, arguments.peer)):
            print(f"{url}, {arguments.output_len} tokens, temperature {arguments.temperature}\n")
            is_peer = url == arguments.peer
            server = Server(session, url, arguments.temperature, is_peer=is_peer)
            await measure(server, arguments)


if __name__ == "__main__":
    asyncio.run(main())
