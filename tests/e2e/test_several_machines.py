"""Two machines that share a model, both on this one: the same answers as one rank, the key, and the end of either."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from .serving import EngineServe
from .test_tensor_parallel import answers

pytestmark = [pytest.mark.real_process, pytest.mark.slow]


@pytest.fixture
def key(tmp_path: Path) -> str:
    return write_key(tmp_path / "cluster.key", "s" * 64)


def write_key(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def free_address() -> str:
    """With two more free ports behind it."""
    while True:
        with ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(3)]
            probes[0].bind(("127.0.0.1", 0))
            port = probes[0].getsockname()[1]
            try:
                for offset in (1, 2):
                    probes[offset].bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return f"127.0.0.1:{port}"


@pytest.fixture
def start_machines(start_serve, model):
    def start(*keys: str) -> list[EngineServe]:
        shared = ("--dtype", "float32", "--tp", "2", "--nnodes", "2", "--dist-init-addr", free_address())
        return [
            start_serve(str(model), *shared, "--node-rank", str(rank), "--cluster-key-file", path)
            for rank, path in enumerate(keys)
        ]

    return start


def test_two_machines_answer_as_one_and_stop_together(serve, start_machines, key):
    first, second = start_machines(key, key)
    first.wait_until_ready()
    assert set(first.pids) == {"scheduler", "detokenizer", "tokenizer_manager"}
    assert set(second.pids) == {"model_runner_1"}

    assert answers(first.url) == answers(serve.url)

    assert first.stop() == 0
    assert second.wait() == 0
    for machine in (first, second):
        assert machine.leftovers() == []
        assert "Traceback" not in machine.log


def test_a_machine_with_another_key_is_refused_and_disturbs_nobody(start_machines, key, tmp_path):
    first, second = start_machines(key, write_key(tmp_path / "other.key", "t" * 64))

    assert second.wait() == 2
    (cause,) = second.causes
    assert "did not accept this machine's key" in cause
    assert first.process.poll() is None
    assert second.leftovers() == []


def test_a_rank_that_dies_is_named_on_both_machines(start_machines, key):
    first, second = start_machines(key, key)
    first.wait_until_ready()

    os.kill(second.pids["model_runner_1"], signal.SIGKILL)

    assert (first.wait(), second.wait()) == (1, 1)
    assert first.causes[0].startswith("engine: machine 1: model_runner of rank 1 was killed by SIGKILL")
    assert second.causes[0].startswith("engine: model_runner of rank 1 was killed by SIGKILL")
    for machine in (first, second):
        (report,) = machine.crash_dir.iterdir()
        assert machine.causes[0].endswith(f"; start the engine again on all machines; report: {report}")
        assert "model_runner of rank 1 was killed by SIGKILL" in report.read_text()
    assert first.leftovers() == second.leftovers() == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_vanishes_is_noticed_by_the_other(start_machines, key, lost):
    machines = start_machines(key, key)
    machines[0].wait_until_ready()
    survivor = machines[1 - lost]

    machines[lost].process.kill()

    assert survivor.wait() == 1
    (cause,) = survivor.causes
    assert cause.startswith(f"engine: machine {lost}")
    assert "has been silent for 8 s" in cause
    assert "start the engine again on all machines" in cause
    assert survivor.leftovers() == []


def test_a_stopped_rank_0_is_named_though_all_others_are_elsewhere(start_machines, key):
    first, second = start_machines(key, key)
    first.wait_until_ready()

    os.kill(first.pids["scheduler"], signal.SIGSTOP)

    assert first.wait() == 1
    assert second.wait() == 1
    assert first.causes[0].startswith(
        "engine: scheduler (rank 0) was stopped by a signal (SIGSTOP or SIGTSTP)"
    )
    assert first.leftovers() == second.leftovers() == []
