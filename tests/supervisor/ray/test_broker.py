"""What the process between the supervisor and Ray tells of the actors, with a Ray that only takes notes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from engine.launch.child.control import ControlChannel
from engine.supervisor.ray.broker import (
    FromBroker,
    MachineEnded,
    RunMachines,
    ToBroker,
    wait_for_one,
    watch_runs,
)
from engine.supervisor.ray.cluster import RayCluster
from engine.supervisor.ray.placement import RayPlaces
from tests.supervisor.fake_ray import HERE, FakeActor, FakeRay, RayError, RayTaskError

DEADLINE_S = 10.0
ORDER = RunMachines({1: b"config 1", 2: b"config 2"}, b"key")


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def actors() -> dict[int, FakeActor]:
    return {1: FakeActor(1), 2: FakeActor(2)}


@pytest.fixture
def ends() -> Iterator[tuple[ControlChannel[FromBroker], ControlChannel[ToBroker]]]:
    """The supervisor's end of the channel, and the broker's."""
    ours, theirs = socket.socketpair()
    to_us: msgspec.msgpack.Decoder[FromBroker] = msgspec.msgpack.Decoder(FromBroker)
    to_broker: msgspec.msgpack.Decoder[ToBroker] = msgspec.msgpack.Decoder(ToBroker)
    channels = ControlChannel(ours, to_us), ControlChannel(theirs, to_broker)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def watch(ray, actors, ends) -> Iterator[Callable[[], threading.Thread]]:
    threads = []

    def start() -> threading.Thread:
        places = RayPlaces(HERE, {0: HERE, 1: HERE, 2: HERE}, dict(actors), None)
        arguments = (ends[1], RayCluster(ray, is_own=True), places, ORDER)
        threads.append(threading.Thread(target=watch_runs, args=arguments))
        threads[-1].start()
        return threads[-1]

    yield start
    ends[0].close()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def next_of(channel: ControlChannel[Any]) -> Any:
    assert channel.wait(DEADLINE_S)
    (message,) = channel.receive()
    return message


def test_each_actor_gets_its_configuration_and_the_key(watch, ends, actors):
    thread = watch()
    ends[0].close()
    thread.join(DEADLINE_S)

    assert actors[1].orders == [(b"config 1", b"key")]
    assert actors[2].orders == [(b"config 2", b"key")]


def test_an_actor_that_has_ended_is_told_with_its_cause(watch, ends, ray):
    watch()
    ray.ended["run of rank 2"] = (2, "no such model")

    assert next_of(ends[0]) == MachineEnded(2, 2, "no such model")


def test_an_actor_that_died_is_told_with_rays_cause(watch, ends, ray):
    ray.ended["run of rank 1"] = RayError("The actor died.\nThe actor is dead because its node has died.")
    watch()

    assert next_of(ends[0]) == MachineEnded(1, 1, "The actor is dead because its node has died.")


def test_a_bug_in_an_actor_is_named_and_its_traceback_shown(watch, ends, ray, capfd):
    ray.ended["run of rank 1"] = RayTaskError(ValueError("a bug"))
    watch()

    assert next_of(ends[0]) == MachineEnded(1, 1, "failed: ValueError('a bug')")
    assert "ray::RayNode.run()" in capfd.readouterr().err


def test_at_the_end_actors_get_time_for_theirs(watch, ends, ray):
    thread = watch()
    ends[0].close()
    thread.join(DEADLINE_S)

    assert ray.events[-1] == "waited 5"


def test_the_key_is_in_no_text():
    assert "key'" not in repr(ORDER)


def test_a_channel_that_ends_is_no_message(ends):
    ends[0].close()
    assert wait_for_one(ends[1]) is None
