"""The supervisor's side of `--executor ray`, with a broker that says what the test wants."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import EngineConfig, ModelConfig
from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from engine.runtime.transport.cluster_ipc import derive_key, load_cluster_key
from engine.supervisor.child_watch import ChildFailure
from engine.supervisor.ray.broker import FindPlaces, MachineEnded, NoPlaces, Placed, RunMachines
from engine.supervisor.ray.executor import Broker, RayNodes, actor_config, ray_machines
from tests.launch.child.test_child import SETTINGS
from tests.supervisor.fake_ray import HERE, THERE

PLACED = Placed(HERE, {0: HERE, 1: THERE}, None)


class FakeBroker:
    """Answers what it was made with, one list for each poll, then nothing."""

    def __init__(self, *answers: Any, closed: bool = False) -> None:
        self.answers = list(answers)
        self.closed = closed
        self.told: list[Any] = []
        self.left = False

    def send(self, message: Any) -> None:
        self.told.append(message)

    def receive(self, timeout_s: float = 0.0) -> list[Any]:
        return [self.answers.pop(0)] if self.answers else []

    def __enter__(self) -> FakeBroker:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.left = True


class FakeHub:
    late = ("machine 1",)

    def __init__(self, failure: ChildFailure | None = None) -> None:
        self.failure = failure
        self.cause: str | None = None

    def poll(self) -> None:
        if self.failure:
            raise self.failure

    def stop(self, cause: str) -> None:
        self.cause = cause


def config(**parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(device="cpu", num_threads=1),
        parallel=ParallelConfig(tp=2, executor="ray", **parallel),
        server=ServerConfig(startup_timeout=3.0, api_key=("an api key",)),
    )


def machines(broker: Any, **parallel: Any) -> Any:
    return ray_machines(config(**parallel), lambda: broker)


# ---------------------------------------------------------------- places


def test_every_rank_becomes_a_machine_of_its_own_with_a_fresh_key():
    broker = FakeBroker(PLACED)
    with machines(broker) as first, machines(FakeBroker(PLACED)) as second:
        parallel = first.config.parallel
        assert (parallel.tp, parallel.nnodes, parallel.node_rank) == (2, 2, 0)
        assert parallel.dist_init_addr.startswith(f"{HERE}:")
        key = load_cluster_key(parallel.cluster_key_file)
        assert key != load_cluster_key(second.config.parallel.cluster_key_file)
        (order,) = broker.told
        assert isinstance(order, FindPlaces) and Path(order.folder).is_dir()

    assert broker.left
    assert not Path(order.folder).exists()
    assert not Path(parallel.cluster_key_file).exists()


def test_machines_that_are_all_this_one_do_not_listen_to_others():
    with machines(FakeBroker(Placed(HERE, {0: HERE, 1: HERE}, None))) as found:
        assert found.config.parallel.dist_init_addr.startswith("127.0.0.1:")


def test_the_users_address_stays():
    with machines(FakeBroker(PLACED), dist_init_addr="10.0.0.1:5000") as found:
        assert found.config.parallel.dist_init_addr == "10.0.0.1:5000"


def test_rank_0_sees_its_gpu_only_as_long_as_it_is_its(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with machines(FakeBroker(Placed(HERE, {0: HERE, 1: HERE}, "2"))):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_no_places_and_a_broker_that_ends_are_errors_that_leave_nothing():
    broker = FakeBroker(NoPlaces("not granted"))
    with pytest.raises(ConfigError, match="not granted"):
        machines(broker).__enter__()
    assert broker.left

    with pytest.raises(ConfigError, match="ended before it granted places"):
        machines(FakeBroker(closed=True)).__enter__()


def test_a_signal_ends_the_waiting():
    class Interrupted(FakeBroker):
        def receive(self, timeout_s: float = 0.0) -> list[Any]:
            signal.raise_signal(signal.SIGTERM)
            return []

    broker = Interrupted()
    with pytest.raises(SystemExit) as caught:
        machines(broker).__enter__()

    assert caught.value.code == 128 + signal.SIGTERM
    assert broker.left


def test_actors_get_their_rank_and_machine_0s_key_and_no_other_secret():
    broker = FakeBroker(Placed(HERE, {0: HERE, 1: HERE}, None))
    with machines(broker) as found:
        nodes = found.connect(found.config, SETTINGS.spec)
        nodes.stop("")
        key = load_cluster_key(found.config.parallel.cluster_key_file)

    order = broker.told[-1]
    assert isinstance(order, RunMachines) and list(order.configs) == [1]
    assert derive_key(order.key) == key
    assert b"an api key" not in order.configs[1]
    own = msgspec.msgpack.decode(order.configs[1], type=EngineConfig)
    assert (own.parallel.node_rank, own.parallel.cluster_key_file) == (1, None)
    assert own.parallel.dist_init_addr == found.config.parallel.dist_init_addr


@pytest.mark.parametrize(("model", "sent"), [("here", True), ("org/name", False), ("default", False)])
def test_a_path_is_sent_so_that_it_holds_in_another_folder(tmp_path, monkeypatch, model, sent):
    (tmp_path / "here").mkdir()
    (tmp_path / "default").mkdir()
    monkeypatch.chdir(tmp_path)
    own = actor_config(EngineConfig(model=ModelConfig(model=model)), 0)

    expected = str(tmp_path / model) if sent else model
    assert msgspec.msgpack.decode(own, type=EngineConfig).model.model == expected


# ---------------------------------------------------------------- who failed


def nodes(broker: FakeBroker, hub: FakeHub | None = None) -> RayNodes:
    fake: Any = hub or FakeHub()
    return RayNodes(fake, broker, PLACED.machines)  # type: ignore[arg-type]


def test_nothing_happens_while_all_is_well():
    hub = FakeHub()
    all_well = nodes(FakeBroker(), hub)
    all_well.poll()
    all_well.stop("the cause")

    assert list(all_well.late) == ["machine 1"]
    assert hub.cause == "the cause"


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 2), (0, 1), (143, 1)])
def test_an_actor_that_ends_is_named_with_its_machine(theirs, ours):
    with pytest.raises(ChildFailure, match=r"^machine 1 \(Ray, 10\.0\.0\.2\): no memory$") as caught:
        nodes(FakeBroker(MachineEnded(1, theirs, "no memory"))).poll()
    assert caught.value.exit_code == ours


def test_what_a_machine_says_of_itself_is_the_better_cause():
    hub = FakeHub(ChildFailure("machine 1: model_runner of rank 1 was killed"))
    with pytest.raises(ChildFailure, match="was killed"):
        nodes(FakeBroker(MachineEnded(1, 1, "ended")), hub).poll()


def test_the_end_of_the_connection_to_ray_is_a_cause():
    with pytest.raises(ChildFailure, match="connection to Ray has ended"):
        nodes(FakeBroker(closed=True)).poll()


# ---------------------------------------------------------------- the real process


@pytest.mark.real_process
def test_the_real_broker_says_what_the_user_can_mend_and_ends(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.9:10001")

    # Where Ray is installed, of the address; else that it is not.
    with pytest.raises(ConfigError, match=r"must belong to the cluster|pip install ray"):
        ray_machines(config()).__enter__()


@pytest.mark.real_process
def test_a_broker_that_cannot_start_is_an_error():
    with pytest.raises(ConfigError, match="ended before it granted places"):
        ray_machines(config(), lambda: Broker("engine.no_such_module")).__enter__()
