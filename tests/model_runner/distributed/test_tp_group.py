"""`TorchGroup` with real processes over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from engine.model_runner.distributed import tp_group
from engine.model_runner.distributed.join_group import ALONE, Place, join_group
from engine.model_runner.distributed.tp_group import Rendezvous, TorchGroup
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import EngineConfig, ModelConfig
from engine.runtime.errors import ConfigError, RankLostError
from engine.runtime.transport.cluster_ipc import free_address, parse_address
from tests.model_runner.distributed.test_tensor_parallel import GREEDY, MOE, SEEDED, generate

c10d: Any = dist

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "gloo_rank.py"
DEADLINE_S = 100.0
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 97},
    "mistral": {"sliding_window": 9},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": MOE,
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "tie_word_embeddings": True},
    "phi3": {},
}


def run_ranks(tmp_path: Path, size: int, **arguments: Any) -> list[dict[str, Any]]:
    """What each rank says."""
    processes = []
    for rank in range(size):
        given = {"rank": rank, "size": size, "file": str(tmp_path / "ranks"), "models": [], "params": []}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), json.dumps({**given, **arguments})],
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                },
            )
        )
    try:
        results = []
        for process in processes:
            assert process.stdout is not None
            results.append(json.loads(process.stdout.readline()))
        return results
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.real_process
@pytest.mark.parametrize(
    "names", [["llama"], pytest.param(list(MODELS), marks=pytest.mark.slow)], ids=["llama", "all"]
)
def test_two_processes_say_what_one_says_and_notice_a_death(make_tiny_model, tmp_path, names):
    tinies = [make_tiny_model(name, **MODELS[name]) for name in names]
    expected = [generate(tiny, params, num=4)[0] for tiny in tinies for params in (GREEDY, SEEDED)]

    first, second = run_ranks(
        tmp_path,
        2,
        models=[str(tiny.folder) for tiny in tinies],
        params=[msgspec.to_builtins(params) for params in (GREEDY, SEEDED)],
        step_timeout_s=60.0,
        silent=False,
    )

    assert first["tokens"] == second["tokens"] == expected
    for said in (first, second):
        assert said["operations"] == {
            "sum": [[3.0] * 3] * 2,
            "gathered": [[0, 1, 2, 100, 101, 102], [3, 4, 5, 103, 104, 105]],
            "contiguous": True,
            "broadcast": [7, 8],
            "same": [],
            "differing": [1],
            "min": 49,
        }
        assert set(said["listening"]) == {"127.0.0.1"}
    (came_s, _), (late_s, _) = first["met"], second["met"]
    assert came_s < late_s < first["met"][1]
    assert first["lost"].startswith("rank 0 of 2 lost the others in all_reduce: ")
    assert "\n" not in first["lost"] and "GLHF" not in first["lost"]
    assert "Timed out" not in first["lost"]  # the death is noticed, and not the silence
    assert first["waiting"] is False


@pytest.mark.slow
@pytest.mark.real_process
def test_a_silent_rank_is_given_up_after_the_groups_time_out(tmp_path):
    # Long enough for a step on a busy machine.
    first, *_ = run_ranks(tmp_path, 3, step_timeout_s=10.0, silent=True)

    assert first["lost"].startswith(
        "rank 0 of 3 lost the others in all_reduce: Timed out waiting 10000ms for "
    )
    assert first["lost_after_s"] > 7.5


def test_ranks_that_do_not_come_are_named(tmp_path):
    rendezvous = Rendezvous(
        rank=1,
        size=3,
        device=torch.device("cpu"),
        file=tmp_path / "ranks",
        step_timeout_s=1.0,
        start_timeout_s=0.05,
    )
    with pytest.raises(RankLostError) as error:
        TorchGroup(rendezvous)
    assert str(error.value) == "rank 1 of 3 has waited 0.05 s at 'start' for rank 0 and 2"


def rank_of_two_machines(rank: int, port: int, start_timeout_s: float) -> Rendezvous:
    return Rendezvous(
        rank=rank,
        size=2,
        device=torch.device("cpu"),
        address=("127.0.0.1", port),
        step_timeout_s=1.0,
        start_timeout_s=start_timeout_s,
    )


def free_port() -> int:
    return parse_address(free_address("127.0.0.1"))[1]


def addresses_listening_at(port: int) -> list[str]:
    """In hexadecimal, as the kernel writes them."""
    lines = [
        line for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]
    ]
    locals_ = [fields[1] for fields in map(str.split, lines) if fields[3] == "0A"]
    return [
        address for address, _, digits in (text.partition(":") for text in locals_) if int(digits, 16) == port
    ]


def test_the_store_listens_at_the_address_of_machine_0_only(monkeypatch):
    """Looked at whenever the rank that waits for the other one looks at the clock, on which an hour goes by then."""
    port, found = free_port(), list[list[str]]()

    def clock() -> float:
        found.append(addresses_listening_at(port))
        return 3600.0 * len(found)

    monkeypatch.setattr(tp_group, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with pytest.raises(RankLostError) as error:
        TorchGroup(rank_of_two_machines(0, port, DEADLINE_S))

    assert found == [["0100007F"]] * 2
    assert str(error.value) == "rank 0 of 2 has waited 100 s at 'start' for rank 1"


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"^cannot listen on 127.0.0.1:{port} for the other machines: Address"
        ):
            TorchGroup(rank_of_two_machines(0, port, 1.0))


def test_a_store_that_goes_away_is_a_lost_rank():
    port = free_port()
    store: Any = c10d.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(TorchGroup, rank_of_two_machines(1, port, DEADLINE_S))
        store.wait(["start/1"])
        del store
        error = waiting.exception()

    assert isinstance(error, RankLostError)
    assert str(error).startswith("rank 1 of 2 lost the store of rank 0: ")


@pytest.mark.parametrize(("device", "places"), [("cuda", ["cuda:1", "cuda:2"]), ("cpu", ["cpu", "cpu"])])
def test_replicas_have_devices_of_their_own(device, places):
    """With one rank each: the first takes the configured device, which is the first GPU."""
    config = EngineConfig(model=ModelConfig(device=device), parallel=ParallelConfig(dp=3))

    def place_of(replica: int) -> Place:
        settings = SimpleNamespace(config=config, replica=replica, rank=0)
        return join_group(SimpleNamespace(settings=settings))  # type: ignore[arg-type]

    assert place_of(0) is ALONE
    assert [str(place_of(replica).device) for replica in (1, 2)] == places
