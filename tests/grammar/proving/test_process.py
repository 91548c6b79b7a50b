"""The real proving process: results, time and memory limits, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from engine.grammar.proving.messages import ProofSetup
from engine.grammar.proving.prover import PROOF_MEMORY_BYTES
from engine.grammar.proving.worker import ProofWorker, WorkerLostError
from engine.models.source import ModelSource
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace

pytestmark = pytest.mark.real_process

TIMEOUT_S = 60.0
ENUM = {"enum": [f"value number {i}" for i in range(50_000)]}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> ProofSetup:
    folder = tmp_path_factory.mktemp("model")
    tokenizer._core.save(str(folder / "tokenizer.json"))
    return ProofSetup(ModelSource("hf", str(folder), "tiny"), 300, (256,), PROOF_MEMORY_BYTES)


def schema(value: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value))


def run(
    setup: ProofSetup,
    test: Callable[[ProofWorker], Coroutine[None, None, None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run a test with a process that is gone afterwards."""

    async def main() -> None:
        worker = await ProofWorker.start(setup)
        try:
            await test(worker)
        finally:
            await worker.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@pytest.mark.fast_cases(1)  # the event loop of `engine serve`
@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, None])
def test_grammars_are_proved_in_the_process_which_signals_of_the_terminal_do_not_end(setup, loop_factory):
    async def test(worker: ProofWorker) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(worker.pid, signum)
        assert (await worker.prove(schema({"type": "object"}), TIMEOUT_S)).code == ""
        result = await worker.prove(schema({"type": "strin"}), TIMEOUT_S)
        assert result.code == "invalid_schema"
        assert "strin" in result.message

    run(setup, test, loop_factory)


def test_a_grammar_is_measured_where_that_is_asked(setup):
    closed = {
        "type": "object",
        "properties": {"true": {"type": "boolean"}},
        "required": ["true"],
        "additionalProperties": False,
    }
    compact = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(closed), Whitespace.COMPACT)

    async def test(worker: ProofWorker) -> None:
        plain = await worker.prove(compact, TIMEOUT_S)
        assert plain.compile_s > 0.0 and plain.forced_share is None
        measured = await worker.prove(compact, TIMEOUT_S, measures=True)
        assert measured.forced_share is not None and 0.5 < measured.forced_share < 1.0
        regex = await worker.prove(GrammarSpec(GrammarKind.REGEX, "a+b"), TIMEOUT_S, measures=True)
        assert regex.forced_share is None and not regex.code

    run(setup, test)


def test_a_proof_that_takes_too_long_is_given_up(setup):
    async def test(worker: ProofWorker) -> None:
        with pytest.raises(TimeoutError):
            await worker.prove(schema(ENUM), 0.001)

    run(setup, test)


def test_a_grammar_that_takes_too_much_memory_ends_the_process(setup):
    little = ProofSetup(setup.source, setup.vocab_size, setup.eos_token_ids, 8 << 20)

    async def enough(worker: ProofWorker) -> None:
        assert (await worker.prove(schema(ENUM), TIMEOUT_S)).code == ""

    async def too_little(worker: ProofWorker) -> None:
        try:
            result = await worker.prove(schema(ENUM), TIMEOUT_S)
        except WorkerLostError:
            return
        assert result.code == "schema_too_complex"

    run(setup, enough)
    run(little, too_little)


def test_a_process_that_is_killed_is_lost(setup):
    async def test(worker: ProofWorker) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await worker.prove(schema({}), TIMEOUT_S)

    run(setup, test)


def test_a_tokenizer_that_cannot_be_loaded_is_the_reason(setup, tmp_path):
    broken = ProofSetup(ModelSource("hf", str(tmp_path), "tiny"), 300, (), PROOF_MEMORY_BYTES)

    with pytest.raises(WorkerLostError, match=r"tokenizer\.json"):
        asyncio.run(ProofWorker.start(broken))


def test_the_library_is_loaded_by_the_first_backend_and_torch_by_nothing():
    code = "import sys, engine.grammar.cache, engine.grammar.guided, engine.grammar.proving.prover, "
    code += "engine.grammar.llguidance_backend, engine.grammar.proving.process; "
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
        "from engine.grammar.proving.messages import ProofSetup\n"
        "from engine.grammar.proving.worker import ProofWorker\n"
        "from engine.models.source import ModelSource\n"
        "async def main():\n"
        f"    source = ModelSource('hf', {fields[0]!r}, 'tiny')\n"
        f"    worker = await ProofWorker.start(ProofSetup(source, {fields[1]}, (256,), 1 << 30))\n"
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
