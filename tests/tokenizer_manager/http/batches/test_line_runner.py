"""`LineRunner`: lines that wake together take turns on the event loop, and some are sent again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.tokenizer_manager.http.batch_runner.line_runner import LineRunner
from engine.tokenizer_manager.http.batch_runner.lines import LineAnswer
from engine.tokenizer_manager.http.batch_runner.wire import BatchBody
from engine.tokenizer_manager.state.files import StoredFiles
from engine.tokenizer_manager.state.store import StateStore
from engine.tokenizer_manager.state.tables import BATCH_LINES

NUM_LINES = 24


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Stored files with the input `in`, and the rows of its lines."""
    store = StateStore.open(tmp_path / "state", 1 << 30)
    stored = StoredFiles(store)
    content = json.dumps({"body": {}}).encode()
    stored.path("in").write_bytes(content)

    def insert(db: Any) -> None:
        for number in range(NUM_LINES):
            place = {"custom_id": str(number), "place": 0, "length": len(content)}
            BATCH_LINES.insert(db, "", "batch", 7, part=number, **place)

    store.submit(insert).result()
    yield stored
    store.close()


def test_each_line_has_a_turn_of_the_loop_for_itself(files):
    """A commit wakes all lines that wait for it; begun in one turn, 256 lines stalled the loop by 0.1 s."""
    batch = BatchBody(id="batch", endpoint="/v1/completions", input_file_id="in", created_at=0, expires_at=9)
    runner = LineRunner(files, NUM_LINES, retry_s=1)
    turn, begun, waiting = 0, list[int](), asyncio.Event()

    async def answer(*_: Any, **__: Any) -> LineAnswer:
        begun.append(turn)
        if len(begun) == NUM_LINES:
            waiting.set()  # all end in one turn
        await waiting.wait()
        return LineAnswer(200, b"{}", "")

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def run() -> None:
        counting = asyncio.create_task(count_turns())
        await runner.answer_all("", batch)
        counting.cancel()

    runner.answer = answer
    asyncio.run(run())

    assert len(set(begun)) == NUM_LINES
    assert batch.request_counts.completed == NUM_LINES


def test_a_line_is_sent_again_after_an_answer_that_says_nothing_about_it(files):
    batch = BatchBody(id="batch", endpoint="/v1/completions", input_file_id="in", created_at=0, expires_at=9)
    runner = LineRunner(files, NUM_LINES, retry_s=0)
    codes: dict[str, list[str]] = {}
    asked: list[str] = []

    async def answer(*_: Any, request_id: str, **__: Any) -> LineAnswer:
        asked.append(request_id)
        if left := codes.setdefault(request_id, ["queue_full", "engine_dead", "shutting_down"]):
            return LineAnswer(503, b'{"error": {}}', left.pop())
        return LineAnswer(200, b"{}", "")

    runner.answer = answer
    asyncio.run(runner.answer_all("", batch))

    assert batch.request_counts.completed == NUM_LINES and batch.request_counts.failed == 0
    assert len(asked) == 4 * NUM_LINES


def test_any_other_error_is_the_answer_of_the_line(files):
    batch = BatchBody(id="batch", endpoint="/v1/completions", input_file_id="in", created_at=0, expires_at=9)
    runner = LineRunner(files, NUM_LINES, retry_s=0)
    asked: list[str] = []

    async def answer(*_: Any, request_id: str, **__: Any) -> LineAnswer:
        asked.append(request_id)
        return LineAnswer(400, b'{"error": {}}', "invalid_value")

    runner.answer = answer
    asyncio.run(runner.answer_all("", batch))

    assert batch.request_counts.failed == len(asked) == NUM_LINES
