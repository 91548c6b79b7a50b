"""`KVEventPublisher` with real sockets, read with msgpack alone, as a router in another language reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from engine.runtime.config.kv_event_settings import KVEventSettings
from engine.runtime.errors import ConfigError
from engine.scheduler.adapters.adapter_table import Adapter
from engine.scheduler.kv_events.publisher import KVEventPublisher
from engine.scheduler.kv_events.wire import MAX_EVENTS
from engine.scheduler.prefix_cache.block_events import BlockEvent, BlocksRemoved, BlocksStored

WAIT_MS = 20_000
END = 2**64 - 1
ANY_PORT = "tcp://127.0.0.1:0"


def stored(*hashes: int, parent: int | None = None, lora_id: str = "") -> BlocksStored:
    token_ids = np.arange(16 * len(hashes), dtype=np.int32).tobytes()
    return BlocksStored(list(hashes), parent, token_ids, lora_id)


class World:
    """A publisher and its subscribers."""

    def __init__(self, replica: int = 0, **settings: Any) -> None:
        self.publisher = KVEventPublisher(
            KVEventSettings(ANY_PORT, ANY_PORT, **settings), 16, replica, clock=lambda: 1234.5
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def subscribe(self, topic: bytes = b"", rcvhwm: int = 0) -> zmq.Socket[bytes]:
        """A subscriber that is connected: it has seen a message."""
        socket = self.context.socket(zmq.SUB)
        socket.rcvhwm = rcvhwm
        socket.subscribe(topic)
        socket.connect(self.publisher.endpoints[0])
        while not socket.poll(20):
            self.publisher.clear()
        while socket.poll(200):
            socket.recv_multipart()
        return socket

    def publish(self, *events: BlockEvent) -> None:
        self.publisher.publish(events, {"fp": adapter(7, "sql")}.get)

    def ask(self, first: int) -> list[list[bytes]]:
        """What the replay socket has from a number on; the end is left out. A REQ socket takes one answer only."""
        socket = self.context.socket(zmq.DEALER)
        socket.rcvhwm = 0
        socket.connect(self.publisher.endpoints[1])
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        answers = []
        while True:
            assert socket.poll(WAIT_MS)
            delimiter, topic, seq, payload = socket.recv_multipart()
            assert delimiter == b""
            if int.from_bytes(seq, "big") == END:
                assert (topic, payload) == (b"", b"")
                break
            answers.append([topic, seq, payload])
        socket.close(linger=0)
        return answers

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


def adapter(number: int, name: str) -> Adapter:
    return Adapter(number, name)


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**settings: Any) -> World:
        worlds.append(World(**settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def read(socket: zmq.Socket[bytes]) -> tuple[bytes, int, Any]:
    assert socket.poll(WAIT_MS)
    topic, seq, payload = socket.recv_multipart()
    return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)


def test_the_wire_is_that_of_vllm(make_world):
    world = make_world(replica=3, topic="kv")
    socket = world.subscribe(b"kv")

    world.publish(stored(1, 2, parent=2**63 - 1), stored(3, lora_id="fp"), BlocksRemoved([1]))
    topic, seq, (time_s, events, rank) = read(socket)
    world.publish(stored(4, lora_id="unloaded"))
    _, next_seq, (_, (unloaded,), _) = read(socket)

    assert (topic, time_s, rank, next_seq) == (b"kv", 1234.5, 3, seq + 1)
    plain, adapted, removed = events
    assert plain == {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": 2**63 - 1,
        "token_ids": list(range(32)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert (adapted["lora_id"], adapted["lora_name"], adapted["parent_block_hash"]) == (7, "sql", None)
    assert removed == {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    assert (unloaded["lora_id"], unloaded["lora_name"]) == (None, "unloaded")


def test_the_first_message_clears_and_what_came_before_a_subscriber_can_be_replayed(make_world):
    world = make_world()
    world.publisher.clear()
    for number in range(5):
        world.publish(stored(number))
    world.publish()  # nothing

    answers = world.ask(0)
    part = world.ask(4)

    assert [int.from_bytes(seq, "big") for _, seq, _ in answers] == [0, 1, 2, 3, 4, 5]
    assert msgspec.msgpack.decode(answers[0][2])[1] == [{"type": "AllBlocksCleared"}]
    assert part == answers[4:]
    assert world.ask(6) == []
    assert world.publisher.num_events == 6
    assert world.publisher.num_replays == 3


def test_a_bad_request_is_ignored(make_world):
    world = make_world()
    world.publish(stored(1))
    bad = world.context.socket(zmq.DEALER)
    bad.connect(world.publisher.endpoints[1])
    bad.send_multipart([b"", b"from the beginning"])

    assert len(world.ask(0)) == 1
    assert world.publisher.num_replays == 1
    bad.close(linger=0)


def test_a_subscriber_that_does_not_read_loses_messages_and_gets_them_from_the_buffer(make_world):
    world = make_world(hwm=5)
    slow, quick = world.subscribe(rcvhwm=1), world.subscribe()
    first = read_through(world, quick)

    for number in range(3000):  # 30 MB: more than the buffers of two sockets
        world.publish(stored(*range(number * 100, number * 100 + 100)))
        while number % 4 == 0 and quick.poll(0):
            quick.recv_multipart()
    seqs = []
    while slow.poll(500):
        seqs.append(int.from_bytes(slow.recv_multipart()[1], "big"))
    seen = [seq for seq in seqs if seq >= first]
    gap = next(seq for seq in range(first, first + 3000) if seq not in seen)
    answers = world.ask(gap)

    assert len(seen) < 3000
    assert [int.from_bytes(seq, "big") for _, seq, _ in answers] == list(range(gap, first + 3000))


def read_through(world: World, socket: zmq.Socket[bytes]) -> int:
    """The number of the next message."""
    world.publisher.clear()
    return read(socket)[1] + 1


def test_the_buffer_is_bounded_and_a_replay_begins_with_the_oldest_message(make_world):
    world = make_world(buffer_steps=3)
    for number in range(10):
        world.publish(stored(number))

    assert [int.from_bytes(seq, "big") for _, seq, _ in world.ask(0)] == [7, 8, 9]


def test_many_events_are_divided_among_messages(make_world):
    world = make_world()
    world.publish(*(BlocksRemoved([number]) for number in range(MAX_EVENTS + 1)))

    sizes = [len(msgspec.msgpack.decode(payload)[1]) for _, _, payload in world.ask(0)]

    assert sizes == [MAX_EVENTS, 1]


def test_an_address_in_use_is_the_users_to_change(make_world):
    taken = make_world().publisher.endpoints[0]

    with pytest.raises(
        ConfigError, match=f"kv_events_replay is '{taken}', but it cannot be listened at: Address "
    ):
        KVEventPublisher(KVEventSettings(ANY_PORT, taken), 16)
