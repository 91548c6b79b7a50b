from __future__ import annotations

import asyncio

import pytest

from engine.runtime.errors import EngineDeadError
from engine.runtime.messages import Explain, Explanation, FlushCache, FlushCacheDone, SchedulerInput
from engine.tokenizer_manager.control import PendingCalls


def test_answers_reach_their_call_in_any_order_and_are_forgotten():
    async def main() -> None:
        sent: list[SchedulerInput] = []
        calls = PendingCalls(sent.append, timeout_s=10.0)
        flush = asyncio.create_task(calls.call(FlushCache, FlushCacheDone))
        explain = asyncio.create_task(calls.call(lambda number: Explain(number, "a"), Explanation))
        await asyncio.sleep(0)
        assert sent == [FlushCache(1), Explain(2, "a")]
        assert len(calls) == 2
        calls.resolve(2, Explanation(2, found=True, sentence="so"))
        calls.resolve(1, FlushCacheDone(1, 3, 4))
        calls.resolve(1, FlushCacheDone(1, 5, 6))  # late: the first counts
        calls.resolve(99, FlushCacheDone(99, 0, 0))  # no such call
        assert (await explain).sentence == "so"
        assert (await flush).flushed_tokens == 3
        assert len(calls) == 0

    asyncio.run(main())


def test_no_answer_in_time_is_a_dead_engine():
    async def main() -> None:
        calls = PendingCalls(lambda message: None, timeout_s=0.0)
        with pytest.raises(EngineDeadError, match="the scheduler did not answer within 0 s"):
            await calls.call(FlushCache, FlushCacheDone)
        assert len(calls) == 0

    asyncio.run(main())


def test_a_failure_reaches_every_pending_call():
    async def main() -> None:
        calls = PendingCalls(lambda message: None, timeout_s=10.0)
        tasks = [asyncio.create_task(calls.call(FlushCache, FlushCacheDone)) for _ in range(2)]
        await asyncio.sleep(0)
        calls.fail("over")
        for task in tasks:
            with pytest.raises(EngineDeadError, match="^over$"):
                await task

    asyncio.run(main())
