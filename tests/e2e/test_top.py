"""`engine top` against a real server: its figures are the server's, once for scripts and live on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time

import httpx
import pytest

from .serving import DEADLINE_S, engine_command, engine_environment, run_engine

pytestmark = pytest.mark.real_process

LONG = {"prompt": "secret", "max_tokens": 300, "min_tokens": 300, "stream": True}
REASONS = ("no_row", "no_kv", "look_ahead_spent", "behind")


def test_a_look_shows_who_runs_and_why_the_others_wait_live_and_for_scripts(slow_serve, tmp_path):
    # So many choices, a few at a time, that the last ones wait however fast this machine is.
    body = LONG | {"n": 40}
    with httpx.stream("POST", f"{slow_serve.url}/v1/completions", json=body, timeout=DEADLINE_S) as response:
        lines = response.iter_lines()
        next(lines)
        seen = read_terminal(tmp_path, slow_serve.url, REASONS)
        done = run_engine(tmp_path, "top", slow_serve.url, "--once", "--json")
    slow_serve.idle_metrics()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, last = found["requests"][0], found["requests"][-1]

    assert found["num_requests"] == len(found["requests"]) > 1
    assert first["max_tokens"] == 300 and first["phase"] in ("prefill", "decode", "waiting")
    assert (last["phase"], last["ttft_s"]) == ("waiting", None)
    assert last["reason"] and last["why"]
    assert found["scheduler"]["num_queue_reqs"] >= 1
    assert "secret" not in done.stdout + seen
    assert slow_serve.model in seen


def read_terminal(tmp_path, url, texts):
    """What `engine top` draws on a terminal of 24 lines, 80 columns, until one of `texts` is on it; Ctrl-C ends it."""
    main, theirs = pty.openpty()
    environment = engine_environment(tmp_path) | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = engine_command("top", url, "--interval", "0.1")
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen, deadline_s = b"", time.monotonic() + DEADLINE_S
    try:
        while not any(text.encode() in seen for text in texts):
            assert select.select([main], [], [], deadline_s - time.monotonic())[0], seen
            seen += os.read(main, 65536)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:  # it restores the screen: somebody must read that
            assert time.monotonic() < deadline_s, seen
            if select.select([main], [], [], 0.05)[0]:
                try:
                    seen += os.read(main, 65536)
                except OSError:  # EIO: the other end is closed
                    break
        assert process.wait(DEADLINE_S) == 0, seen
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert b"Traceback" not in seen
    return seen.decode(errors="replace")
