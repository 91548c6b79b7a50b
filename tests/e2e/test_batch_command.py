"""`engine batch` with a server of its own: killed in the middle it goes on, and no server is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .serving import DEADLINE_S, SLOW, engine_command, engine_environment
from .test_batches import lines

pytestmark = [pytest.mark.real_process, pytest.mark.slow, pytest.mark.timeout(900)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """With a path for temporary files that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="batch-") as name:
        yield engine_environment(Path(name))


def test_kill_9_in_the_middle_loses_and_doubles_no_line(model, tmp_path, environment):
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    partial, num = tmp_path / "out.jsonl.partial", 40
    given.write_bytes(lines(num, 20))
    words = ["batch", str(given), "-o", str(output), "--model", str(model)]
    words += ["--", "--dtype", "float32", "--max-running-requests", "2", *SLOW]
    servers: list[str] = []
    for _ in range(2):
        before = len(partial.read_bytes().splitlines()) if partial.exists() else 1
        with subprocess.Popen(engine_command(*words), env=environment, stderr=subprocess.DEVNULL) as process:
            deadline_s = time.monotonic() + 2 * DEADLINE_S
            while True:
                assert process.poll() is None, "it ended before it was killed"
                assert time.monotonic() < deadline_s
                if partial.exists() and len(partial.read_bytes().splitlines()) >= before + 5:
                    servers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                    process.send_signal(signal.SIGKILL)
                    break
                os.sched_yield()
        deadline_s = time.monotonic() + DEADLINE_S
        while any(is_alive(int(pid)) for pid in servers):
            assert time.monotonic() < deadline_s, "the server outlives the command"
            os.sched_yield()
    assert not output.exists()

    done = subprocess.run(
        engine_command(*words),
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
    )

    assert done.returncode == 0, done.stderr
    assert "have results from an earlier run" in done.stderr
    found = [json.loads(each)["custom_id"] for each in output.read_text().splitlines()]
    assert found == [f"l{i}" for i in range(num)]
    assert not partial.exists()
