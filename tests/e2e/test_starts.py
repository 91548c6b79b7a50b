"""A start that comes to nothing: the process that is the cause, and what to do, in one line; nothing is left behind."""

from __future__ import annotations

import os
import re
import resource
import signal

import pytest

from .serving import EngineServe
from .test_endings import wait_until_gone

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
