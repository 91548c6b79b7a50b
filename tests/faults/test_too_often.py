"""A request that is there whenever a process is lost, and a process that is lost again and again."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.serving import DEADLINE_S

pytestmark = pytest.mark.real_process

SLOWEST = ("--chaos", "slow=1")  # a request gets on by 16 tokens in 16 seconds, and two losses come sooner
BODY = {"prompt": "for ever", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


@pytest.mark.slow
def test_a_request_that_was_lost_twice_is_not_tried_again_and_three_losses_are_the_end(start_serve):
    engine = start_serve("--max-restarts", "2", *SLOWEST)
    with httpx.stream(
        "POST", f"{engine.url}/v1/completions", json=BODY | {"stream": True}, timeout=DEADLINE_S
    ) as response:
        lines = response.iter_lines()
        next(lines)
        for num_recovered in (1, 2):
            os.kill(engine.pids["scheduler"], signal.SIGSEGV if num_recovered == 1 else signal.SIGKILL)
            engine.wait_for_log(f"recovered restart={num_recovered}")
        *_, kind, data = [line for line in lines if line]

    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "poison_request")
    assert httpx.get(f"{engine.url}/health", timeout=DEADLINE_S).status_code == 200
    engine.idle_metrics()

    os.kill(engine.pids["detokenizer"], signal.SIGKILL)
    assert engine.wait() == 1
    (cause,) = engine.causes
    assert cause.startswith(
        "engine: scheduler was killed by SIGSEGV; that was the first of 3 crashes within 5 minutes"
    )
    assert "the last one: detokenizer was killed by SIGKILL" in cause
    assert engine.leftovers() == []


@pytest.mark.slow
def test_of_several_suspects_only_the_one_that_is_there_at_the_third_loss_pays(start_serve):
    """Not streamed; the three are tried one after the other, and it is the first that is lost again."""
    engine = start_serve("--max-restarts", "3", *SLOWEST)
    with (
        httpx.Client(base_url=engine.url, timeout=2 * DEADLINE_S) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        short = BODY | {"max_tokens": 3}
        first = threads.submit(client.post, "/v1/completions", json=BODY)
        engine.wait_for_requests(1)
        others = [threads.submit(client.post, "/v1/completions", json=short) for _ in range(2)]
        engine.wait_for_requests(3)
        for num_recovered in (1, 2, 3):
            os.kill(engine.pids["scheduler"], signal.SIGKILL)
            engine.wait_for_log(f"recovered restart={num_recovered}")
        response = first.result()
        assert (response.status_code, response.json()["error"]["code"]) == (500, "poison_request")
        for other in others:
            assert other.result().json()["usage"]["completion_tokens"] == 3
    assert engine.stop() == 0
