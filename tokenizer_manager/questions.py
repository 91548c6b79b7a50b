"""`Questions`: messages to the scheduler that wait for an answer under their own id (flush, pin, explain, list)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ..runtime.errors import EngineDeadError
from ..runtime.messages import Explanation, FlushCacheDone, PinDone, RequestList, SchedulerInput

Answer = FlushCacheDone | PinDone | Explanation | RequestList
A = TypeVar("A", FlushCacheDone, PinDone, Explanation, RequestList)


class Questions:
    """The questions that are open; ids are unique across their kinds."""

    def __init__(self, send: Callable[[SchedulerInput], None], timeout_s: float, first_id: int = 0) -> None:
        """Ask through `send`, and wait so long for each answer; ids come after `first_id`."""
        self._send = send
        self._timeout_s = timeout_s
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._last_id = first_id

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    async def ask(self, question: Callable[[int], SchedulerInput], kind: type[A]) -> A:
        """Send the question made for an id, and wait for its answer, which is of this kind.

        Raises:
            EngineDeadError: none comes.
        """
        self._last_id += 1
        question_id = self._last_id
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[question_id] = future
        try:
            self._send(question(question_id))
            async with asyncio.timeout(self._timeout_s):
                answer = await future
        except TimeoutError:
            raise EngineDeadError(f"the scheduler did not answer within {self._timeout_s:g} s") from None
        finally:
            del self._open[question_id]
        assert isinstance(answer, kind), f"{type(answer).__name__} answers a question for {kind.__name__}"
        return answer

    def answered(self, question_id: int, answer: Answer) -> None:
        """Hand over an answer; whoever asked may have left."""
        future = self._open.get(question_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, message: str) -> None:
        """Nobody will answer any more."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDeadError(message))
