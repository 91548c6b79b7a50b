"""The event loop's longest pause under any one request, accepted or refused.

Measured is the CPU time of the event loop's thread between two turns of the loop: other processes on the machine do not
count, nor does what the scripted scheduler does with a message. Two things are not in it: waits for the GIL, which
threads give up within a switch interval (see `template_renderer.share_the_gil`), and single steps of C code on threads,
which are as long as the body limit allows.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.runtime.feasibility import Capacity
from engine.runtime.messages import SchedulerInput
from engine.tokenizer_manager.conversation import template_sandbox
from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.body_reader import BodyReader

from ..fake_engine import WAIT_S, FakeEngine, make_services, say_all
from .calling import Reply, call

LONGEST_PAUSE_S = 0.2
"""The largest share is that of 2,048 prompts in one request."""

QUADRATIC = """
    {%- for m in messages %}{% for other in messages %}{% if other.role == "none" %}{% endif %}{% endfor %}
    {{- m.content }}{% endfor %}"""
CAPACITY = Capacity(
    max_model_len=131_072, num_pages=1 << 18, page_size=4, max_running_requests=64, vocab_size=258
)
MB = 1 << 20
BODY_BYTES = 15 * MB  # the limit is 16
PART = {"type": "text", "text": "x"}
CHAT, COMPLETIONS, TOKENIZE, PINS = "/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/cache/pins"


def chat(num_messages: int, content: str = "x", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * num_messages, **more}


def tool(number: int, **more: Any) -> dict[str, Any]:
    """A tool with a schema of 600 bytes."""
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "x" * 20} for i in range(8)},
        "required": ["p0"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": f"t{number}", "parameters": schema, **more}}


def json_schema(schema: dict[str, Any], times: int = 1) -> dict[str, Any]:
    properties = {f"p{i}": schema for i in range(times)}
    whole = {"type": "object", "properties": properties, "required": ["p0"], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": whole}}


def filled(begin: bytes, part: bytes, end: bytes, num_bytes: int = BODY_BYTES) -> Callable[[], bytes]:
    """Makes a large body; made when it is sent, since all of them would take some hundred MB."""
    return lambda: begin + part * (num_bytes // len(part)) + end


Body = dict[str, Any] | bytes | Callable[[], bytes]
REQUESTS: dict[str, tuple[str, Body, int]] = {
    "a quadratic chat": (CHAT, chat(600), 200),
    "a quadratic chat to tokenize": (TOKENIZE, chat(600), 200),
    "a quadratic chat to pin": (PINS, chat(600, ttl=1), 200),
    "a quadratic chat that is too slow": (CHAT, chat(4096), 400),
    "too many messages": (CHAT, chat(5000), 400),
    "a message too long": (CHAT, filled(b'{"messages": [{"role": "user", "content": "', b"x", b'"}]}'), 400),
    "a long message": (CHAT, chat(1, "hello " * 20_000), 200),
    "an unknown field in each message": (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "y": 1}] * 600},
        200,
    ),
    "many content parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [PART] * 15_000}]},
        200,
    ),
    "many tools": (CHAT, chat(1, tools=[{"type": "function"}] * 20_000), 400),
    "tools without end": (CHAT, filled(b'{"messages": [], "tools": [', b'"x",', b'""]}'), 400),
    "tools": (TOKENIZE, chat(1, tools=[tool(i) for i in range(400)]), 200),
    "strict tools": (TOKENIZE, chat(1, tools=[tool(i, strict=True) for i in range(400)]), 200),
    "tools over 512 kB": (TOKENIZE, chat(1, tools=[tool(i, description="x" * 600) for i in range(512)]), 400),
    "a large schema": (
        CHAT,
        chat(1, response_format=json_schema(tool(0)["function"]["parameters"], 400)),
        200,
    ),
    "a schema over 512 kB": (
        CHAT,
        chat(1, response_format=json_schema(tool(0)["function"]["parameters"], 1200)),
        400,
    ),
    "a long shortest answer": (
        CHAT,
        chat(1, max_tokens=1, response_format=json_schema({"const": "x " * 8000})),
        400,
    ),
    "a long text to tokenize": (TOKENIZE, {"prompt": "hello " * 160_000}, 200),
    "2,048 prompts": (COMPLETIONS, {"prompt": ["hello"] * 2048}, 200),
    "2,048 prompts of ids": (COMPLETIONS, {"prompt": [[65] * 60] * 2048}, 200),
    "the longest prompt, 64 times": (COMPLETIONS, {"prompt": [65] * 131_000, "n": 64}, 200),
    "90,000 prompts": (COMPLETIONS, {"prompt": [[1]] * 90_000}, 400),
    "ids without end": (COMPLETIONS, filled(b'{"prompt": [', b"1,", b"1]}"), 400),
    "floats without end": (COMPLETIONS, filled(b'{"prompt": [', b"1e5,", b"1]}"), 400),
    "large ids without end": (COMPLETIONS, filled(b'{"prompt": [', b"123456789,", b"1]}", 4 * MB), 400),
    "huge numbers": (COMPLETIONS, filled(b'{"prompt": [', b"1" * 4000 + b",", b"1]}", 4 * MB), 400),
    "NaN after many numbers": (COMPLETIONS, filled(b'{"prompt": [', b"1,", b"NaN]}", 4 * MB), 400),
    "strings without end": (COMPLETIONS, filled(b'{"prompt": [', b'"x",', b'"x"]}'), 400),
    "stop strings without end": (COMPLETIONS, filled(b'{"prompt": "x", "stop": [', b'"x",', b'"x"]}'), 400),
    "stop ids without end": (
        COMPLETIONS,
        filled(b'{"prompt": "x", "stop_token_ids": [', b"1,", b"1]}", 4 * MB),
        400,
    ),
    "a stop string too long": (COMPLETIONS, filled(b'{"prompt": "x", "stop": "', b"x", b'"}'), 400),
    "all stop strings": (COMPLETIONS, {"prompt": "x", "stop": ["x" * 1024] * 64}, 200),
    "a large logit_bias": (
        COMPLETIONS,
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(40_000)}},
        400,
    ),
    "many unknown fields": (COMPLETIONS, {"prompt": "x", **{f"k{i}": 1 for i in range(40_000)}}, 200),
    "a key twice after many": (
        COMPLETIONS,
        filled(b'{"k": 1', b', "k": 1', b"}", 300_000),
        400,
    ),
    "a long model name": (COMPLETIONS, filled(b'{"prompt": "x", "model": "', b"x", b'"}'), 404),
    "escapes": (COMPLETIONS, filled(b'{"prompt": "', b"\\u00e9", b'"}'), 400),
    "half of a surrogate pair": (COMPLETIONS, filled(b'{"prompt": "', b"\\ud83d\\ude00", b'\\ud800"}'), 400),
    "nested deeply": (COMPLETIONS, b"[" * 60_000, 400),
    "nested without end": (COMPLETIONS, filled(b"", b"[", b""), 400),
    "no JSON": (COMPLETIONS, filled(b"", b"x", b""), 400),
    "spaces": (COMPLETIONS, filled(b"", b" ", b""), 400),
    "an over-long body": (COMPLETIONS, b" " * (17 * MB), 413),
}


class Served(NamedTuple):
    """A reply, and the longest CPU time between two turns of the event loop."""

    reply: Reply
    pause_s: float


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """As in the process: collections do not look at what was there before the requests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class OtherProcess(FakeEngine):
    """A scripted scheduler that counts the CPU time of its own part, which a real one spends elsewhere.

    Attributes:
        cpu_s: seconds so far.
    """

    cpu_s = 0.0

    def receive(self, message: SchedulerInput) -> None:
        """See `FakeEngine`. Encoding the message is the manager's work."""
        msgspec.msgpack.encode(message)
        begun_s = time.thread_time()
        super().receive(message)
        self.cpu_s += time.thread_time() - begun_s


def serve(path: str, body: Body) -> Served:
    engine = OtherProcess(say_all("x"))
    services = make_services(engine, chat_template=QUADRATIC, capacity=CAPACITY, max_queued_requests=4096)
    content = body() if callable(body) else body if isinstance(body, bytes) else json.dumps(body).encode()

    async def main() -> Served:
        app = App(services)
        await call(app, CHAT, chat(1))  # what the first request does once is not measured
        gc.collect()  # nor what other tests have left
        request = asyncio.create_task(call(app, path, content))
        pause_s, turned_s = 0.0, time.thread_time() - engine.cpu_s
        async with asyncio.timeout(WAIT_S):
            while not request.done():
                await asyncio.sleep(0)
                now_s = time.thread_time() - engine.cpu_s
                pause_s, turned_s = max(pause_s, now_s - turned_s), now_s
        return Served(await request, pause_s)

    try:
        return asyncio.run(main())
    finally:
        services.close()


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_stalls_the_event_loop(monkeypatch, name):
    path, body, status = REQUESTS[name]
    if status == 400:
        monkeypatch.setattr(template_sandbox, "MAX_RENDER_CPU_S", 0.5)
    served = serve(path, body)

    assert served.reply.status == status, served.reply.body[:300]
    assert served.pause_s < LONGEST_PAUSE_S


def test_a_pause_would_be_noticed(monkeypatch):
    """The same request, parsed on the event loop."""

    async def in_place(self: BodyReader, body: bytes, limits: Any, build: Any, scope: Any) -> Any:
        begun_s = time.thread_time()
        while time.thread_time() < begun_s + LONGEST_PAUSE_S:
            pass
        return build(json.loads(body))

    monkeypatch.setattr(BodyReader, "read", in_place)
    assert serve(COMPLETIONS, {"prompt": "x"}).pause_s >= LONGEST_PAUSE_S
