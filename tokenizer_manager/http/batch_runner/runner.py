"""`BatchRunner`: takes batches from one state to the next, and their lines through the handlers of HTTP.

    validating --> in_progress --> finalizing --> completed
        |              |               |
        v              `- cancelling --+--------> cancelled
      failed           `---------------+--------> expired

Every state is a row of the store, and so is each result as soon as it is there, with the state of its line in the same
row; the files are written from these rows at the end, in the input's order, in the transaction of the final state. So
after a crash no `custom_id` is missing or there twice: `validating` begins again, lines without a result run again with
the same seed, and finalizing is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET

from ....runtime.config.answer_config import RequestLimits
from ...state.files import NewFile, StoredFiles
from ...state.store import StateError
from ...state.tables import BATCH_LINES, BATCHES, UNFINISHED_BATCH, Row
from .line_runner import AnswerLine, LineRunner, count
from .lines import InputLine, InputReader, as_message_result, unanswered
from .wire import (
    KEPT_S,
    MESSAGES,
    BatchBody,
    BatchUsage,
    LineErrors,
    RequestCounts,
    Status,
    batch_of,
    live_user,
)

CheckLine = Callable[[str, dict[str, Any], str], None]

logger = logging.getLogger(__name__)

_INSERTED_LINES: Final = 2048
_TICK_S: Final = 1.0
_SWEEP_S: Final = 60.0
_RETRY_S: Final = 1.0
_ENDED: Final[Mapping[str, str]] = {
    "cancelled": "the batch was cancelled before this line was answered",
    "expired": "the batch expired before this line was answered",
}


class _Live:
    """An unfinished batch.

    Attributes:
        owner: of it.
        body: as clients see it.
        ending: once it is to end before its lines are answered; None: it goes on.
        committing: the final state is being written, and it is too late to cancel.
        work: the task that answers its lines.
        task: the task that takes it through its states.
    """

    def __init__(self, owner: str, body: BatchBody) -> None:
        self.owner = owner
        self.body = body
        self.ending: Literal["cancelled", "expired"] | None = None
        self.committing = False
        self.work: asyncio.Task[None] | None = None
        self.task: asyncio.Task[None] | None = None

    def end(self, how: Literal["cancelled", "expired"]) -> None:
        """End it before its lines are answered."""
        self.ending = how
        if self.work is not None:
            self.work.cancel()


class BatchRunner:
    """The batches of one server.

    Attributes:
        files: inputs and results.
    """

    _check: CheckLine  # set by `start`

    def __init__(
        self,
        files: StoredFiles,
        *,
        num_slots: int,
        limits: RequestLimits,
        max_body_bytes: int,
        retry_s: float = _RETRY_S,
    ) -> None:
        """Begin nothing yet; see `start`.

        Args:
            files: of the store.
            num_slots: lines that are in flight at once, of all batches.
            limits: on JSON.
            max_body_bytes: of one line's body.
            retry_s: time until a line is sent again that the server has no room for.
        """
        self.files = files
        self._store = files.store
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._lines = LineRunner(files, num_slots, retry_s)
        self._live: dict[str, _Live] = {}
        self._clock_task: asyncio.Task[None] | None = None
        self._swept_s = 0.0

    # ------------------------------------------------------------ for the server

    async def start(self, answer: AnswerLine, check: CheckLine) -> None:
        """Continue what a server before this one has left, on the running event loop.

        Args:
            answer: `App.answer_line`.
            check: `App.check_line`.
        """
        self._lines.answer = answer
        self._check = check
        rows = await self._store.read(lambda db: BATCHES.of_all_owners(db, UNFINISHED_BATCH))
        for row in rows:
            live = _Live(row["owner"], batch_of(row))
            if live.body.status == "cancelling":
                live.ending = "cancelled"
            self._begin(live)
        await self.tick()
        self._clock_task = asyncio.create_task(self._tick_forever())

    async def stop(self) -> None:
        """Stop all lines in flight; the next server answers them."""
        tasks = [self._clock_task, *(live.task for live in self._live.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def tick(self) -> None:
        """End the batches whose window is over, and delete what has expired."""
        now_s = self.files.now_s()
        for live in list(self._live.values()):
            if now_s >= live.body.expires_at and not live.ending:
                live.end("expired")
        if abs(now_s - self._swept_s) >= _SWEEP_S:
            self._swept_s = now_s
            await self.files.delete_expired(
                lambda db, row: live_user(db, row["owner"], row["id"]) is not None
            )
            await self._store.write(self._delete_expired)

    # ------------------------------------------------------------ for the endpoints

    async def create(
        self, owner: str, body: BatchBody, check: Callable[[sqlite3.Connection], None]
    ) -> BatchBody:
        """Store a new batch, and begin it.

        Args:
            owner, body: of the batch.
            check: raises if it may not be created.
        """

        def insert(db: sqlite3.Connection) -> None:
            check(db)
            content = msgspec.json.encode(body)
            self._store.check_room(db, owner, len(content))
            BATCHES.insert(
                db,
                owner,
                body.id,
                body.created_at,
                num_bytes=len(content),
                status=body.status,
                input_file_id=body.input_file_id,
                body=content,
            )

        await self._store.write(insert, durable=True, waits=True)
        self._begin(_Live(owner, body))
        return body

    async def cancel(self, live_id: str) -> BatchBody | None:
        """End an unfinished batch; None if it is finished, or as good as that."""
        live = self._live.get(live_id)
        if live is None or live.committing:
            return None
        if live.ending != "cancelled":
            live.body.enter("cancelling", self.files.now_s())
            live.end("cancelled")
            await self._save(live)
        return live.body

    def current(self, body: BatchBody) -> BatchBody:
        """A batch from a row, with the counts of now."""
        live = self._live.get(body.id)
        return body if live is None else live.body

    # ------------------------------------------------------------ states

    def _begin(self, live: _Live) -> None:
        self._live[live.body.id] = live
        live.task = asyncio.create_task(self._run(live), name=live.body.id)

    async def _run(self, live: _Live) -> None:
        while True:
            try:
                await self._advance(live)
            except Exception as error:
                if _is_of_disk(error):  # what is there stays, and it goes on when there is room
                    logger.warning("batch=%s waits: %s", live.body.id, error)
                    await asyncio.sleep(self._lines.retry_s)
                    continue
                logger.exception("bug in batch=%s; it goes on at the next start", live.body.id)
            del self._live[live.body.id]
            return

    async def _advance(self, live: _Live) -> None:
        """Take a batch through its states until the last; again after an error of the disk."""
        if live.body.status == "validating" and not live.ending:
            errors = await self._validate(live)
            if errors is not None and not live.ending:
                await self._finish(live, msgspec.structs.replace(live.body, errors=errors), "failed")
                return
        if live.body.status == "in_progress":
            await self._recount(live)
        if live.body.status == "in_progress" and not live.ending:
            live.work = asyncio.create_task(self._lines.answer_all(live.owner, live.body))
            try:
                await asyncio.wait({live.work})
            except asyncio.CancelledError:  # the server stops
                live.work.cancel()
                await asyncio.gather(live.work, return_exceptions=True)
                raise
            if not live.work.cancelled():
                live.work.result()
        if live.body.status == "in_progress" and live.ending != "cancelled":
            live.body.enter("finalizing", self.files.now_s())
            await self._save(live)
        await self._finalize(live)

    async def _validate(self, live: _Live) -> LineErrors | None:
        """Store the lines of the input; or the errors in it."""
        batch, owner = live.body, live.owner
        reader = InputReader(
            batch.endpoint,
            # A message that is refused is an error of its own, and does not end its batch.
            lambda body: None if batch.endpoint == MESSAGES else self._check(batch.endpoint, body, owner),
            self._limits,
            self._max_body_bytes,
        )
        lines, errors = await asyncio.to_thread(reader.read, self.files.path(batch.input_file_id))
        if errors:
            return LineErrors(data=errors)
        await self._store.write(lambda db: BATCH_LINES.delete(db, owner, batch.id))
        # The order of creation is the order in which lines are answered; `part` is that of the results.
        order = sorted(range(len(lines)), key=lambda number: lines[number].prefix)
        for first in range(0, len(lines), _INSERTED_LINES):
            part = [(number, lines[number]) for number in order[first : first + _INSERTED_LINES]]
            await self._store.write(functools.partial(self._insert, live, part))
        batch.request_counts.total = len(lines)
        if not live.ending:
            batch.enter("in_progress", self.files.now_s())
            await self._save(live)
        return None

    def _insert(self, live: _Live, lines: list[tuple[int, InputLine]], db: sqlite3.Connection) -> None:
        now_s = self.files.now_s()
        for number, line in lines:
            BATCH_LINES.insert(
                db,
                live.owner,
                live.body.id,
                now_s,
                part=number,
                custom_id=line.custom_id,
                place=line.place,
                length=line.length,
            )

    async def _finalize(self, live: _Live) -> None:
        """Write the files of a batch, and end it."""
        ending: Literal["cancelled", "expired", "completed"] = live.ending or "completed"
        batch = msgspec.structs.replace(live.body, request_counts=RequestCounts(), usage=BatchUsage())
        with self.files.new() as outputs, self.files.new() as errors:
            first, num_missing = 0, 0
            while rows := await self._lines.page(live.owner, live.body.id, first):
                first = rows[-1]["part"] + 1
                batch.request_counts.total += len(rows)
                for row in rows:
                    num_missing += row["status"] == 0
                    count(batch, row)
                await asyncio.to_thread(self._write_results, live, rows, outputs, errors, ending)
            if live.ending == "cancelled":  # in the meantime
                ending, batch.cancelling_at = "cancelled", live.body.cancelling_at
            elif num_missing:  # it may have been finalizing before a restart
                ending = "expired"
            for file in (outputs, errors):
                await asyncio.to_thread(file.sync)
            batch.request_counts.failed += num_missing
            if batch.endpoint == MESSAGES:
                batch.request_counts.unanswered = num_missing
            await self._finish(live, batch, ending, outputs, errors)

    def _write_results(
        self, live: _Live, rows: list[Row], outputs: NewFile, errors: NewFile, ending: str
    ) -> None:
        for row in rows:
            if row["status"] == 0:
                how = ending if ending in _ENDED else "expired"
                line = unanswered(live.body.id, row["part"], row["custom_id"], f"batch_{how}", _ENDED[how])
            else:
                line = row["result"]
            if live.body.endpoint == MESSAGES:
                outputs.write(as_message_result(line))
                continue
            (outputs if 0 < row["status"] < 400 else errors).write(line)

    async def _finish(self, live: _Live, batch: BatchBody, status: Status, *results: NewFile) -> None:
        """Enter a final state, with the files of the results; clients see it once it is committed.

        Args:
            live: of it.
            batch: a copy that is to replace the body.
            status: final.
            results: outputs and errors.
        """
        live.committing = True
        owner, now_s = live.owner, self.files.now_s()
        batch.enter(status, now_s)
        after = batch.output_expires_after
        expires_s = now_s + (KEPT_S if after is UNSET else after.seconds)
        written = [file if file.num_bytes else None for file in results]
        for name, file in zip(("output_file_id", "error_file_id"), written, strict=False):
            setattr(batch, name, UNSET if file is None else file.id)

        def commit(db: sqlite3.Connection) -> None:
            BATCH_LINES.delete(db, owner, batch.id)
            for name, file in zip(("output", "error"), written, strict=False):
                if file is not None:
                    self.files.insert(
                        db,
                        owner,
                        file,
                        filename=f"{batch.id}_{name}.jsonl",
                        purpose="batch_output",
                        expires_s=expires_s,
                    )
            self._update(db, owner, batch, expires_s=now_s + KEPT_S)

        try:
            await self._store.write(commit, durable=True, waits=True)
        except StateError:
            live.committing = False
            for file in written:
                if file is not None:
                    self.files.path(file.id).unlink(missing_ok=True)
            raise
        live.body = batch
        logger.info(
            "batch=%s status=%s lines=%d failed=%d",
            batch.id,
            status,
            batch.request_counts.total,
            batch.request_counts.failed,
        )

    # ------------------------------------------------------------ rows

    async def _recount(self, live: _Live) -> None:
        """Take counts and usage from the rows: a server before this one may have answered lines."""
        live.body.request_counts = RequestCounts(total=live.body.request_counts.total)
        live.body.usage = BatchUsage()
        first = 0
        while rows := await self._lines.page(live.owner, live.body.id, first):
            first = rows[-1]["part"] + 1
            for row in rows:
                count(live.body, row)

    async def _save(self, live: _Live) -> None:
        await self._store.write(lambda db: self._update(db, live.owner, live.body), durable=True)

    @staticmethod
    def _update(db: sqlite3.Connection, owner: str, batch: BatchBody, **values: Any) -> None:
        content = msgspec.json.encode(batch)
        BATCHES.update(
            db,
            owner,
            batch.id,
            status=batch.status,
            num_bytes=len(content),
            body=content,
            **values,
        )

    def _delete_expired(self, db: sqlite3.Connection) -> None:
        for row in BATCHES.of_all_owners(db, "expires_s <= ?", self.files.now_s()):
            BATCHES.delete(db, row["owner"], row["id"])

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            with contextlib.suppress(StateError):
                await self.tick()


def _is_of_disk(error: Exception) -> bool:
    """Whether an error, or each of a group, is one of the store."""
    if isinstance(error, ExceptionGroup):
        return error.split(StateError)[1] is None
    return isinstance(error, StateError)
