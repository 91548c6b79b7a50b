"""Between a loss and the recovery: the scheduler's successor is stopped at its start, and never gets ready."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.serving import DEADLINE_S, SLOW, EngineServe
from tests.e2e.test_endings import Stream, wait_until_gone

pytestmark = pytest.mark.real_process

LONG = {"prompt": "for ever", "max_tokens": 2000, "ignore_eos": True}
SHORT = {"prompt": "one two", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def without_a_scheduler(engine: EngineServe):
    """Kill the scheduler, and stop the next one before it can work; it goes on at the end of the block."""
    lost = engine.pids["scheduler"]
    os.kill(lost, signal.SIGKILL)
    deadline_s = time.monotonic() + DEADLINE_S
    while (pid := engine.pids["scheduler"]) == lost:
        assert time.monotonic() < deadline_s, engine.log
    os.kill(pid, signal.SIGSTOP)  # it imports torch now, which takes a second at the very least
    while httpx.get(f"{engine.url}/health", timeout=DEADLINE_S).status_code == 200:
        assert time.monotonic() < deadline_s, engine.log
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_aborts_disconnects_and_time_limits_do_not_wait_for_the_recovery(start_serve):
    engine = start_serve(*SLOW)

    def post(**fields):
        return httpx.post(f"{engine.url}/v1/completions", json=SHORT | fields, timeout=DEADLINE_S)

    with Stream(engine) as aborted, Stream(engine) as left, ThreadPoolExecutor(1) as threads:
        with without_a_scheduler(engine):
            later = threads.submit(post)
            engine.wait_for_requests(3)
            for fields, status, code in (
                ({"queue_timeout": 0.2}, 503, "queue_timeout"),
                ({"timeout": 0.2}, 504, "request_timeout"),
            ):
                refused = post(**fields)
                assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            left.__exit__()
            engine.wait_for_requests(2)
            told = httpx.post(f"{engine.url}/abort_request", json={"rid": aborted.id}, timeout=DEADLINE_S)
            assert told.json()["aborted"] == 1
            *_, last, done = aborted.rest()
            assert '"finish_reason":"abort"' in last
            assert done == "data: [DONE]"
            engine.wait_for_requests(1)
            assert not later.done()
        assert later.result().json()["usage"]["completion_tokens"] == 4
    assert engine.idle_metrics()["resumed_reqs_total"] == 0  # nobody who had left was submitted again
    assert engine.stop() == 0
    assert engine.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["drain", pytest.param("at once", marks=pytest.mark.slow), pytest.param("kill", marks=pytest.mark.slow)],
)
def test_an_end_meanwhile_leaves_nothing(start_serve, how):
    engine = start_serve("--drain-timeout", "0.1" if how == "drain" else "1000", *SLOW)
    with Stream(engine) as stream, without_a_scheduler(engine):
        pids = engine.pids
        if how == "kill":
            engine.process.kill()
            assert engine.wait() == -signal.SIGKILL
            for pid in pids.values():
                wait_until_gone(pid)
            (left,) = engine.leftovers()
            assert left.startswith("file engine-")  # the next start removes it
            return
        engine.process.terminate()
        if how == "at once":
            reason = "the server is shutting down"
            while reason not in httpx.get(f"{engine.url}/health", timeout=DEADLINE_S).text:
                engine.leave_the_core_to_it()  # one signal before the next: the kernel merges equal ones
            engine.process.terminate()
            assert engine.wait() == 128 + signal.SIGTERM
        else:
            *_, kind, data = stream.rest()
            assert (kind, "shutting_down" in data) == ("event: error", True)
            assert engine.wait() == 0
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_drain_waits_for_those_who_wait_for_their_trial(start_serve):
    engine = start_serve("--max-restarts", "3", "--drain-timeout", "1000", "--chaos", "slow=1")
    body = SHORT | {"max_tokens": 17}

    def post():
        return httpx.post(f"{engine.url}/v1/completions", json=body, timeout=4 * DEADLINE_S)

    with ThreadPoolExecutor(2) as threads:
        with engine.stopped():
            answers = [threads.submit(post) for _ in range(2)]
            engine.wait_for_requests(2)
        for num_recovered in (1, 2):
            # Both: one that runs alone at two losses is guilty. Within the 16 s that 16 tokens take.
            engine.metrics_when(lambda metrics: metrics["num_running_reqs"] == 2)
            os.kill(engine.pids["scheduler"], signal.SIGKILL)
            engine.wait_for_log(f"recovered restart={num_recovered}")
        engine.wait_for_log("failed=0 quarantined=2")
        engine.process.terminate()
        for answer in answers:
            assert answer.result().json()["usage"]["completion_tokens"] == 17
    assert engine.wait() == 0
    assert engine.leftovers() == []
