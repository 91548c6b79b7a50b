"""What Ray is asked for, and what is given back, with a Ray that only takes notes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import EngineConfig, ModelConfig
from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from engine.supervisor.ray.cluster import RayCluster, why_it_died
from engine.supervisor.ray.placement import bundles, ray_places
from tests.supervisor.fake_ray import HERE, THERE, FakeRay

DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RayNode\n\tip: 10.0.0.2\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ..."
)


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


def config(device: Any = "cpu", tp: int = 3, **parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(device=device, num_threads=4),
        parallel=ParallelConfig(tp=tp, executor="ray", **parallel),
        server=ServerConfig(startup_timeout=3.0),
    )


def yes() -> bool:
    return True


def test_one_bundle_for_each_rank_and_the_first_one_here():
    assert bundles(config("cpu"), HERE) == [{"CPU": 4, f"node:{HERE}": 0.001}, {"CPU": 4}, {"CPU": 4}]
    assert bundles(config("cuda", tp=2), HERE) == [
        {"CPU": 1, "GPU": 1, f"node:{HERE}": 0.001},
        {"CPU": 1, "GPU": 1},
    ]


def test_actors_start_in_their_bundles_and_all_is_given_back(ray):
    with ray_places(RayCluster(ray, is_own=False), config("cuda"), yes) as places:
        assert (places.address, places.machines) == (HERE, {0: HERE, 1: THERE, 2: THERE})
        assert places.devices == "3"
        assert list(places.actors) == [1, 2]
        assert ray.events == [("visible_devices", 0, 0, 1), ("RayNode", 1, 1, 1), ("RayNode", 2, 1, 1)]
        ray.events.clear()

    assert ray.events == ["killed actor 2", "killed actor 1", "group removed"]


def test_on_the_cpu_nobody_asks_for_devices(ray):
    with ray_places(RayCluster(ray, is_own=False), config("cpu", tp=2), yes) as places:
        assert places.devices is None
    assert ray.events[0] == ("RayNode", 1, 4, 0)


@pytest.mark.parametrize(
    ("is_own", "address", "strategy"),
    [
        (False, None, "PACK"),
        (False, "10.0.0.1:5000", "PACK"),
        (False, "127.0.0.1:5000", "STRICT_PACK"),
        (True, None, "STRICT_PACK"),
    ],
)
def test_one_machine_must_hold_all_where_no_other_can_reach_it(ray, is_own, address, strategy):
    with ray_places(RayCluster(ray, is_own=is_own), config(dist_init_addr=address), yes):
        assert [group.strategy for group in ray.groups] == [strategy]


def test_no_place_in_time_says_what_was_asked_and_what_there_is(ray):
    ray.granted = False

    with pytest.raises(ConfigError) as caught:
        ray_places(RayCluster(ray, is_own=False), config(), yes).__enter__()

    message = str(caught.value)
    assert "Ray was asked for 3 bundles of CPU 4, the first on this machine (10.0.0.1)" in message
    assert (
        "within 3 s; the cluster has 10.0.0.1 (CPU 4 GPU 1), 10.0.0.2 (CPU 8 GPU 0); free in all" in message
    )
    assert message.endswith("stop what uses the rest, or raise --startup-timeout for a cluster that grows")
    assert ray.groups[0].waits == [1.0, 1.0, 1.0]
    assert ray.events == ["group removed"]


def test_nobody_waits_for_places_once_the_user_has_given_up(ray):
    ray.granted = False

    with pytest.raises(ConfigError):
        ray_places(RayCluster(ray, is_own=False), config(), lambda: False).__enter__()

    assert ray.groups[0].waits == [1.0]
    assert ray.events == ["group removed"]


def test_the_cause_in_a_message_of_rays():
    assert why_it_died(Exception(DIED)) == (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file."
    )
    assert why_it_died(Exception()) == "Exception"
