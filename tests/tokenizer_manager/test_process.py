from __future__ import annotations

import asyncio
import os
import socket

import msgspec
import pytest

from engine.launch.child.control import Order, PeerDied, PeersLost, PeersReady, Stop
from engine.runtime.config.engine_config import EngineConfig, ModelConfig
from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.generation import GenerationRequest
from engine.tokenizer_manager.http.port import bind
from engine.tokenizer_manager.process import _listener, obey, seed_source, warn_of_unknown_tokens

from .fake_engine import CAPACITY, TOKENIZER, WAIT_S, FakeEngine, make_services


def test_a_port_that_is_taken_is_refused_with_a_way_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1 port {port}: .* --port"):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(ConfigError, match="203.0.113.1"):
        bind("203.0.113.1", 0)


def test_binding_does_not_listen_yet():
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), timeout=WAIT_S)


def test_an_inherited_port_is_not_inherited_any_further():
    with bind("127.0.0.1", 0) as ours:
        inherited_fd = os.dup(ours.fileno())
        os.set_inheritable(inherited_fd, True)
        with _listener(ServerConfig(), inherited_fd) as listener:
            assert listener.getsockname() == ours.getsockname()
            assert not listener.get_inheritable()


def test_a_configured_seed_is_everyones_and_others_differ():
    fixed = seed_source(EngineConfig(model=ModelConfig(seed=5)))
    drawn = seed_source(EngineConfig())

    assert [fixed(), fixed()] == [5, 5]
    assert len({drawn() for _ in range(8)}) == 8


def test_a_tokenizer_that_is_wider_than_the_model_is_said(caplog):
    warn_of_unknown_tokens(TOKENIZER, CAPACITY)
    assert caplog.messages == []
    warn_of_unknown_tokens(TOKENIZER, msgspec.structs.replace(CAPACITY, vocab_size=256))
    assert "the tokenizer has 258 tokens and the model 256" in caplog.messages[0]


class Orders:
    """The supervisor's orders, as `Child.next_order` gives them."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Order] = asyncio.Queue()

    async def next_order(self) -> Order:
        return await self.queue.get()


def obeying(*orders: Order, live: bool, drain_timeout_s: float = WAIT_S) -> tuple[bool, str | None, int]:
    """Whether it ended, what a stream was told, and how many aborts were sent, after these orders."""

    async def main() -> tuple[bool, str | None, int]:

        engine, source = FakeEngine(), Orders()
        manager = make_services(engine).manager
        generation = None
        if live:
            generation = await manager.start(GenerationRequest(prompts=["hi"], sampling=SamplingParams()))
        for order in orders:
            source.queue.put_nowait(order)
        task = asyncio.create_task(obey(source, manager, drain_timeout_s))
        for _ in range(20):
            await asyncio.sleep(0)
        if drain_timeout_s < 1:
            async with asyncio.timeout(WAIT_S):
                await task
        ended = task.done()
        task.cancel()
        failure = None if generation is None or generation.failure is None else str(generation.failure)
        return ended, failure, engine.aborts.qsize()

    return asyncio.run(main())


def test_draining_ends_at_once_when_nothing_runs():
    assert obeying(Stop(drain=True), live=False) == (True, None, 0)


def test_draining_waits_for_what_runs():
    assert obeying(Stop(drain=True), live=True) == (False, None, 0)


def test_draining_ends_with_errors_when_time_is_up():
    ended, failure, num_aborts = obeying(Stop(drain=True), live=True, drain_timeout_s=0.01)

    assert (ended, num_aborts) == (True, 1)
    assert "the server stopped before the answer was complete" in str(failure)


@pytest.mark.parametrize("orders", [[Stop(drain=False)], [Stop(drain=True), Stop(drain=False)]])
def test_a_stop_without_drain_ends_at_once(orders):
    ended, failure, num_aborts = obeying(*orders, live=True)

    assert (ended, num_aborts) == (True, 1)
    assert "the server stopped" in str(failure)


@pytest.mark.parametrize("before", [[], [Stop(drain=True)]])
def test_a_lost_peer_that_is_back_ends_nothing(before):
    lost, back = PeersLost("scheduler was killed"), PeersReady(CAPACITY)

    # One abort: of what a lost scheduler may have left to its successor.
    assert obeying(*before, lost, back, live=True) == (False, None, 1)


@pytest.mark.parametrize("before", [[], [Stop(drain=True)]])
def test_a_dead_peer_is_the_root_cause_that_clients_hear(before):
    ended, failure, _ = obeying(*before, PeerDied("scheduler died: SIGKILL"), live=True)

    assert (ended, failure) == (True, "scheduler died: SIGKILL")
