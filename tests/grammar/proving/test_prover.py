"""`Prover` with fake workers and a fake clock: results, limits, timeouts and lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.proving.known_results import BAD_RESULT_S, MAX_RESULTS
from engine.grammar.proving.messages import ProofResult
from engine.grammar.proving.outage import START_FAILED_S, UNAVAILABLE_S
from engine.grammar.proving.proof_queue import LONG_CHARS, MAX_LONG_QUEUED, MAX_QUEUED
from engine.grammar.proving.prover import Prover
from engine.grammar.proving.worker import WorkerLostError
from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, Triggered
from tests.grammar.proving.virtual_time import VirtualTimeLoop

Answer = ProofResult | Exception


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def use(text: str) -> GrammarUse:
    return GrammarUse(spec=spec(text))


class Bench:
    """Workers that wait until the test answers, or answer at once.

    Attributes:
        may_start: workers wait for it, if it is given.
        may_end: killed workers wait for it, if it is given.
        asked: texts of the grammars in the order in which workers got them.
        measured: of each, whether it is to be measured.
        alive, started: numbers of workers.
        now_s: of the clock.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.measured: list[bool] = []
        self.alive = self.started = 0
        self.now_s = 1000.0
        self.automatic: Callable[[str], Answer] | None = None
        self.start_error: WorkerLostError | None = None
        self.may_start: asyncio.Event | None = None
        self.may_end: asyncio.Event | None = None
        self._waiting: dict[str, asyncio.Future[ProofResult]] = {}
        self.prover = Prover(self.start, timeout_s=5.0, clock=lambda: self.now_s)

    async def start(self) -> FakeWorker:
        if self.may_start is not None:
            await self.may_start.wait()
        if self.start_error is not None:
            raise self.start_error
        self.alive += 1
        self.started += 1
        return FakeWorker(self)

    async def ask(self, text: str) -> ProofResult:
        self.asked.append(text)
        future: asyncio.Future[ProofResult] = asyncio.get_running_loop().create_future()
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


class FakeWorker:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def prove(self, spec: GrammarSpec, timeout_s: float, *, measures: bool = False) -> ProofResult:
        self._bench.measured.append(measures)
        return await self._bench.ask(spec.text)

    async def kill(self) -> None:
        if self._bench.may_end is not None:
            await self._bench.may_end.wait()
        self._bench.alive -= 1


GOOD = ProofResult()
BAD = ProofResult("invalid_regex", "the regular expression is bad")


def run(test: Callable[[Bench], Coroutine[None, None, None]]) -> None:
    """Run a test in virtual time; afterwards no worker is alive."""

    async def main() -> None:
        bench = Bench()
        try:
            await test(bench)
        finally:
            await bench.prover.close()
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
        await bench.prover.prove(use(text), waited_s)
    except GrammarError as error:
        return error.code
    except RequestError as error:
        return f"{error.status} {error.code}"
    return "good"


def test_nothing_is_started_before_the_first_grammar():
    async def test(bench: Bench) -> None:
        await bench.prover.prove(GrammarUse())
        assert bench.started == 0

    run(test)


def test_results_are_kept():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: BAD if text == "bad" else GOOD
        for _ in range(3):
            assert await outcome(bench, "a") == "good"
            assert await outcome(bench, "bad") == "invalid_regex"
        assert bench.asked == ["a", "bad"]
        assert bench.started == 1
        assert bench.prover.is_proved(use("a"))
        assert not bench.prover.is_proved(use("bad"))
        assert not bench.prover.is_proved(use("new"))

    run(test)


def test_a_refused_grammar_is_proved_again_after_a_while():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: BAD
        await outcome(bench, "a")
        bench.now_s += BAD_RESULT_S + 1
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a") == "good"

    run(test)


def test_all_grammars_of_a_request_are_proved():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: BAD if text == "b" else GOOD
        both = GrammarUse(triggered=(Triggered(b"<a>", spec("a")), Triggered(b"<b>", spec("b"))))
        with pytest.raises(GrammarError, match="is bad"):
            await bench.prover.prove(both)
        assert bench.asked == ["a", "b"]

    run(test)


def test_requests_with_the_same_grammar_share_its_proof():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, "a")) for _ in range(5)]
        await settle()
        tasks[0].cancel()
        await settle()
        bench.answer("a", GOOD)
        assert await asyncio.gather(*tasks[1:]) == ["good"] * 4
        assert bench.asked == ["a"]

    run(test)


def test_few_long_grammars_wait_and_more_are_refused_at_once():
    async def test(bench: Bench) -> None:
        def long(number: int) -> str:
            return f"{number}" * (LONG_CHARS + 1)

        tasks = [asyncio.create_task(outcome(bench, long(i))) for i in range(1 + MAX_LONG_QUEUED)]
        await settle()
        with pytest.raises(RequestError) as caught:
            await bench.prover.prove(use("x" * (LONG_CHARS + 1)))
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.retry_after_s == 5
        assert (
            f"{MAX_LONG_QUEUED} new grammars of more than {LONG_CHARS:,} characters" in caught.value.message
        )

        short = asyncio.create_task(outcome(bench, "short"))  # it has the other worker
        same = asyncio.create_task(outcome(bench, long(1)))  # one of those that wait already
        await settle()
        bench.answer("short", GOOD)
        assert await short == "good"
        bench.automatic = lambda text: GOOD
        bench.answer(long(0), GOOD)
        assert await asyncio.gather(*tasks, same) == ["good"] * (2 + MAX_LONG_QUEUED)

    run(test)


def test_a_grammar_without_time_is_to_come_again_after_the_time_limit():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(bench.prover.prove(use(text))) for text in ("a", "b", "c")]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(error, "retry_after_s", None) for error in errors] == [None, None, 5]

    run(test)


def test_two_workers_at_most_and_the_queue_is_bounded():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, str(i))) for i in range(MAX_QUEUED + 2)]
        await settle()
        assert bench.started == 2
        assert bench.asked == ["0", "1"]
        assert await outcome(bench, "one more") == "429 queue_full"
        bench.automatic = lambda text: GOOD
        bench.answer("1", GOOD)
        bench.answer("0", GOOD)
        assert await asyncio.gather(*tasks) == ["good"] * len(tasks)
        assert bench.started == 2

    run(test)


def test_the_number_of_results_is_bounded():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: GOOD
        for i in range(MAX_RESULTS + 1):
            await outcome(bench, str(i))
        assert not bench.prover.is_proved(use("0"))
        assert bench.prover.is_proved(use("1"))

    run(test)


def test_a_timeout_ends_the_worker_and_refuses_the_grammar():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: TimeoutError() if text == "slow" else GOOD
        assert await outcome(bench, "slow") == "schema_too_complex"
        assert bench.alive == 0
        assert await outcome(bench, "slow") == "schema_too_complex"
        assert bench.asked == ["slow"]
        assert await outcome(bench, "a") == "good"
        assert bench.started == 2

    run(test)


def test_a_timeout_beside_another_proof_refuses_the_request_and_not_the_grammar():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, text)) for text in ("slow", "a")]
        await settle()
        bench.answer("slow", TimeoutError())
        bench.answer("a", GOOD)
        assert await asyncio.gather(*tasks) == ["schema_too_complex", "good"]
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "slow") == "good"

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


def test_a_proof_that_no_request_waits_for_is_ended():
    async def test(bench: Bench) -> None:
        gone = [asyncio.create_task(outcome(bench, text)) for text in ("a", "b", "c", "c")]
        await settle()
        for task in gone[:3]:
            task.cancel()
        await settle()
        assert bench.asked == ["a", "b", "c"] and bench.alive == 1
        bench.answer("c", GOOD)
        assert await gone[3] == "good"
        bench.automatic = lambda text: BAD
        assert await outcome(bench, "a") == "invalid_regex"

    run(test)


def test_a_request_waits_no_longer_than_the_time_limit():
    async def test(bench: Bench) -> None:
        bench.prover._timeout_s = 0.02
        tasks = [asyncio.create_task(outcome(bench, text)) for text in ("a", "b", "c")]
        assert await asyncio.gather(*tasks) == ["schema_too_complex", "schema_too_complex", "429 queue_full"]
        await settle()
        assert bench.alive == 0

    run(test)


def test_what_a_request_has_waited_is_a_part_of_its_time():
    async def test(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        assert (
            await outcome(bench, "a", waited_s=3.0) == "429 queue_full"
        )  # not blamed: 2 s are not the limit
        assert loop.time() - begin_s == pytest.approx(2.0)
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a", waited_s=3.0) == "good"

    run(test)


def test_a_request_without_time_left_starts_nothing():
    async def test(bench: Bench) -> None:
        assert await outcome(bench, "a", waited_s=5.0) == "429 queue_full"
        assert bench.started == 0
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a") == "good"
        assert await outcome(bench, "a", waited_s=9.0) == "good"  # it is known

    run(test)


@pytest.mark.parametrize(
    ("answer", "start_s", "code"),
    [(GOOD, 1.2, "good"), (BAD, 1.2, "invalid_regex"), (None, 0.1, "schema_too_complex")],
)
def test_the_start_of_a_worker_is_not_time_of_the_grammar(
    answer: ProofResult | None, start_s: float, code: str
):
    """On a busy machine it takes longer than the time limit, and the first grammar is no bomb because of that."""

    async def test(bench: Bench) -> None:
        bench.prover._timeout_s = 1.0
        bench.may_start = asyncio.Event()
        if answer is not None:
            bench.automatic = lambda text: answer
        task = asyncio.create_task(outcome(bench, "a"))
        await asyncio.wait([task], timeout=start_s)
        assert not task.done()
        bench.may_start.set()
        assert await task == code

    run(test)


def test_requests_in_the_queue_wait_for_the_first_worker():
    async def test(bench: Bench) -> None:
        bench.prover._timeout_s = 0.2
        bench.may_start = asyncio.Event()
        bench.automatic = lambda text: GOOD
        tasks = [asyncio.create_task(outcome(bench, f"{i}")) for i in range(9)]
        await asyncio.wait(tasks, timeout=0.3)
        assert not any(task.done() for task in tasks)
        bench.may_start.set()
        assert await asyncio.gather(*tasks) == ["good"] * 9
        assert bench.started == 2

    run(test)


def test_a_request_does_not_wait_for_a_start_without_end():
    async def test(bench: Bench) -> None:
        bench.prover._timeout_s = 0.02
        bench.may_start = asyncio.Event()
        tasks = [asyncio.create_task(outcome(bench, f"{i}")) for i in range(3)]
        assert await asyncio.gather(*tasks) == ["429 queue_full"] * 3
        assert bench.started == 0

    run(test)


def test_a_grammar_that_has_waited_is_not_blamed():
    """Its compilation begins shortly before the end of its time: 429, and it may come again."""

    async def test(bench: Bench) -> None:
        bench.prover._timeout_s = 0.2
        tasks = [asyncio.create_task(outcome(bench, text)) for text in ("a", "bb", "ccc")]
        await asyncio.wait(tasks, timeout=0.1)
        bench.answer("a", GOOD)
        assert await asyncio.gather(*tasks) == ["good", "schema_too_complex", "429 queue_full"]
        assert bench.asked == ["a", "bb", "ccc"]
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "ccc") == "good"

    run(test)


def test_a_request_that_leaves_during_the_start_of_its_worker_ends_it():
    async def test(bench: Bench) -> None:
        bench.may_start = asyncio.Event()
        task = asyncio.create_task(outcome(bench, "a"))
        await settle()
        task.cancel()
        await settle()
        assert not bench.prover._queue.running
        assert bench.started == 0

    run(test)


def test_measuring_compiles_a_known_grammar_again():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: ProofResult(compile_s=0.5, forced_share=0.25)
        assert await outcome(bench, "a") == "good"
        assert await bench.prover.measure(use("a")) == [ProofResult(compile_s=0.5, forced_share=0.25)]
        assert bench.asked == ["a", "a"] and bench.measured == [False, True]
        bench.automatic = lambda text: BAD
        with pytest.raises(GrammarError, match="bad"):
            await bench.prover.measure(use("b"))
        assert await outcome(bench, "b") == "invalid_regex" and len(bench.asked) == 3, "its result is kept"

    run(test)


def test_a_good_grammar_stays_good_when_measuring_it_loses_workers():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: GOOD
        assert await outcome(bench, "a") == "good"
        bench.automatic = lambda text: WorkerLostError()
        with pytest.raises(GrammarError, match="too much memory"):
            await bench.prover.measure(use("a"))
        assert await outcome(bench, "a") == "good"

    run(test)


def test_a_worker_that_is_lost_twice_with_a_grammar_refuses_it():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: WorkerLostError() if text == "bomb" else GOOD
        assert await outcome(bench, "bomb") == "schema_too_complex"
        assert await outcome(bench, "bomb") == "schema_too_complex"
        assert await outcome(bench, "a") == "good"
        assert bench.asked == ["bomb", "bomb", "a"]

    run(test)


def test_a_worker_that_is_lost_once_is_replaced():
    async def test(bench: Bench) -> None:
        answers: list[Answer] = [WorkerLostError(), GOOD]
        bench.automatic = lambda text: answers.pop(0)
        assert await outcome(bench, "a") == "good"
        assert bench.asked == ["a", "a"]

    run(test)


def test_a_grammar_is_tried_again_when_its_lost_worker_is_gone():
    """Another proof ends in the meantime, and has its worker for the next grammar."""

    async def test(bench: Bench) -> None:
        bench.may_end = asyncio.Event()
        lost, other = (asyncio.create_task(outcome(bench, text)) for text in ("a", "b"))
        await settle()
        bench.answer("a", WorkerLostError())
        await settle()
        bench.answer("b", GOOD)
        assert await other == "good"
        await settle()
        assert bench.asked == ["a", "b"]
        bench.may_end.set()
        await settle()
        assert bench.asked == ["a", "b", "a"]
        bench.answer("a", GOOD)
        assert await lost == "good"
        bench.automatic = lambda text: GOOD
        assert await asyncio.gather(*(outcome(bench, text) for text in "cde")) == ["good"] * 3

    run(test)


def test_a_request_that_leaves_just_before_its_grammar_gets_a_worker():
    """The task of the proof is cancelled before it has begun: its place is free for others."""

    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, text)) for text in ("a", "bb", "ccc")]
        await settle()
        bench.answer("a", GOOD)
        tasks[2].cancel()
        await settle()
        assert bench.asked == ["a", "bb"]
        assert [job.spec.text for job in bench.prover._queue.running] == ["bb"]
        bench.answer("bb", GOOD)
        assert await asyncio.gather(*tasks[:2]) == ["good"] * 2

    run(test)


def test_three_lost_workers_stop_new_proofs_for_a_while():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: WorkerLostError() if text.startswith("bomb") else GOOD
        assert await outcome(bench, "known") == "good"
        for i in range(3):
            assert await outcome(bench, f"bomb{i}") == "schema_too_complex"
        assert await outcome(bench, "new") == "503 grammar_unavailable"
        assert await outcome(bench, "known") == "good"
        bench.now_s += UNAVAILABLE_S + 1
        assert await outcome(bench, "new") == "good"

    run(test)


def test_workers_that_are_lost_now_and_then_do_not_stop_proofs():
    async def test(bench: Bench) -> None:
        bench.automatic = lambda text: WorkerLostError() if text.startswith("bomb") else GOOD
        for i in range(5):
            await outcome(bench, f"bomb{i}")
            bench.now_s += 40
        assert await outcome(bench, "new") == "good"

    run(test)


def test_a_worker_that_does_not_start():
    async def test(bench: Bench) -> None:
        bench.start_error = WorkerLostError("no memory")
        with pytest.raises(RequestError, match="no memory") as caught:
            await bench.prover.prove(use("a"))
        assert caught.value.status == 503
        bench.start_error, bench.automatic = None, lambda text: GOOD
        assert await outcome(bench, "a") == "503 grammar_unavailable"
        bench.now_s += START_FAILED_S + 1
        assert await outcome(bench, "a") == "good"

    run(test)


def test_close_ends_waiting_requests_and_all_workers():
    async def test(bench: Bench) -> None:
        tasks = [asyncio.create_task(outcome(bench, str(i))) for i in range(4)]
        await settle()
        bench.answer("0", GOOD)
        await settle()
        await bench.prover.close()
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
    assert "the proof of a grammar failed" in caplog.text
