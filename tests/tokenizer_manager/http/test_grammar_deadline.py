"""The time limit of a grammar begins when the body has arrived, in every API."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, Final

import pytest

from engine.grammar.compile.compile_queue import CompileQueue
from engine.grammar.compile.worker import CompileResult, CompileWorker, WorkerLostError
from engine.runtime.config.answer_config import RequestLimits
from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarUse
from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.body_reader import BodyReader, T
from engine.tokenizer_manager.http.exchange import DisconnectScope
from engine.tokenizer_manager.http.schema.values import Body

from ..fake_engine import FakeClock, FakeEngine, make_services
from .calling import call

HI: Final = [{"role": "user", "content": "hi"}]
SCHEMA: Final = {"type": "object"}
FORMAT: Final = {"type": "json_schema", "name": "a", "schema": SCHEMA}
TOOLS: Final = [{"name": "f", "input_schema": SCHEMA}]
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "x", "guided_json": SCHEMA, "max_tokens": 9},
    "/v1/chat/completions": {"messages": HI, "guided_json": SCHEMA},
    "/v1/completions/render": {"prompt": "x", "guided_json": SCHEMA, "max_tokens": 9},
    "/v1/chat/completions/render": {"messages": HI, "guided_json": SCHEMA},
    "/generate": {"text": "x", "sampling_params": {"json_schema": SCHEMA}},
    "/v1/responses": {"input": "x", "text": {"format": FORMAT}},
    "/v1/messages": {"messages": HI, "max_tokens": 9, "tools": TOOLS, "tool_choice": {"type": "any"}},
    "/api/chat": {"messages": HI, "format": SCHEMA, "stream": False},
    "/api/generate": {"prompt": "x", "format": SCHEMA, "stream": False},
}


async def no_worker() -> CompileWorker:
    raise WorkerLostError


class BusyQueue(CompileQueue):
    """Refuses all, and keeps the time that each request had waited."""

    def __init__(self) -> None:
        super().__init__(no_worker, 5.0)
        self.waited_s: list[float] = []

    async def compile(self, use: GrammarUse, waited_s: float = 0.0) -> list[CompileResult]:
        self.waited_s.append(waited_s)
        raise RequestError("others wait", code="queue_full", status=429)


class BusyReader(BodyReader):
    """Reads each body after three seconds."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._test_clock = clock

    async def read(
        self, body: bytes, limits: RequestLimits, build: Callable[[Body], T], scope: DisconnectScope
    ) -> T:
        self._test_clock.now_s += 3.0
        return await super().read(body, limits, build, scope)


@pytest.mark.parametrize("path", list(BODIES))
def test_the_time_of_a_grammar_begins_with_its_body(path: str):
    clock, queue = FakeClock(), BusyQueue()
    services = make_services(FakeEngine(lambda request: ()), clock=clock, compile_queue=queue)
    services = dataclasses.replace(services, body_reader=BusyReader(clock))

    reply = asyncio.run(call(App(services), path, BODIES[path]))

    assert (reply.status, queue.waited_s) == (429, [3.0]), reply.body
