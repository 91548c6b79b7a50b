"""`CompileQueue` with a fake worker and virtual time: results, waits, limits and lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.compile.compile_queue import (
    GRACE_S,
    LONG_CHARS,
    MAX_QUEUED,
    MAX_RESULTS,
    MAX_WALL,
    CompileQueue,
)
from engine.grammar.compile.worker import CompileResult, CompileWorker, WorkerLostError
from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, Triggered
from tests.grammar.compile.virtual_time import VirtualTimeLoop

Answer = CompileResult | Exception
LIMIT_S = 5.0


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def use(text: str) -> GrammarUse:
    return GrammarUse(spec=spec(text))


class Bench:
    """Workers that wait until the test answers, or answer at once.

    Attributes:
        may_start: workers wait for it, if it is given.
        asked: texts of the grammars in the order in which workers got them.
        alive, started: numbers of workers.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.alive = self.started = 0
        self.automatic: Callable[[str], Answer] | None = None
        self.start_error: WorkerLostError | None = None
        self.may_start: asyncio.Event | None = None
        self._waiting: dict[str, asyncio.Future[CompileResult]] = {}
        self.queue = CompileQueue(self.start, LIMIT_S)

    async def start(self) -> CompileWorker:
        self.started += 1
        if self.may_start is not None:
            await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error
        self.alive += 1
        return FakeWorker(self)

    async def ask(self, text: str) -> CompileResult:
        self.asked.append(text)
        future: asyncio.Future[CompileResult] = asyncio.get_running_loop().create_future()
        self._waiting[text] = future
        if self.automatic is not None:
            self.answer(text, self.automatic(text))
        return await future

    def answer(self, text: str, answer: Answer) -> None:
        future = self._waiting.pop(text)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class FakeWorker(CompileWorker):
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._is_alive = True

    async def compile(self, spec: GrammarSpec) -> CompileResult:
        return await self._bench.ask(spec.text)

    async def kill(self) -> None:
        self._bench.alive -= self._is_alive
        self._is_alive = False


GOOD = CompileResult()
BAD = CompileResult("invalid_regex", "the regular expression is bad")
BOMB = CompileResult("schema_too_complex", "it took longer than 5 s")


def run(test: Callable[[Bench], Coroutine[None, None, None]]) -> None:
    """Run a test in virtual time; afterwards no worker is alive."""

    async def main() -> None:
        bench = Bench()
        try:
            await test(bench)
        finally:
            await bench.queue.close()
        assert bench.alive == 0

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def outcome(bench: Bench, text: str, waited_s: float = 0.0) -> str:
    """The error code, or "good"."""
    try:
        await bench.queue.compile(use(text), waited_s)
    except GrammarError as error:
        return error.code
    except RequestError as error:
        return f"{error.status} {error.code}"
    return "good"


def test_nothing_is_started_before_the_first_grammar_unless_asked():
    async def test(bench: Bench) -> None:
        await bench.queue.compile(GrammarUse())
        assert bench.started == 0
        bench.queue.start()
        bench.queue.start()
        await settle()
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a") == "good"
        assert bench.started == 1

    run(test)


def test_results_are_kept():
    async def test(bench: Bench) -> None:
        answers = {"bad": BAD, "bomb": BOMB}
        bench.automatic = lambda text: answers.get(text, GOOD)
        for _ in range(3):
            assert await outcome(bench, "a") == "good"
            assert await outcome(bench, "bad") == "invalid_regex"
            assert await outcome(bench, "bomb") == "schema_too_complex"
        assert bench.asked == ["a", "bad", "bomb"]
        assert bench.started == 1
        assert bench.queue.compiles(use("a"))
        assert not bench.queue.compiles(use("bad"))
        assert not bench.queue.compiles(use("new"))

    run(test)


def test_all_grammars_of_a_request_are_compiled():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: BAD if text == "b" else GOOD
        both = GrammarUse(triggered=(Triggered(b"<a>", spec("a")), Triggered(b"<b>", spec("b"))))
        with pytest.raises(GrammarError, match="is bad"):
            await bench.queue.compile(both)
        assert bench.asked == ["a", "b"]

    run(test)


def test_requests_with_the_same_grammar_share_its_compilation():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, "a")) for _ in range(5)]
        await settle()
        tasks[0].cancel()
        await settle()
        bench.answer("a", GOOD)
        assert await asyncio.gather(*tasks[1:]) == ["good"] * 4
        assert bench.asked == ["a"]

    run(test)


def test_two_at_once_and_the_queue_is_bounded():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, "0")), asyncio.create_task(outcome(bench, "1"))]
        await settle()
        assert bench.asked == ["0", "1"]
        tasks += [asyncio.create_task(outcome(bench, str(i))) for i in range(2, MAX_QUEUED + 2)]
        await settle()
        with pytest.raises(RequestError, match=f"{MAX_QUEUED} of them wait") as caught:
            await bench.queue.compile(use("one more"))
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "queue_full", 5)
        same = asyncio.create_task(outcome(bench, "7"))  # one of those that wait already
        await settle()
        bench.automatic = lambda text: GOOD
        bench.answer("1", GOOD)
        bench.answer("0", GOOD)
        assert await asyncio.gather(*tasks, same) == ["good"] * (len(tasks) + 1)
        assert bench.started == 1

    run(test)


def test_the_number_of_results_is_bounded():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: GOOD
        for i in range(MAX_RESULTS + 1):
            await outcome(bench, str(i))
        assert not bench.queue.compiles(use("0"))
        assert bench.queue.compiles(use("1"))

    run(test)


def test_short_grammars_go_first_and_long_ones_one_at_a_time():
    async def test(bench: Bench) -> None:
        texts = [str(n) * (LONG_CHARS + 1) for n in range(3)]
        tasks = [asyncio.create_task(outcome(bench, text)) for text in texts]
        await settle()
        assert bench.asked == texts[:1]
        tasks += [asyncio.create_task(outcome(bench, text)) for text in ("bb", "ccc", "a")]
        await settle()
        assert bench.asked[1:] == ["bb"]
        for text, following in (("bb", "a"), ("a", "ccc")):
            bench.answer(text, GOOD)
            await settle()
            assert bench.asked[-1] == following
        bench.answer(texts[0], GOOD)
        await settle()
        assert bench.asked[-1] == texts[1]
        bench.automatic = lambda text: GOOD
        bench.answer("ccc", GOOD)
        bench.answer(texts[1], GOOD)
        assert await asyncio.gather(*tasks) == ["good"] * 6

    run(test)


def test_a_grammar_that_no_request_waits_for_leaves_the_queue():
    async def test(bench: Bench) -> None:
        gone = [asyncio.create_task(outcome(bench, text)) for text in ("a", "b", "c", "d", "d")]
        await settle()
        for task in gone[:4]:
            task.cancel()
        await settle()
        bench.automatic = lambda text: GOOD
        bench.answer("a", GOOD)
        bench.answer("b", GOOD)
        assert await gone[4] == "good"
        assert bench.asked == ["a", "b", "d"]

    run(test)


def test_a_compilation_under_way_is_finished_for_the_next_request():
    async def test(bench: Bench) -> None:
        task = asyncio.create_task(outcome(bench, "a"))
        await settle()
        task.cancel()
        await settle()
        bench.answer("a", GOOD)
        await settle()
        assert bench.queue.compiles(use("a"))
        assert await outcome(bench, "b") == "429 queue_full"
        bench.answer("b", BOMB)
        assert await outcome(bench, "b") == "schema_too_complex"
        assert bench.asked == ["a", "b"]

    run(test)


def test_a_request_waits_no_longer_than_the_time_limit_and_is_not_blamed():
    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(bench.queue.compile(use(text))) for text in ("a", "b", "c")]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert loop.time() == pytest.approx(LIMIT_S + GRACE_S)
        assert [(getattr(error, "status", 0), getattr(error, "retry_after_s", 0)) for error in errors] == [
            (429, 5)
        ] * 3
        assert bench.asked == ["a", "b"]

    run(test)


def test_what_a_request_has_waited_is_a_part_of_its_time():
    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        assert await outcome(bench, "a", waited_s=3.0) == "429 queue_full"
        assert loop.time() == pytest.approx(LIMIT_S + GRACE_S - 3.0)
        bench.answer("a", GOOD)
        assert await outcome(bench, "a", waited_s=3.0) == "good"

    run(test)


def test_a_request_without_time_left_starts_nothing():
    async def test(bench: Bench) -> None:
        bench.queue.start()
        await settle()
        assert await outcome(bench, "a", waited_s=9.0) == "429 queue_full"
        assert bench.asked == []
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a") == "good"
        assert await outcome(bench, "a", waited_s=9.0) == "good"  # it is known

    run(test)


@pytest.mark.parametrize(("answer", "code"), [(GOOD, "good"), (BAD, "invalid_regex")])
def test_requests_wait_for_the_start_of_the_worker(answer: CompileResult, code: str):
    async def test(bench: Bench) -> None:
        bench.may_start = asyncio.Event()
        bench.automatic = lambda text: answer
        tasks = [asyncio.create_task(outcome(bench, f"{i}")) for i in range(9)]
        await asyncio.wait(tasks, timeout=LIMIT_S + 1)
        assert not any(task.done() for task in tasks)
        bench.may_start.set()
        assert await asyncio.gather(*tasks) == [code] * 9
        assert bench.started == 1

    run(test)


def test_a_start_that_takes_too_long_is_not_the_client_s_fault():
    async def test(bench: Bench) -> None:
        bench.may_start = asyncio.Event()
        begin_s = asyncio.get_running_loop().time()
        with pytest.raises(RequestError, match="is starting") as caught:
            await bench.queue.compile(use("a"))
        assert asyncio.get_running_loop().time() - begin_s == pytest.approx(2 * LIMIT_S + GRACE_S)
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (
            503,
            "grammar_unavailable",
            1,
        )
        bench.automatic = lambda text: GOOD
        bench.may_start.set()
        assert await outcome(bench, "a") == "good"
        assert bench.started == 1

    run(test)


def test_a_worker_that_does_not_start_is_started_again_by_the_next_grammar():
    async def test(bench: Bench) -> None:
        bench.start_error = WorkerLostError("no memory")
        with pytest.raises(RequestError, match="no memory") as caught:
            await bench.queue.compile(use("a"))
        assert caught.value.status == 503
        bench.start_error, bench.automatic = None, lambda text: GOOD
        assert await outcome(bench, "a") == "good"

    run(test)


def test_the_figures_of_a_compilation_are_kept():
    async def test(bench: Bench) -> None:
        measured = CompileResult(compile_s=0.5, forced_share=0.25)
        bench.automatic = lambda text: measured
        for _ in range(2):
            assert await bench.queue.compile(use("a")) == [measured]
        assert bench.asked == ["a"]

    run(test)


def test_a_lost_worker_is_replaced_and_its_grammars_are_not_blamed():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: WorkerLostError("killed") if bench.started == 1 else GOOD
        assert await outcome(bench, "a") == "503 grammar_unavailable"
        assert bench.alive == 0
        assert await outcome(bench, "a") == "good"
        assert bench.started == 2

    run(test)


def test_a_lost_compilation_costs_neither_its_worker_nor_its_grammar():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: CompileResult(lost="busy") if text == "a" else GOOD
        assert await outcome(bench, "a") == "503 grammar_unavailable"
        assert await outcome(bench, "b") == "good"
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a") == "good"
        assert (bench.started, bench.alive) == (1, 1)

    run(test)


def test_a_compilation_that_makes_no_progress_costs_its_worker(caplog):
    async def test(bench: Bench) -> None:
        assert await outcome(bench, "a") == "429 queue_full"
        await asyncio.sleep(MAX_WALL * LIMIT_S)
        assert bench.alive == 0
        assert "was lost: it made no progress" in caplog.text
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a") == "good"

    run(test)


def test_close_ends_waiting_requests_and_the_worker():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, str(i))) for i in range(4)]
        await settle()
        bench.answer("0", GOOD)
        await settle()
        await bench.queue.close()
        assert bench.alive == 0
        assert await asyncio.gather(*tasks) == ["good", *["503 grammar_unavailable"] * 3]
        assert await outcome(bench, "late") == "503 grammar_unavailable"

    run(test)


def test_a_bug_in_a_worker_s_answer_leaves_no_request_waiting(caplog):
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: ValueError("what is this") if text == "a" else GOOD
        assert await outcome(bench, "a") == "503 grammar_unavailable"
        assert await outcome(bench, "b") == "good"

    run(test)
    assert "the compilation of a grammar failed" in caplog.text
