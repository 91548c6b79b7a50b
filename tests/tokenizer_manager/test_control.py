from __future__ import annotations

import asyncio

import pytest

from engine.runtime.errors import EngineDeadError
from engine.runtime.messages import (
    AdapterDone,
    Call,
    CallDone,
    Explain,
    Explanation,
    FlushCache,
    FlushCacheDone,
    HintDone,
    HintOutcome,
    PauseDone,
    PinDone,
    SchedulerInput,
    SessionList,
    SessionState,
)
from engine.tokenizer_manager.control import PendingCalls, merged


def test_answers_reach_their_call_in_any_order_and_are_forgotten():
    async def main() -> None:
        sent: list[SchedulerInput] = []
        calls = PendingCalls(sent.append, timeout_s=10.0)
        flush = asyncio.create_task(calls.call(FlushCache(), FlushCacheDone))
        explain = asyncio.create_task(calls.call(Explain("a"), Explanation))
        await asyncio.sleep(0)
        assert sent == [Call(1, FlushCache()), Call(2, Explain("a"))]
        assert len(calls) == 2
        calls.resolve(CallDone(2, Explanation(found=True, sentence="so")))
        calls.resolve(CallDone(1, FlushCacheDone(3, 4)))
        calls.resolve(CallDone(1, FlushCacheDone(5, 6)))  # late: the first counts
        calls.resolve(CallDone(99, FlushCacheDone(0, 0)))  # no such call
        assert (await explain).sentence == "so"
        assert (await flush).flushed_tokens == 3
        assert len(calls) == 0

    asyncio.run(main())


def test_only_replicas_that_ran_when_the_call_was_made_count():
    async def main() -> None:
        running = [0, 2]
        calls = PendingCalls(lambda message: None, 10.0, running=lambda: running)
        flush = asyncio.create_task(calls.call(FlushCache(), FlushCacheDone))
        await asyncio.sleep(0)
        running.remove(2)  # its scheduler lives, but its detokenizer is lost
        calls.resolve(CallDone(1, FlushCacheDone(1000, 0), replica=1))  # it did not run
        calls.resolve(CallDone(1, FlushCacheDone(3, 4), replica=2))
        calls.resolve(CallDone(1, FlushCacheDone(30, 0), replica=2))  # again
        await asyncio.sleep(0)
        assert not flush.done()
        calls.resolve(CallDone(1, FlushCacheDone(5, 6, "it is full"), replica=0))
        assert (await flush) == FlushCacheDone(8, 10, "it is full")

    asyncio.run(main())


def test_no_answer_in_time_is_a_dead_engine():
    async def main() -> None:
        calls = PendingCalls(lambda message: None, timeout_s=0.0)
        with pytest.raises(EngineDeadError, match="the scheduler did not answer within 0 s"):
            await calls.call(FlushCache(), FlushCacheDone)
        assert len(calls) == 0

    asyncio.run(main())


def test_a_failure_reaches_every_pending_call():
    async def main() -> None:
        calls = PendingCalls(lambda message: None, timeout_s=10.0)
        tasks = [asyncio.create_task(calls.call(FlushCache(), FlushCacheDone)) for _ in range(2)]
        await asyncio.sleep(0)
        calls.fail("over")
        for task in tasks:
            with pytest.raises(EngineDeadError, match="^over$"):
                await task

    asyncio.run(main())


def test_a_pinned_prefix_is_as_long_as_where_most_of_it_is_cached():
    nowhere, most = PinDone(0, 64, "none of it is cached"), PinDone(48, 64, "the rest is not cached")
    assert merged([nowhere, most]) == merged([most, nowhere]) == most


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        ("missing", "accepted", "accepted"),
        ("accepted", "deferred", "deferred"),
        ("clipped", "accepted", "clipped"),
        ("accepted", "rejected", "rejected"),  # it is open at one of them
        ("missing", "missing", "missing"),
    ],
)
def test_the_outcome_of_a_hint_is_that_of_the_scheduler_that_has_the_session(
    first: str, second: str, counts: str
) -> None:
    one, other = HintDone(HintOutcome(first), "one"), HintDone(HintOutcome(second), "other")
    for answers in ([one, other], [other, one]):
        answer = merged(answers)
        assert isinstance(answer, HintDone)
        assert answer.outcome == counts


def test_the_sessions_of_all_schedulers_are_listed_the_latest_first() -> None:
    states = [SessionState(key, 1, 1, 16, idle_s) for key, idle_s in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    answer = merged([SessionList(states[:1], 5), SessionList(states[1:], 7)])
    assert answer == SessionList([states[1], states[2], states[0]], 12)


def test_an_adapter_that_one_scheduler_could_not_load_is_not_loaded():
    assert merged([AdapterDone(), AdapterDone("no such file")]).error == "no such file"  # type: ignore[union-attr]
    assert merged([AdapterDone(), AdapterDone()]) == AdapterDone()


def test_a_server_is_paused_when_all_schedulers_are():
    assert merged([PauseDone(paused=True), PauseDone(paused=False)]) == PauseDone(paused=False)
    assert merged([PauseDone(paused=True)] * 2) == PauseDone(paused=True)
