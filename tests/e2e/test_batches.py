"""Files and batches over real processes: the official client, SIGTERM and kill -9 in the middle, a folder in use."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .serving import DEADLINE_S, EngineServe, run_engine

pytestmark = [pytest.mark.real_process, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_KILLS = 30


def lines(num: int, max_tokens: int = 8) -> bytes:
    """Completions with a temperature, half of them without a seed."""
    bodies: Iterator[dict[str, Any]] = (
        {"prompt": f"question {i}", "max_tokens": max_tokens, "min_tokens": max_tokens, "temperature": 1.0}
        | ({"seed": i} if i % 2 else {})
        for i in range(num)
    )
    return b"".join(
        json.dumps({"custom_id": f"l{i}", "method": "POST", "url": "/v1/completions", "body": body}).encode()
        + b"\n"
        for i, body in enumerate(bodies)
    )


def client_of(engine: EngineServe) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)


def begin(client: openai.OpenAI, content: bytes) -> str:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return batch.id


def finished(engine: EngineServe, batch_id: str, status: str = "completed") -> Any:
    """The batch once it is finished, whatever happens to the server meanwhile."""
    deadline_s = time.monotonic() + 5 * DEADLINE_S
    while True:
        try:
            batch = client_of(engine).batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                assert batch.status == status, batch
                return batch
        except (openai.APIConnectionError, openai.InternalServerError):
            pass
        assert time.monotonic() < deadline_s, engine.log
        engine.leave_the_core_to_it()


def texts(client: openai.OpenAI, batch: Any) -> dict[str, str]:
    """The text of each line; each id is there once."""
    results = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    by_id = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in results}
    assert len(by_id) == len(results)
    return by_id


@pytest.fixture
def start(model: Path, tmp_path: Path, start_serve: Callable[..., EngineServe]) -> Callable[..., EngineServe]:
    """Starts a server with the state of this test."""
    options = ("--dtype", "float32", "--state-dir", str(tmp_path / "state"), "--max-restarts", "100")
    return lambda *more: start_serve(str(model), *options, *more)


def test_the_official_client(start):
    engine = start().wait_until_ready()
    client = client_of(engine)

    file = client.files.create(
        file=("requests.jsonl", lines(20)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert file.expires_at == file.created_at + 7200
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"run": "1"}
    )
    done = finished(engine, batch.id)

    assert done.request_counts is not None and done.request_counts.completed == 20
    assert done.usage is not None and done.usage.output_tokens == 160
    assert list(texts(client, done)) == [f"l{i}" for i in range(20)]
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert {each.id for each in client.files.list()} == {file.id, done.output_file_id}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)

    long = begin(client, lines(50, 400))
    assert client.batches.cancel(long).status in ("cancelling", "cancelled")
    assert finished(engine, long, "cancelled").request_counts.total == 50
    bad = begin(client, b"{}\n")
    assert finished(engine, bad, "failed").errors.data[0].param == "custom_id"
    assert engine.stop() == 0, engine.log
    assert "Traceback" not in engine.log


def test_a_folder_in_use_is_refused_in_one_line(start, model, tmp_path):
    engine = start().wait_until_ready()

    second = run_engine(
        engine.tmp, "serve", str(model), "--port", "0", "--state-dir", str(tmp_path / "state")
    )

    assert second.returncode == 2
    [line] = [line for line in second.stderr.splitlines() if line.startswith("engine: ")]
    assert "another server uses it" in line
    assert "Traceback" not in second.stderr
    assert engine.stop() == 0


def test_an_ordered_stop_does_not_wait_for_a_batch_and_the_next_server_goes_on(start):
    engine = start("--drain-timeout", "600").wait_until_ready()
    batch_id = begin(client_of(engine), lines(40, 200))
    began_s = time.monotonic()
    assert engine.stop() == 0, engine.log
    assert time.monotonic() - began_s < DEADLINE_S

    engine = start().wait_until_ready()
    done = finished(engine, batch_id)

    assert len(texts(client_of(engine), done)) == 40
    assert done.request_counts.failed == 0


def test_kill_9_at_random_times_changes_no_answer(start):
    """The scheduler, the manager, or all of it; each id is there once, with the text of an unbroken run."""
    chance = random.Random(7)
    engine = start().wait_until_ready()
    content, num = lines(60, 24), 60
    client = client_of(engine)
    usual = texts(client, finished(engine, begin(client, content)))
    seeded = {f"l{i}" for i in range(num) if i % 2}
    num_kills = 0
    while num_kills < NUM_KILLS:
        batch_id = begin(client_of(engine), content)
        for _ in range(3):
            deadline_s = time.monotonic() + chance.uniform(0, 0.6)
            while time.monotonic() < deadline_s:
                engine.leave_the_core_to_it()
            role = chance.choice(("scheduler", "tokenizer_manager", "all"))
            num_kills += 1
            if role == "all":
                pids = [engine.process.pid, *engine.pids.values()]
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                engine.wait()
                engine = start().wait_until_ready()
            else:
                before = engine.log.count(f"started child={role} ")
                os.kill(engine.pids[role], signal.SIGKILL)
                deadline_s = time.monotonic() + DEADLINE_S
                while engine.log.count(f"started child={role} ") == before:
                    assert time.monotonic() < deadline_s, engine.log
                    engine.leave_the_core_to_it()
                wait_until_healthy(engine)
        done = finished(engine, batch_id)
        found = texts(client_of(engine), done)
        assert list(found) == [f"l{i}" for i in range(num)]
        assert {name: found[name] for name in seeded} == {name: usual[name] for name in seeded}
        assert done.request_counts.failed == 0


def wait_until_healthy(engine: EngineServe) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            if httpx.get(f"{engine.url}/health", timeout=DEADLINE_S).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_s, engine.log
        engine.leave_the_core_to_it()
