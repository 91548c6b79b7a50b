"""Storms: visits of every kind, the worst too, in bursts, on a server that is far too small for them.

Each visit knows which ends it may come to; it gets exactly one of them, or says what it got instead.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import aiohttp

HUNG_S: Final = 300.0
AT_ONCE: Final = 48
POOL_TOKENS: Final = 640
TIMEOUT_S: Final = 2.0  # of the server, for clients that do not read or write
SERVER: Final = (
    # Too little memory for half of those that may run, promised too generously; a host that has room for some of it.
    *("--page-size", "4", "--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "16"),
    *(
        "--schedule-conservativeness",
        "0.1",
        "--chunked-prefill-size",
        "32",
        "--max-num-partial-prefills",
        "2",
    ),
    *("--preemption-mode", "swap", "--swap-space", "0.0003", "--schedule-policy", "priority"),
    *("--max-queued-requests", "96", "--chaos", "retract=0.02:1000000000,oom=0.005:1000000000,slow=0.002"),
    *("--send-timeout", str(TIMEOUT_S), "--header-timeout", str(TIMEOUT_S), "--body-timeout", str(TIMEOUT_S)),
    *("--max-restarts", "0"),
)
_BEGINNINGS: Final = tuple(f"a long beginning, number {i}, that many share " * 4 for i in range(4))
_BAD: Final[Sequence[bytes]] = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": 7.5}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "x", "stop": [' + b'"x",' * 5000 + b'"x"]}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "logit_bias": {"-5": 1}}',
    b"[" * 100_000,
    json.dumps({"prompt": "much too long " * 3000}).encode(),
)


class Storm:
    """Visitors of one server.

    Attributes:
        outcomes: by kind and end.
        problems: ends that no visit may come to.
    """

    def __init__(self, url: str, choose: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._url = url
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._choose = choose
        self._kinds: dict[Callable[[aiohttp.ClientSession], Awaitable[str]], int] = {
            self._whole: 6,
            self._stream: 8,
            self._abort: 3,
            self._leave_at_once: 3,
            self._leave_stream: 4,
            self._slow_reader: 2,
            self._bad: 3,
            self._half_a_request: 1,
            self._chat: 2,
            self._operator: 1,
        }

    async def blow(self, num_visits: int) -> None:
        """So many visits, `AT_ONCE` at a time; returns when each has come to its end."""
        kinds = list(self._kinds)
        # Each storm has a weather of its own: most of one kind.
        weights = [weight * self._choose.choice((1, 1, 4)) for weight in self._kinds.values()]
        visits = iter(self._choose.choices(kinds, weights, k=num_visits))
        timeout = aiohttp.ClientTimeout(total=HUNG_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=self._choose.random() < 0.5)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as session:

            async def come_again() -> None:
                for kind in visits:
                    await self._visit(kind, session)

            await asyncio.gather(*(come_again() for _ in range(AT_ONCE)))

    async def _visit(
        self, kind: Callable[[aiohttp.ClientSession], Awaitable[str]], session: aiohttp.ClientSession
    ) -> None:
        name = kind.__name__.strip("_")
        try:
            outcome = await kind(session)
        except TimeoutError:
            outcome = "hung!"
        except (aiohttp.ClientError, OSError) as error:
            outcome = f"lost! {error!r}"
        short = outcome.partition("!")[0]
        self.outcomes[f"{name}: {short}"] += 1
        if "!" in outcome:
            self.problems.append(f"{name}: {outcome[:500]}")

    # ------------------------------------------------------------ what they ask for

    def _body(self, **fields: Any) -> dict[str, Any]:
        choose = self._choose
        kind = choose.random()
        if kind < 0.3:
            prompt: Any = "word " * choose.randrange(1, 20)
        elif kind < 0.7:
            prompt = choose.choice(_BEGINNINGS) + "and goes on " * choose.randrange(8)
        elif kind < 0.9:
            prompt = [choose.randrange(3, 300) for _ in range(choose.randrange(200, 400))]  # a long one
        else:
            prompt = ["one of two", "and the other one"]
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": choose.choice((1, 8, 30, 120)),
            "temperature": choose.choice((0, 0, 1.0)),
            "seed": choose.randrange(1000),
            "n": choose.choice((1, 1, 1, 2, 4)),
            "priority": choose.choice((0, 0, 0, -20, 20)),
        }
        extras: Sequence[dict[str, Any]] = (
            {},
            {},
            {"ignore_eos": True},
            {"min_tokens": body["max_tokens"]},
            {"stop": ["e", "th"]},
            {"logprobs": 3},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5},
            {"timeout": choose.choice((0.001, 0.1, 1.0))},
            {"queue_timeout": choose.choice((0.001, 0.1))},
            {"cache_salt": choose.choice("ab")},
        )
        return body | choose.choice(extras) | fields

    # ------------------------------------------------------------ kinds of visits

    async def _whole(self, session: aiohttp.ClientSession) -> str:
        body = self._body()
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
        return _judge_whole(response.status, answer, _num_choices(body))

    async def _chat(self, session: aiohttp.ClientSession) -> str:
        body = {"messages": [{"role": "user", "content": "what? " * self._choose.randrange(1, 30)}], "n": 2}
        async with session.post("/v1/chat/completions", json=body | {"max_tokens": 40}) as response:
            answer = await response.json()
        return _judge_whole(response.status, answer, 2)

    async def _stream(self, session: aiohttp.ClientSession) -> str:
        body = self._body(stream=True)
        async with session.post("/v1/completions", json=body) as response:
            return await _read_stream(response, _num_choices(body))

    async def _abort(self, session: aiohttp.ClientSession) -> str:
        """Ended by its id in the middle."""
        body = self._body(stream=True, ignore_eos=True, max_tokens=120)

        async def abort(event: dict[str, Any]) -> None:
            async with session.post("/abort_request", json={"rid": event["id"]}) as aborted:
                assert aborted.status == 200

        async with session.post("/v1/completions", json=body) as response:
            return await _read_stream(response, _num_choices(body), abort)

    async def _leave_at_once(self, session: aiohttp.ClientSession) -> str:
        """Gone before anything has come."""
        reader, writer = await self._send("/v1/completions", json.dumps(self._body()).encode())
        await asyncio.sleep(self._choose.choice((0, 0.001, 0.02, 0.2)))
        del reader
        writer.transport.abort() if self._choose.random() < 0.5 else writer.close()
        return "left"

    async def _leave_stream(self, session: aiohttp.ClientSession) -> str:
        """Gone after some events."""
        body = self._body(stream=True, ignore_eos=True, max_tokens=120)
        left = self._choose.randrange(1, 20)
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                return _judge_whole(response.status, await response.json(), 0)
            async for line in response.content:
                left -= line.startswith(b"data: ")
                if not left:
                    break
            response.close()
        return "left"

    async def _slow_reader(self, session: aiohttp.ClientSession) -> str:
        """Reads a little now and then, or not at all; its answer is the server's to cut."""
        body = self._body(stream=True, ignore_eos=True, max_tokens=120, logprobs=5)
        reader, writer = await self._send("/v1/completions", json.dumps(body).encode(), limit=256)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(self._choose.choice((0.2, 2.5)))
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(HUNG_S):
                head = text = b""
                while part := await reader.read(4096):
                    head = head or part[:12]
                    text = text[-64:] + part
        except ConnectionError:
            return "cut"
        finally:
            writer.close()
        if head.startswith(b"HTTP/1.1 4") and not head.endswith(b"429"):
            return f"refused! {head!r}"
        return "answered" if b"[DONE]" in text or b'"error"' in text else "cut"

    async def _bad(self, session: aiohttp.ClientSession) -> str:
        body = self._choose.choice(_BAD)
        headers = {"content-type": "application/json"}
        async with session.post("/v1/completions", data=body, headers=headers) as response:
            answer = await response.json()
        refused = 400 <= response.status < 500 and answer["error"]["message"]
        return "refused" if refused else f"not refused! {response.status} {answer} {body[:80]!r}"

    async def _half_a_request(self, session: aiohttp.ClientSession) -> str:
        """The rest never comes: the server says so, unless the client leaves before that."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(
            self._choose.choice(
                (b"POST /v1", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")
            )
        )
        stays = self._choose.random() < 0.5
        try:
            async with asyncio.timeout(HUNG_S):
                said = await reader.read() if stays else b""
        finally:
            writer.close()
        if not stays:
            return "left"
        return "told" if b" 408 " in said else f"not told! {said[:100]!r}"

    async def _operator(self, session: aiohttp.ClientSession) -> str:
        path = self._choose.choice(
            ("/flush_cache", "/metrics", "/v1/requests", "/health_generate", "/v1/models")
        )
        method = "POST" if path == "/flush_cache" else "GET"
        async with session.request(method, path) as response:
            await response.read()
        return "answered" if response.status == 200 else f"status {response.status}!"

    async def _send(
        self, path: str, body: bytes, limit: int = 1 << 16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=limit)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer


def _num_choices(body: dict[str, Any]) -> int:
    several = isinstance(body["prompt"], list) and isinstance(body["prompt"][0], str)  # else token ids
    return int(body["n"]) * (len(body["prompt"]) if several else 1)


def _judge_whole(status: int, answer: dict[str, Any], num_choices: int) -> str:
    if status == 200:
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        if len(reasons) != num_choices or not all(reasons):
            return f"incomplete! {answer}"
        return "aborted" if "abort" in reasons else "answered"
    return _judge_error(answer["error"], status)


def _judge_error(error: dict[str, Any], status: int = 200) -> str:
    """Refusals and time-outs are ends that a visit may come to."""
    if error["code"] in ("queue_full", "queue_timeout", "request_timeout"):
        return str(error["code"])
    return f"error {status}! {error}"


async def _read_stream(
    response: aiohttp.ClientResponse,
    num_choices: int,
    at_first: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
) -> str:
    if response.status != 200:
        return _judge_whole(response.status, await response.json(), num_choices)
    reasons: dict[int, str] = {}
    failure, num_done = "", 0
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if num_done or failure:
            return f"more came behind the end! {line!r}"
        if line == b"data: [DONE]\n":
            num_done += 1
            continue
        event = json.loads(line[6:])
        if "error" in event:
            failure = _judge_error(event["error"])
            continue
        if at_first is not None:
            await at_first(event)
            at_first = None
        for choice in event["choices"]:
            if choice["finish_reason"]:
                if choice["index"] in reasons:
                    return "one choice ended twice!"
                reasons[choice["index"]] = choice["finish_reason"]
    if failure:
        return failure
    if not num_done or len(reasons) != num_choices:
        return f"incomplete! {reasons} {num_done}"
    return "aborted" if "abort" in reasons.values() else "answered"
