"""Requests with grammars: sent at once, released or failed when their grammar was compiled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from queue import Queue

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.compile.compile_queue import CompileQueue
from engine.grammar.compile.worker import CompileResult, CompileWorker, WorkerLostError
from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse
from engine.runtime.messages import BatchTextOutput, GrammarReady
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.generation import Generation, GenerationRequest

from .fake_engine import CAPACITY, LENGTH, WAIT_S, row
from .test_manager import Setup, texts

USE = GrammarUse(spec=GrammarSpec(GrammarKind.REGEX, "a+"))
WHY = "scheduler was killed by SIGKILL"


async def no_worker() -> CompileWorker:
    raise WorkerLostError


class FakeQueue(CompileQueue):
    """Compiles what the test says.

    Attributes:
        known: grammars that are known to compile.
        running: waits, in order.
        canceled: grammars of the waits that were canceled.
        waited_s: the time that each request had waited.
    """

    def __init__(self, *known: GrammarUse) -> None:
        super().__init__(no_worker, 5.0)
        self.known = list(known)
        self.running: list[asyncio.Future[None]] = []
        self.canceled: list[GrammarUse] = []
        self.waited_s: list[float] = []

    def compiles(self, use: GrammarUse) -> bool:
        return use in self.known

    async def compile(self, use: GrammarUse, waited_s: float = 0.0) -> list[CompileResult]:
        self.waited_s.append(waited_s)
        compiled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running.append(compiled)
        try:
            await compiled
        except asyncio.CancelledError:
            self.canceled.append(use)
            raise
        return []


class GrammarSetup(Setup):
    """A manager with a fake queue."""

    def __init__(self, *known: GrammarUse) -> None:
        self.queue = FakeQueue(*known)
        super().__init__(compile_queue=self.queue)

    async def constrained(self, *, n: int = 1, waited_s: float | None = None) -> Generation:
        """Start a request that has waited, and the wait for its grammar."""
        request = GenerationRequest(
            prompts=["hi"],
            sampling=SamplingParams(),
            n=n,
            received_s=None if waited_s is None else self.manager.now_s() - waited_s,
            grammar=USE,
            grammar_param="regex",
        )
        generation = await self.manager.start(request)
        await asyncio.sleep(0)
        return generation


def run(test: Callable[[GrammarSetup], Awaitable[None]], *known: GrammarUse) -> None:
    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            await test(GrammarSetup(*known))

    asyncio.run(main())


async def settled() -> None:
    """Let the tasks that can run do so."""
    for _ in range(4):
        await asyncio.sleep(0)


def taken(ready: Queue[GrammarReady]) -> list[str]:
    return [ready.get_nowait().rid for _ in range(ready.qsize())]


def test_a_known_grammar_is_sent_as_such_without_a_wait():
    async def test(setup: GrammarSetup) -> None:
        await setup.constrained()

        grammar = setup.engine.next_request().grammar
        assert grammar is not None and grammar.compiles
        assert setup.queue.running == []

    run(test, USE)


def test_an_unknown_grammar_is_sent_at_once_and_released_for_each_choice():
    async def test(setup: GrammarSetup) -> None:
        await setup.constrained(n=2)
        requests = [setup.engine.next_request() for _ in range(2)]
        assert [request.grammar for request in requests] == [USE, USE]  # unknown: the scheduler waits
        assert setup.engine.ready.empty()

        [compiled] = setup.queue.running
        compiled.set_result(None)
        await settled()
        assert taken(setup.engine.ready) == [request.rid for request in requests]

    run(test)


def test_the_wait_of_a_body_is_time_of_its_grammar():
    async def test(setup: GrammarSetup) -> None:
        await setup.constrained(waited_s=100.0)
        await setup.constrained()

        late, at_once = setup.queue.waited_s
        assert 100.0 <= late <= 100.0 + WAIT_S
        assert 0.0 <= at_once <= WAIT_S

    run(test)


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (GrammarError("it has no end", "schema_too_complex"), 400, "schema_too_complex", "regex"),
        (RequestError("64 grammars wait", code="queue_full", status=429), 429, "queue_full", None),
        (RequestError("later", code="grammar_unavailable", status=503), 503, "grammar_unavailable", None),
        (ValueError("a bug"), 500, "grammar_unavailable", "regex"),
    ],
)
def test_a_refused_grammar_fails_its_request_alone(error, status, code, param, caplog):
    async def test(setup: GrammarSetup) -> None:
        other = await setup.start("hi")
        free = setup.engine.next_request()
        generation = await setup.constrained(n=2)
        requests = [setup.engine.next_request() for _ in range(2)]
        with caplog.at_level(logging.CRITICAL):
            setup.queue.running[0].set_exception(error)
            await settled()

        with pytest.raises(RequestError) as caught:
            await texts(generation)
        assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, param)
        assert {setup.engine.next_abort().rid for _ in requests} == {request.rid for request in requests}
        assert setup.engine.ready.empty()
        setup.manager.on_message(BatchTextOutput([row(free, "x", finish=LENGTH)]))
        assert await texts(other) == ["x"]
        assert len(setup.manager.request_log) == 0

    run(test)


def test_a_client_that_leaves_ends_the_wait_for_its_grammar():
    async def test(setup: GrammarSetup) -> None:
        generation = await setup.constrained()
        generation.close()
        await settled()

        assert setup.queue.canceled == [USE]
        assert setup.engine.next_abort().rid == generation.choices[0].rid

    run(test)


def test_the_end_of_the_last_choice_ends_the_wait_for_its_grammar():
    async def test(setup: GrammarSetup) -> None:
        generation = await setup.constrained(n=2)
        requests = [setup.engine.next_request() for _ in range(2)]
        setup.manager.on_message(BatchTextOutput([row(requests[0], "", finish=LENGTH)]))
        await settled()
        assert setup.queue.canceled == []
        setup.manager.on_message(BatchTextOutput([row(requests[1], "", finish=LENGTH)]))
        await settled()

        assert setup.queue.canceled == [USE]
        assert await texts(generation) == ["", ""]

    run(test)


def test_a_request_that_was_submitted_again_is_released_under_its_new_id():
    async def test(setup: GrammarSetup) -> None:
        await setup.constrained()
        first = setup.engine.next_request()
        setup.manager.peers_lost(WHY)
        setup.manager.peers_back(CAPACITY)
        again = setup.engine.next_request()
        assert again.rid != first.rid
        assert again.grammar == USE

        setup.queue.running[0].set_result(None)
        await settled()
        assert taken(setup.engine.ready) == [again.rid]

    run(test)


def test_a_grammar_that_is_compiled_during_a_restart_is_sent_as_known():
    async def test(setup: GrammarSetup) -> None:
        await setup.constrained()
        setup.engine.next_request()
        setup.manager.peers_lost(WHY)
        setup.queue.running[0].set_result(None)
        await settled()
        assert setup.engine.ready.empty()  # there is no scheduler that waits for it

        setup.manager.peers_back(CAPACITY)
        again = setup.engine.next_request()
        assert again.grammar is not None and again.grammar.compiles

    run(test)


def test_a_request_whose_grammar_was_compiled_before_is_submitted_again_as_such():
    async def test(setup: GrammarSetup) -> None:
        await setup.constrained()
        first = setup.engine.next_request()
        setup.queue.running[0].set_result(None)
        await settled()
        assert taken(setup.engine.ready) == [first.rid]

        setup.manager.peers_lost(WHY)
        setup.manager.peers_back(CAPACITY)
        again = setup.engine.next_request()
        assert again.grammar is not None and again.grammar.compiles

    run(test)


def test_without_a_queue_grammars_are_trusted():
    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            setup = Setup()
            request = GenerationRequest(prompts=["hi"], sampling=SamplingParams(), grammar=USE)
            await setup.manager.start(request)
            grammar = setup.engine.next_request().grammar
            assert grammar is not None and grammar.compiles

    asyncio.run(main())
