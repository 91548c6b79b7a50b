"""The answers of a server, as it gives them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cli.top.snapshot import Snapshot
from engine.runtime.scheduler_report import SchedulerReport

URL = "http://127.0.0.1:30000"
RUNS = {
    "id": "chatcmpl-3f2a90bbd1c94a5f9d53f9f38a2b77c1-0",
    "phase": "decode",
    "prompt_tokens": 812,
    "cached_tokens": 512,
    "completion_tokens": 83,
    "max_tokens": 400,
    "age_s": 2.44,
    "ttft_s": 0.059,
    "num_retractions": 0,
    "priority": 0,
    "reason": "",
    "why": "",
    "need": 0,
    "have": 0,
    "service_tier": "default",
}
WAITS = RUNS | {
    "id": "cmpl-b",
    "phase": "waiting",
    "completion_tokens": 0,
    "ttft_s": None,
    "age_s": 61.0,
    "reason": "no_kv",
    "why": "KV memory is short",
    "need": 4176,
    "have": 3904,
}
LOST = WAITS | {"id": "cmpl-c", "phase": "retracted", "num_retractions": 2, "need": 0, "have": 0}


def answers(
    requests: list[dict[str, Any]] | None = None, **report: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`/server_info` and `/v1/requests`."""
    figures: dict[str, Any] = {
        "sent_s": 100.0,
        "num_running_reqs": 1,
        "num_queue_reqs": 2,
        "kv_used_tokens": 500,
        "kv_cached_tokens": 250,
        "kv_total_tokens": 1000,
        "policy": "fcfs",
        "waiting_by_reason": {"no_kv": 2},
    }
    info = {
        "model": "tiny",
        "version": "0.1.0",
        "capacity": {"max_running_requests": 64},
        "scheduler": SchedulerReport.from_flat(figures | report).flat(),
    }
    data = [RUNS, WAITS, LOST] if requests is None else requests
    last_pass = {"step_id": 7, "rem_total_tokens_before": 4000, "rem_total_tokens_after": 3904}
    return info, {"object": "list", "total": len(data), "data": data, "last_pass": last_pass}


@pytest.fixture
def snapshot() -> Snapshot:
    return Snapshot.from_answers(URL, *answers())
