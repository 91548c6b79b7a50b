"""A start that comes to nothing: the process that is the cause, and what to do, in one line; nothing is left behind."""

from __future__ import annotations

import os
import re
import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from .serving import DEADLINE_S, EngineServe
from .test_endings import wait_until_gone
from .test_several_machines import free_address

pytestmark = pytest.mark.real_process


@pytest.fixture
def start_endless(start_serve, model, tmp_path):
    """Start a server whose tokenizer manager never gets ready: nobody writes to the chat template that it reads."""
    endless = tmp_path / "template"
    os.mkfifo(endless)

    def start(*arguments):
        return start_serve(str(model), "--chat-template", str(endless), *arguments)

    return start


def the_cause(engine: EngineServe, exit_code: int = 1) -> str:
    assert engine.wait() == exit_code, engine.log
    (cause,) = engine.causes
    assert engine.log.rstrip().splitlines()[-1] == cause
    assert engine.leftovers() == []
    return cause


@pytest.mark.parametrize(
    "role",
    [
        "scheduler",
        pytest.param("detokenizer", marks=pytest.mark.slow),
        pytest.param("tokenizer_manager", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_while_it_starts(start_endless, role):
    engine = start_endless()
    engine.wait_for_log(f"started child={role}")
    os.kill(engine.pids[role], signal.SIGKILL)

    assert the_cause(engine).startswith(
        f"engine: {role} was killed by SIGKILL (by another process, or by the kernel"
    )


@pytest.mark.slow
def test_a_process_that_never_gets_ready(start_endless):
    cause = the_cause(start_endless("--startup-timeout", "2"))

    assert (
        "not ready 2 s after the start; the tracebacks above say where" in cause
    )  # on a slow machine others, too
    assert "raise --startup-timeout" in cause


@pytest.mark.slow
def test_no_memory(start_serve, model):
    """So little that the supervisor can work and torch cannot be imported, which raises an error, or aborts."""
    limit_bytes = 300 << 20
    while True:
        engine = start_serve(str(model))
        resource.prlimit(engine.process.pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        if not engine.pids:
            break  # all that it starts has the limit

    assert re.search(r"there was no memory for it|was killed by SIG(ABRT|SEGV|BUS)", the_cause(engine))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["started child=scheduler", "started child=tokenizer_manager"])
def test_a_supervisor_that_is_killed_while_it_starts(start_endless, when):
    engine = start_endless()
    engine.wait_for_log(when)
    engine.process.kill()
    assert engine.wait() == -signal.SIGKILL
    for pid in engine.pids.values():
        wait_until_gone(pid)
    assert all(left.startswith("file engine-") for left in engine.leftovers())


@pytest.mark.slow
def test_sigterm_twice_while_it_starts(start_endless):
    engine = start_endless()
    engine.wait_for_log("started child=tokenizer_manager")
    for _ in range(2):
        engine.process.terminate()

    assert engine.wait() == 128 + signal.SIGTERM
    assert engine.causes == ["engine: stopped at once by SIGTERM"]
    assert engine.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("--dp", "2")], ids=" ".join)
def test_the_port_is_open_from_the_beginning_and_says_that_the_model_loads(start_serve, model, layout):
    """503 until it serves, from then on 200; and a new tokenizer manager opens the port again."""
    address = free_address()
    port = address.rpartition(":")[2]
    url = f"http://127.0.0.1:{port}"
    engine = start_serve(str(model), "--dtype", "float32", "--port", port, *layout)
    statuses: list[int] = []

    def probe() -> list[int]:
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
            while len(statuses) < 2 or statuses[-2] != 200:
                try:
                    reply = client.get("/health")
                except httpx.ConnectError:
                    assert statuses == [] and engine.process.poll() is None
                    engine.leave_the_core_to_it()
                    continue
                statuses.append(reply.status_code)
                if reply.status_code == 503:
                    assert reply.json()["error"]["code"] == "loading_model"
                    assert client.post("/v1/messages", json={}).status_code in (503, 400)
        return statuses

    with ThreadPoolExecutor(1) as pool:
        probed = pool.submit(probe)
        engine.wait_until_ready()
        assert httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200
        probed.result(DEADLINE_S)
    assert sorted(statuses, reverse=True) == statuses
    assert set(statuses) == {200, 503}

    before = engine.pids["tokenizer_manager"]
    os.kill(before, signal.SIGKILL)
    engine.wait_for_log("recovered")
    assert httpx.get(f"{url}/health", timeout=DEADLINE_S).status_code == 200
    assert engine.stop() == 0
    assert engine.leftovers() == []
