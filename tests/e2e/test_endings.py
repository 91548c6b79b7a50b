"""How `engine serve` ends: a process killed under a running stream, SIGTERM, Ctrl-C once and twice."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal

import httpx
import pytest

from .serving import DEADLINE_S, SLOW

pytestmark = pytest.mark.real_process

LONG = {"prompt": "for ever", "max_tokens": 2000, "min_tokens": 2000, "stream": True}


class Stream:
    """A completion that runs: its first event has come. A context manager.

    Attributes:
        id: of the completion.
    """

    def __init__(self, engine, **fields):
        self._exit = contextlib.ExitStack()
        client = self._exit.enter_context(httpx.Client(base_url=engine.url, timeout=DEADLINE_S))
        response = self._exit.enter_context(client.stream("POST", "/v1/completions", json=LONG | fields))
        assert response.status_code == 200
        self._lines = response.iter_lines()
        self.id = json.loads(next(self._lines).removeprefix("data: "))["id"]

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._exit.close()

    def rest(self):
        """All further lines that are not empty."""
        return [line for line in self._lines if line]


@pytest.fixture
def engine(start_serve, model):
    """One that restarts nothing; what it does else is in `tests/faults`."""
    return start_serve(str(model), "--dtype", "float32", "--max-restarts", "0", *SLOW).wait_until_ready()


@pytest.mark.slow  # `tests/faults/test_streams_survive.py` kills one, too
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_killed_process_ends_everything_with_an_error_for_the_client(engine, role):
    with Stream(engine) as stream:
        os.kill(engine.pids[role], signal.SIGKILL)
        *_, kind, data = stream.rest()

    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert f"{role} was killed by SIGKILL" in error["message"]
    assert engine.wait() == 1
    (cause,) = engine.causes
    assert cause.startswith(f"engine: {role} was killed by SIGKILL")
    assert "Traceback" not in engine.log
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_killed_tokenizer_manager_breaks_the_connection(engine):
    with Stream(engine) as stream:
        os.kill(engine.pids["tokenizer_manager"], signal.SIGKILL)
        # Not an end that looks like one: the client's library sees that the response is not complete.
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            stream.rest()
    assert engine.wait() == 1
    (cause,) = engine.causes
    assert cause.startswith("engine: tokenizer_manager was killed by SIGKILL")
    assert "Traceback" not in engine.log
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_killed_supervisor_takes_the_others_with_it(engine):
    """It cannot clean up; the kernel ends the others, and the next engine removes the sockets."""
    pids = engine.pids
    with Stream(engine) as stream:
        engine.process.kill()
        try:
            *_, kind, _data = stream.rest()
        except (httpx.RemoteProtocolError, httpx.ReadError):
            pass  # killed before it could say anything; either is no end that looks like one
        else:
            assert kind == "event: error"
    assert engine.wait() == -signal.SIGKILL
    for pid in pids.values():
        wait_until_gone(pid)
    (left,) = engine.leftovers()
    assert left.startswith("file engine-")


@pytest.mark.slow
def test_sigterm_lets_a_running_stream_come_to_its_end(engine):
    with Stream(engine, max_tokens=200, min_tokens=200, stream_options={"include_usage": True}) as stream:
        engine.process.terminate()
        *_, usage, done = stream.rest()
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 200
    assert engine.wait() == 0
    assert engine.causes == []
    assert engine.leftovers() == []


@pytest.mark.slow
def test_while_draining_new_requests_are_sent_elsewhere(engine):
    with Stream(engine, max_tokens=200, min_tokens=200) as stream:
        with engine.stopped():
            engine.process.terminate()
            health = httpx.get(f"{engine.url}/health", timeout=DEADLINE_S)
            while health.status_code == 200:  # the signal has to reach two processes
                health = httpx.get(f"{engine.url}/health", timeout=DEADLINE_S)
            refused = httpx.post(f"{engine.url}/v1/completions", json={"prompt": "x"}, timeout=DEADLINE_S)
        assert (health.status_code, refused.status_code) == (503, 503)
        assert refused.json()["error"]["code"] == "shutting_down"
        assert stream.rest()[-1] == "data: [DONE]"
    assert engine.wait() == 0


@pytest.mark.slow
def test_a_drain_that_takes_too_long_is_cut_off_with_an_error(start_serve, model):
    engine = start_serve(str(model), "--drain-timeout", "0.1", *SLOW).wait_until_ready()
    with Stream(engine, n=16) as stream:
        engine.process.terminate()
        *_, kind, data = stream.rest()
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert engine.wait() == 0
    assert engine.leftovers() == []


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(engine):
    with Stream(engine, n=16) as stream:
        engine.process.send_signal(signal.SIGINT)
        while httpx.get(f"{engine.url}/health", timeout=DEADLINE_S).status_code == 200:
            pass  # one signal must have been taken in before the next: the kernel merges equal ones
        engine.process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.HTTPError):
            assert stream.rest()[-1] != "data: [DONE]"
    assert engine.wait() == 128 + signal.SIGINT
    (cause,) = engine.causes
    assert cause == "engine: stopped at once by SIGINT"
    assert engine.leftovers() == []


def test_ctrl_c_during_the_start(start_serve, model, tmp_path):
    endless = tmp_path / "template"
    os.mkfifo(
        endless
    )  # nobody ever writes to it: whoever reads the chat template is not ready before the signal
    engine = start_serve(str(model), "--chat-template", str(endless))
    engine.wait_for_log("started child=tokenizer_manager")
    engine.process.send_signal(signal.SIGINT)
    assert engine.wait() == 128 + signal.SIGINT
    assert "Traceback" not in engine.log
    assert engine.leftovers() == []


def wait_until_gone(pid):
    """Wait for the end of a process that is no child of ours."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], DEADLINE_S)[0], f"process {pid} is still there"
        finally:
            os.close(fd)
