"""`LineRunner`: answers the lines of batches by the handlers of HTTP, a few at once, and stores each result.

A line that was running when the process died is begun again with others once, then alone, so that a line that kills the
process is found: if it dies twice with nothing else of its batch running, the line is an error. A stop that was ordered
does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from ...state.files import StoredFiles
from ...state.store import StateError
from ...state.tables import BATCH_LINES, Row
from .lines import LineAnswer, answered, body_at, line_id, seed_of, unanswered, usage_in
from .wire import BatchBody

logger = logging.getLogger(__name__)

AnswerLine = Callable[..., Awaitable[LineAnswer]]
_TRANSIENT: Final = frozenset({"queue_full", "queue_timeout", "engine_dead", "shutting_down"})
"""Codes of answers that say nothing about the line: it is sent again."""
_CROWD_RUNS: Final = 2
_MAX_RUNS: Final = 4
_PAGE_LINES: Final = 64
"""Rows that are in memory at once, with their results, which may have megabytes each."""
_NO_TOKENS: Final = dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), 0)


class LineRunner:
    """The lines of all batches of a server.

    Attributes:
        answer: `App.answer_line`; set before the first line.
        retry_s: time until a line is sent again that the server has no room for.
    """

    answer: AnswerLine

    def __init__(self, files: StoredFiles, num_slots: int, retry_s: float) -> None:
        """Begin nothing yet.

        Args:
            files: of the store.
            num_slots: lines that are in flight at once.
            retry_s: see above.
        """
        self.retry_s = retry_s
        self._files = files
        self._store = files.store
        self._slots = asyncio.Semaphore(num_slots)
        self._turn = asyncio.Lock()

    async def answer_all(self, owner: str, batch: BatchBody) -> None:
        """Answer the lines of a batch that have no result yet, and count them in it.

        They are begun in the order of creation, in which lines that share a prefix are neighbors.

        Args:
            owner: of the batch.
            batch: its counts and usage grow.

        Raises:
            StateError: the rows cannot be read; results that cannot be stored wait for room.
        """
        after_seq, suspects = 0, list[Row]()
        async with asyncio.TaskGroup() as tasks:
            while rows := await self._next_rows(owner, batch.id, after_seq):
                after_seq = rows[-1]["seq"]
                for row in rows:
                    if row["status"]:
                        continue
                    if row["runs"] >= _CROWD_RUNS:
                        suspects.append(row)
                        continue
                    await self._slots.acquire()
                    task = tasks.create_task(self._answer_one(owner, batch, row))
                    task.add_done_callback(lambda _: self._slots.release())  # even if it never runs
        for row in suspects:
            async with self._slots:
                await self._answer_one(owner, batch, row)

    async def _answer_one(self, owner: str, batch: BatchBody, row: Row) -> None:
        """Answer a line, for which a slot is taken, and store the result."""
        number, custom_id = row["part"], row["custom_id"]
        values: dict[str, Any]
        try:
            if row["runs"] >= _MAX_RUNS:
                message = "the server died whenever this line was being answered"
                result = unanswered(batch.id, number, custom_id, "server_error", message)
                values = {"status": 500, "result": result}
            else:
                await self._set_line(owner, batch.id, number, runs=row["runs"] + 1)
                answer = await self._answered(batch, row)
                await self._next_turn()
                result = answered(batch.id, number, custom_id, answer)
                values = {"status": answer.status, "result": result}
                values |= usage_in(answer.body) if answer.status < 400 else {}
            await self._set_line(owner, batch.id, number, num_bytes=len(result), **values)
            count(batch, _NO_TOKENS | values)
        except asyncio.CancelledError:
            with contextlib.suppress(StateError):
                self._store.submit(
                    lambda db: BATCH_LINES.update(db, owner, batch.id, number, runs=row["runs"])
                )
            raise

    async def _answered(self, batch: BatchBody, row: Row) -> LineAnswer:
        path, number = self._files.path(batch.input_file_id), row["part"]
        body = await asyncio.to_thread(body_at, path, row["place"], row["length"])
        name, seed = line_id(batch.id, number), seed_of(batch.id, number)
        owner = row["owner"]
        while True:
            await self._next_turn()
            answer = await self.answer(batch.endpoint, body, owner, request_id=name, seed=seed)
            if answer.code not in _TRANSIENT:
                return answer
            await asyncio.sleep(self.retry_s)

    async def _next_turn(self) -> None:
        """Wait for a turn of the loop for this line alone.

        A commit wakes all lines that wait for it; 256 that then began or ended in one turn stalled the loop for 180 ms.
        """
        async with self._turn:
            await asyncio.sleep(0)

    async def _set_line(self, owner: str, batch_id: str, number: int, **values: Any) -> None:
        """Change the row of a line; while the disk is full, wait for room."""
        while True:
            try:
                await self._store.write(lambda db: BATCH_LINES.update(db, owner, batch_id, number, **values))
                return
            except StateError as error:
                logger.warning("a result of batch=%s waits: %s", batch_id, error)
                await asyncio.sleep(self.retry_s)

    async def _next_rows(self, owner: str, batch_id: str, after_seq: int) -> list[Row]:
        """Some lines of a batch in the order of creation; none after the last."""
        return await self._store.read(
            lambda db: BATCH_LINES.created_after(db, owner, batch_id, after_seq, _PAGE_LINES)
        )

    async def page(self, owner: str, batch_id: str, first: int) -> list[Row]:
        """Some lines of a batch, from number `first`; none after the last."""
        return await self._store.read(lambda db: BATCH_LINES.parts(db, owner, batch_id, first, _PAGE_LINES))


def count(batch: BatchBody, line: Row | Mapping[str, Any]) -> None:
    """Count a line, unless it has no answer yet."""
    if line["status"] >= 400:
        batch.request_counts.failed += 1
    elif line["status"]:
        batch.request_counts.completed += 1
    usage = batch.usage
    usage.input_tokens += line["input_tokens"]
    usage.input_tokens_details.cached_tokens += line["cached_tokens"]
    usage.output_tokens += line["output_tokens"]
    usage.output_tokens_details.reasoning_tokens += line["reasoning_tokens"]
    usage.total_tokens = usage.input_tokens + usage.output_tokens
