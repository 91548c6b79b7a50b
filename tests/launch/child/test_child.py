"""`Child` and the control channel over a real socket pair, without processes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from engine.launch.child.child import Child, StopRequested
from engine.launch.child.control import (
    ControlChannel,
    Endpoints,
    Failed,
    Heartbeat,
    Order,
    PeerDied,
    PeersLost,
    PeersReady,
    Ready,
    Role,
    SetLogLevel,
    Settings,
    StartProfile,
    Stop,
    StopProfile,
    ToChild,
    ToSupervisor,
    child_end,
    supervisor_end,
)
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.config.server_config import LogConfig, LogLevel, ServerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import HEARTBEAT_INTERVAL_S

DEADLINE_S = 60.0
CAPACITY = Capacity(max_model_len=64, num_pages=8, page_size=16, max_running_requests=4, vocab_size=100)
SETTINGS = Settings(
    role=Role.TOKENIZER_MANAGER,
    config=EngineConfig(server=ServerConfig(port=0, watchdog_timeout=5.0)),
    source=ModelSource("hf", "/models/tiny", "tiny"),
    spec=ModelSpec(
        model_type="llama",
        vocab_size=100,
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        torch_dtype="float32",
        eos_token_ids=(1, 2),
    ),
    endpoints=Endpoints("ipc://a", "ipc://b", "ipc://c"),
)


Pair = tuple[ControlChannel[ToSupervisor], ControlChannel[ToChild]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The supervisor's end and the child's."""
    ours, theirs = socket.socketpair()
    supervisor, channel = supervisor_end(ours), child_end(theirs.detach())
    yield supervisor, channel
    supervisor.close()
    channel.close()


@pytest.fixture
def supervisor(pair):
    return pair[0]


@pytest.fixture
def child(pair) -> Child:
    supervisor, channel = pair
    supervisor.send(SETTINGS)
    return Child(channel)


def test_settings_arrive_as_they_were_sent(child):
    assert child.settings == SETTINGS
    assert child.role is Role.TOKENIZER_MANAGER


def test_what_came_along_with_the_settings_is_not_lost(pair):
    supervisor, channel = pair
    supervisor.send(SETTINGS)
    supervisor.send(PeersReady(CAPACITY))

    assert Child(channel).wait_for_peers() == CAPACITY


def test_the_first_news_of_the_peers_opens_the_port_and_later_ones_are_orders(pair):
    supervisor, channel = pair
    news = [PeersReady(CAPACITY), PeersLost("scheduler was killed"), PeersReady(CAPACITY), Stop(drain=True)]
    for message in (SETTINGS, *news):
        supervisor.send(message)
    child = Child(channel)

    async def orders() -> list[Order]:
        return [await child.next_order() for _ in news[1:]]

    assert child.wait_for_peers() == CAPACITY
    assert asyncio.run(orders()) == news[1:]


def test_a_child_says_ready_and_then_beats_at_most_once_per_interval(child, supervisor, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    child.ready(capacity=CAPACITY, load_s="1.5")
    for _ in range(100):
        child.heartbeat()

    assert supervisor.receive() == [Ready(capacity=CAPACITY, details={"load_s": "1.5"}), Heartbeat()]
    now_s += HEARTBEAT_INTERVAL_S
    child.heartbeat()
    child.heartbeat()
    assert supervisor.receive() == [Heartbeat()]


def test_frames_may_arrive_in_pieces_and_be_larger_than_a_read():
    ours, theirs = socket.socketpair()
    supervisor, long = supervisor_end(ours), Failed(kind="bug", message="m", traceback="x" * 100_000)
    sender = supervisor_end(theirs)
    assert sender.send(long)
    assert sender.send(Heartbeat())

    messages: list[ToSupervisor] = []
    while len(messages) < 2:
        assert supervisor.wait(DEADLINE_S)
        messages += supervisor.receive()

    assert messages == [long, Heartbeat()]
    sender.close()
    supervisor.close()


def test_heartbeats_to_a_supervisor_that_does_not_read_never_block(pair):
    supervisor, channel = pair
    for _ in range(10_000):
        channel.send_if_room(Heartbeat())

    assert set(map(type, supervisor.receive())) == {Heartbeat}


def test_a_message_before_the_end_of_file_is_still_received(pair):
    supervisor, channel = pair
    supervisor.send(SETTINGS)
    supervisor.send(Stop(drain=True))
    supervisor.close()
    child = Child(channel)

    assert child.stop_requested()
    assert asyncio.run(child.next_order()) == Stop(drain=True)
    assert asyncio.run(child.next_order()) == Stop(drain=False)


def test_a_supervisor_that_is_gone_means_stop(child, supervisor):
    assert not child.stop_requested()
    supervisor.close()

    assert child.stop_requested()
    with pytest.raises(StopRequested):
        child.wait_for_peers()


def test_a_child_that_is_gone_reads_as_closed(pair):
    supervisor, channel = pair
    channel.close()

    assert supervisor.wait(DEADLINE_S)
    assert supervisor.receive() == []
    assert supervisor.closed
    assert not supervisor.send(Stop(drain=False))


def test_stop_while_waiting_for_peers_ends_the_wait(child, supervisor):
    supervisor.send(Stop(drain=False))

    with pytest.raises(StopRequested):
        child.wait_for_peers()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_orders_come_in_order_and_wake_an_asyncio_loop(child, supervisor, loop_factory):
    async def scene() -> list[object]:
        waiting = asyncio.create_task(child.next_order())
        await asyncio.sleep(0)
        supervisor.send(Stop(drain=True))
        supervisor.send(PeerDied("scheduler was killed by SIGKILL"))
        async with asyncio.timeout(DEADLINE_S):
            return [await waiting, await child.next_order()]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(scene()) == [Stop(drain=True), PeerDied("scheduler was killed by SIGKILL")]


def test_an_asyncio_loop_beats_until_cancelled(child, supervisor):
    async def scene() -> None:
        beating = asyncio.create_task(child.keep_beating())
        await asyncio.sleep(0)
        beating.cancel()

    asyncio.run(scene())

    assert supervisor.receive() == [Heartbeat()]


def test_heartbeats_go_on_while_the_loop_waits_for_other_ranks(supervisor, child):
    waiting = threading.Event()
    child.beat_while(waiting.is_set)

    assert not supervisor.wait(0.7)  # more than the interval
    waiting.set()

    assert supervisor.wait(DEADLINE_S)
    assert set(map(type, supervisor.receive())) == {Heartbeat}  # more than one if we were held up here


def test_frames_of_two_threads_do_not_mix(supervisor, child):
    """A frame of a megabyte does not fit into the socket's buffer, so it goes in pieces."""
    large = Failed("bug", "m", "x" * (1 << 20))
    sender = threading.Thread(target=child._channel.send, args=(large,))

    def beat() -> None:
        while sender.is_alive():
            child._channel.send_if_room(Heartbeat())

    beater = threading.Thread(target=beat)
    received: list[ToSupervisor] = []
    sender.start()
    beater.start()
    while sender.is_alive() or beater.is_alive():
        supervisor.wait(0.01)
        received += supervisor.receive()
    received += supervisor.receive()

    assert [message for message in received if isinstance(message, Failed)] == [large]


# ---------------------------------------------------------------- what all are told


@pytest.fixture
def engine_level() -> Iterator[logging.Logger]:
    """The engine's logger, as it was before at the end."""
    engine = logging.getLogger("engine")
    before = engine.level
    yield engine
    engine.setLevel(before)


def test_another_log_level_counts_at_once_and_is_no_order_to_end(child, supervisor, engine_level):
    names: tuple[LogLevel, ...] = ("debug", "error")
    for name, level in zip(names, (logging.DEBUG, logging.ERROR), strict=True):
        supervisor.send(SetLogLevel(name))
        assert not child.stop_requested()
        assert engine_level.level == level
        assert child.settings.config.log.log_level == name


def profiled(pair: Pair, crash_dir: Path, **fields: Any) -> Child:
    """A scheduler whose profiles lie there."""
    config = dataclasses.replace(SETTINGS.config, log=LogConfig(crash_dir=str(crash_dir)))
    pair[0].send(replace(SETTINGS, role=Role.SCHEDULER, config=config, **fields))
    return Child(pair[1])


def test_a_profile_is_made_while_it_works(pair, tmp_path):
    child = profiled(pair, tmp_path)
    pair[0].send(StartProfile("profile-1", 100.0, 3600.0))
    assert not child.stop_requested()
    assert "stack_sampler" in {thread.name for thread in threading.enumerate()}
    pair[0].send(StopProfile())
    assert not child.stop_requested()
    child.end_profile()
    assert (tmp_path / "profile-1" / "scheduler.folded").exists()


def test_the_end_of_a_process_is_that_of_its_profile(pair, tmp_path):
    """Of one that was started while a profile was made, and is not the first."""
    child = profiled(pair, tmp_path, life=2, profile=StartProfile("profile-1", 100.0, 3600.0))
    child.end_profile()
    assert (tmp_path / "profile-1" / "scheduler-2.folded").exists()


def test_another_profile_ends_the_one_before(pair, tmp_path):
    child = profiled(pair, tmp_path)
    for i in range(2):
        pair[0].send(StartProfile(f"profile-{i}", 100.0, 3600.0))
        child.stop_requested()
    child.end_profile()
    for thread in threading.enumerate():
        if thread.name == "stack_sampler":
            thread.join(DEADLINE_S)
    assert len(list(tmp_path.glob("profile-*/scheduler.folded"))) == 2


def test_what_all_shall_do_goes_to_the_supervisor_and_is_not_waited_for(child, supervisor):
    assert child.order_all(SetLogLevel("debug"))
    assert supervisor.receive() == [SetLogLevel("debug")]
    while child.order_all(StopProfile()):
        pass  # nobody reads
