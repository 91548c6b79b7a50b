"""What is left of a server that ended by a failure: a report, and logs that a machine can read."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from .serving import DEADLINE_S

pytestmark = pytest.mark.real_process

LONG = {"prompt": "for ever", "max_tokens": 2000, "min_tokens": 2000, "stream": True}


def title(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


@pytest.mark.slow
def test_a_report_and_json_logs_of_a_server_whose_detokenizer_died(start_serve, model):
    flags = ("--dtype", "float32", "--log-format", "json", "--max-restarts", "0")
    engine = start_serve(str(model), *flags).wait_until_ready()
    assert {role: title(pid) for role, pid in engine.pids.items()} == {
        role: f"engine: {role}" for role in ("scheduler", "detokenizer", "tokenizer_manager")
    }
    assert title(engine.process.pid) == f"engine: supervisor {engine.url}"

    with httpx.stream("POST", f"{engine.url}/v1/completions", json=LONG, timeout=DEADLINE_S) as response:
        lines = response.iter_lines()
        rid = json.loads(next(lines).removeprefix("data: "))["id"]
        os.kill(engine.pids["detokenizer"], signal.SIGSEGV)
        for _line in lines:
            pass
    assert engine.wait() == 1

    last = engine.log.splitlines()[-1]
    assert last.startswith("engine: detokenizer was killed by SIGSEGV")
    report = Path(last.rpartition("; report: ")[2])
    assert list(engine.crash_dir.iterdir()) == [report]
    text = report.read_text()
    assert "detokenizer was killed by SIGSEGV\n\nFatal Python error: Segmentation fault" in text
    assert "where it was when the engine gave up" in text
    assert f"arrived rid={rid}-0 " in text
    assert "for ever" not in text
    assert engine.leftovers() == []

    records = [json.loads(line) for line in engine.log.splitlines() if line.startswith("{")]
    assert {"supervisor", "scheduler", "tokenizer_manager"} <= {record["process"] for record in records}
    assert {record["child"] for record in records if "child" in record} == set(engine.pids)
