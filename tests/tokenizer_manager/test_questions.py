from __future__ import annotations

import asyncio

import pytest

from engine.runtime.errors import EngineDeadError
from engine.runtime.messages import Explain, Explanation, FlushCache, FlushCacheDone, SchedulerInput
from engine.tokenizer_manager.questions import Questions


def test_answers_reach_their_question_in_any_order_and_are_forgotten():
    async def main() -> None:
        sent: list[SchedulerInput] = []
        questions = Questions(sent.append, timeout_s=10.0)
        flush = asyncio.create_task(questions.ask(FlushCache, FlushCacheDone))
        explain = asyncio.create_task(questions.ask(lambda number: Explain(number, "a"), Explanation))
        await asyncio.sleep(0)
        assert sent == [FlushCache(1), Explain(2, "a")]
        assert len(questions) == 2
        questions.answered(2, Explanation(2, found=True, sentence="so"))
        questions.answered(1, FlushCacheDone(1, 3, 4))
        questions.answered(1, FlushCacheDone(1, 5, 6))  # late: the first counts
        questions.answered(99, FlushCacheDone(99, 0, 0))  # nobody asked
        assert (await explain).sentence == "so"
        assert (await flush).flushed_tokens == 3
        assert len(questions) == 0

    asyncio.run(main())


def test_no_answer_in_time_is_a_dead_engine():
    async def main() -> None:
        questions = Questions(lambda message: None, timeout_s=0.0)
        with pytest.raises(EngineDeadError, match="the scheduler did not answer within 0 s"):
            await questions.ask(FlushCache, FlushCacheDone)
        assert len(questions) == 0

    asyncio.run(main())


def test_everybody_hears_of_the_end():
    async def main() -> None:
        questions = Questions(lambda message: None, timeout_s=10.0)
        tasks = [asyncio.create_task(questions.ask(FlushCache, FlushCacheDone)) for _ in range(2)]
        await asyncio.sleep(0)
        questions.fail("over")
        for task in tasks:
            with pytest.raises(EngineDeadError, match="^over$"):
                await task

    asyncio.run(main())
