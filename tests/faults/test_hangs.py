"""A scheduler that hangs while it makes no steps: its heartbeats are missed all the same."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.serving import DEADLINE_S

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

WATCHDOG_S = 6.0  # longer than a busy machine keeps a healthy process from a heartbeat
SMALL_POOL = ("--max-total-tokens", "512", "--max-model-len", "512", "--chaos", "slow=1")


@pytest.mark.parametrize("stalled", [False, True])
def test_a_hang_is_noticed_without_a_step(start_serve, stalled):
    """It is idle, or some requests wait for KV memory while one takes for ever."""
    arguments = ("--watchdog-timeout", str(WATCHDOG_S), "--max-restarts", "3")
    engine = start_serve(*arguments, *(SMALL_POOL if stalled else ()))
    with (
        httpx.Client(base_url=engine.url, timeout=4 * DEADLINE_S) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        if stalled:
            for num in (1, 2):
                body = {"prompt": [10 + num] * 400, "max_tokens": 100, "ignore_eos": True}
                threads.submit(client.post, "/v1/completions", json=body)
                engine.wait_for_requests(num)
            engine.metrics_when(lambda all_: all_["num_running_reqs"] == all_["num_queue_reqs"] == 1)
        else:
            engine.idle_metrics()
        os.kill(engine.pids["scheduler"], signal.SIGSTOP)
        engine.wait_for_log(f"scheduler hangs: no heartbeat for {WATCHDOG_S:g} s")
        engine.wait_for_log("recovered restart=1")
        assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
    engine.idle_metrics()
    assert engine.stop() == 0
    assert engine.leftovers() == []
