"""The real sandbox process: results, limits of time and memory, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop
from msgspec.structs import replace

from engine.grammar.compile import sandbox
from engine.grammar.compile.worker import (
    CompileResult,
    CompileWorker,
    SandboxSetup,
    WorkerLostError,
)
from engine.models.source import ModelSource
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace

pytestmark = pytest.mark.real_process

TIMEOUT_S = 60.0
ENUM = {"enum": [f"value number {i}" for i in range(50_000)]}
BOMB = {"type": "object", "properties": {f"{i}": {"type": "integer"} for i in range(12_000)}}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> SandboxSetup:
    folder = tmp_path_factory.mktemp("model")
    tokenizer._core.save(str(folder / "tokenizer.json"))
    return SandboxSetup(ModelSource("hf", str(folder), "tiny"), 300, (256,), TIMEOUT_S)


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def run(
    setup: SandboxSetup,
    test: Callable[[CompileWorker], Coroutine[None, None, None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a test with a process that is gone afterwards."""

    async def main() -> None:
        worker = await CompileWorker.start(setup)
        try:
            await test(worker)
        finally:
            await worker.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def forks_of(worker: CompileWorker) -> list[int]:
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


async def begun(worker: CompileWorker, value: object) -> tuple[asyncio.Task[CompileResult], int]:
    """A compilation that has begun, and its process."""
    async with asyncio.timeout(TIMEOUT_S):
        while forks_of(worker):  # that of the start
            await asyncio.sleep(0.001)
        task = asyncio.create_task(worker.compile(schema(value)))
        while not (forks := forks_of(worker)):
            await asyncio.sleep(0.001)
    return task, forks[0]


@pytest.mark.fast_cases(1)  # the event loop of `engine serve`
@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, None])
def test_grammars_are_compiled_in_the_process_which_signals_of_the_terminal_do_not_end(setup, loop_factory):
    async def test(worker: CompileWorker) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker.pid, signum)
        assert (await worker.compile(schema({"type": "object"}))).code == ""
        result = await worker.compile(schema({"type": "strin"}))
        assert result.code == "invalid_schema"
        assert "strin" in result.message

    run(setup, test, loop_factory)


def test_a_schema_is_measured(setup):
    closed = {
        "type": "object",
        "properties": {"true": {"type": "boolean"}},
        "required": ["true"],
        "additionalProperties": False,
    }
    compact = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(closed), Whitespace.COMPACT)

    async def test(worker: CompileWorker) -> None:
        measured = await worker.compile(compact)
        assert measured.compile_s > 0.0
        assert measured.forced_share is not None and 0.5 < measured.forced_share < 1.0
        regex = await worker.compile(GrammarSpec(GrammarKind.REGEX, "a+b"))
        assert regex.forced_share is None and not regex.code

    run(setup, test)


def test_a_compilation_ends_when_its_cpu_time_is_used_up_and_others_go_on(setup):
    async def test(worker: CompileWorker) -> None:
        bomb, _ = await begun(worker, BOMB)
        assert (await worker.compile(schema({}))).code == ""
        result = await bomb
        while "beside others" in result.lost:  # a busy machine gave it less than 0.5 s of CPU time in 2 s
            result = await worker.compile(schema(BOMB))
        assert result.code == "schema_too_complex"
        assert "took longer than 0.5 s to compile" in result.message
        assert (await worker.compile(schema({}))).code == ""

    run(replace(setup, limit_s=0.5), test)


def test_a_compilation_that_does_not_run_uses_no_time(setup):
    """As on a machine whose cores are busy."""

    async def test(worker: CompileWorker) -> None:
        slow, fork = await begun(worker, ENUM)
        os.kill(fork, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(slow), 0.5)
        os.kill(fork, signal.SIGCONT)
        assert (await slow).code == ""

    run(setup, test)


@pytest.mark.parametrize("niceness", [0, 15])
def test_a_long_compilation_gets_a_lower_priority_than_its_sandbox(setup, niceness):
    async def test(worker: CompileWorker) -> None:
        base = max(niceness, os.getpriority(os.PRIO_PROCESS, worker.pid))
        if base == 19:
            pytest.skip("there is no lower priority")
        os.setpriority(os.PRIO_PROCESS, worker.pid, base)
        slow, fork = await begun(worker, ENUM)
        os.kill(fork, signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            while os.getpriority(os.PRIO_PROCESS, fork) == base:
                await asyncio.sleep(0.001)
        assert os.getpriority(os.PRIO_PROCESS, fork) == min(base + 10, 19)
        os.kill(fork, signal.SIGKILL)
        assert "killed" in (await slow).lost

    run(setup, test)


def test_a_grammar_that_takes_too_much_memory_is_refused(setup):
    async def enough(worker: CompileWorker) -> None:
        assert (await worker.compile(schema(ENUM))).code == ""

    async def too_little(worker: CompileWorker) -> None:
        result = await worker.compile(schema(ENUM))
        assert result.code == "schema_too_complex" and "too much memory" in result.message
        assert (await worker.compile(schema({}))).code == ""

    run(setup, enough)
    run(replace(setup, memory_bytes=8 << 20), too_little)


def test_a_process_that_is_killed_is_lost(setup):
    async def test(worker: CompileWorker) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await worker.compile(schema({}))

    run(setup, test)


@pytest.mark.parametrize("whole", [False, True])
def test_a_compilation_that_is_killed_says_nothing_about_its_grammar(setup, whole: bool):
    async def test(worker: CompileWorker) -> None:
        bomb, fork = await begun(worker, BOMB)
        os.kill(worker.pid if whole else fork, signal.SIGKILL)
        if whole:
            with pytest.raises(WorkerLostError):
                await bomb
        else:
            assert (await bomb).lost == "a compilation was killed"

    run(setup, test)


def test_a_compilation_that_is_not_done_in_time_ends_alone(setup):
    """It was stopped, as on a machine that is too busy; another one goes on."""

    async def test(worker: CompileWorker) -> None:
        bomb, fork = await begun(worker, BOMB)
        os.kill(fork, signal.SIGSTOP)
        slow = asyncio.create_task(worker.compile(schema(ENUM)))
        os.kill(fork, signal.SIGALRM)  # as its timer does
        os.kill(fork, signal.SIGCONT)
        assert (await bomb).lost == "the grammar was not compiled within 240 s beside others"
        assert (await slow).code == ""

    run(setup, test)


def test_a_tokenizer_that_cannot_be_loaded_is_the_reason(setup, tmp_path):
    broken = replace(setup, source=ModelSource("hf", str(tmp_path), "tiny"))

    with pytest.raises(WorkerLostError, match=r"tokenizer\.json"):
        asyncio.run(CompileWorker.start(broken))


def test_the_library_is_loaded_by_the_first_backend_and_torch_by_nothing():
    code = "import sys, engine.grammar.cache, engine.grammar.guided, engine.grammar.compile.compile_queue, "
    code += "engine.grammar.llguidance_backend, engine.grammar.compile.sandbox; "
    code += "print(*sorted({'llguidance', 'torch', 'transformers'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == ""


def test_the_process_ends_with_its_parent(setup, tmp_path):
    """Also when the parent is killed and cannot close anything."""
    script = tmp_path / "parent.py"
    fields = (setup.source.path, setup.vocab_size)
    script.write_text(
        "import asyncio, os, signal\n"
        "from engine.grammar.compile.worker import CompileWorker, SandboxSetup\n"
        "from engine.models.source import ModelSource\n"
        "async def main():\n"
        f"    source = ModelSource('hf', {fields[0]!r}, 'tiny')\n"
        f"    worker = await CompileWorker.start(SandboxSetup(source, {fields[1]}, (256,), 5.0))\n"
        "    print(worker.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    done = subprocess.run(
        [sys.executable, "-P", str(script)], env=env, capture_output=True, text=True, check=False
    )

    assert done.returncode == -signal.SIGKILL
    try:
        process = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], TIMEOUT_S)[0] == [process]  # readable once it has ended
    finally:
        os.close(process)


def test_no_time_limit_ends_a_compilation_that_is_answering(setup, monkeypatch):
    """On a busy machine a fork was ended between its answer and its end, and the request got two answers."""
    ours, theirs = socket.socketpair()
    seen: list[tuple[float, float]] = []

    def note(channel: socket.socket, result: CompileResult) -> None:
        seen.append((signal.getitimer(signal.ITIMER_REAL)[0], signal.getitimer(signal.ITIMER_PROF)[0]))

    def end(exit_code: int) -> None:
        raise SystemExit(exit_code)

    monkeypatch.setattr(sandbox, "_send", note)
    monkeypatch.setattr(sandbox, "_limit_memory", lambda memory_bytes: None)
    monkeypatch.setattr(sandbox, "die_with", lambda pid: None)
    monkeypatch.setattr(os, "_exit", end)
    spec = GrammarSpec(GrammarKind.REGEX, "a")
    with ours, theirs, pytest.raises(SystemExit, match="0"):
        sandbox._run(1, setup, theirs, spec, lambda _: CompileResult())
    assert seen == [(0.0, 0.0)]
