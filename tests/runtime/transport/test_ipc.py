from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator

import msgspec
import pytest
import uvloop
import zmq

from engine.runtime.messages import AbortRequest, Call, FlushCache, GenerateRequest, SchedulerInput
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.transport.ipc import MAX_MESSAGE_BYTES, AsyncInbox, FanOutbox, Inbox, Outbox

DEADLINE_S = 60.0
DECODER: msgspec.msgpack.Decoder[SchedulerInput] = msgspec.msgpack.Decoder(SchedulerInput)
REQUEST = GenerateRequest("r1", b"\1\0\0\0", SamplingParams(max_new_tokens=3, seed=7), arrival_s=1.5)


class Wake:
    """Something to be woken by, like the control channel."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fileno(self) -> int:
        return self.reader

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield f"ipc://{path}/room.sock"


@pytest.fixture
def inbox(endpoint) -> Iterator[Inbox[SchedulerInput]]:
    inbox = Inbox(endpoint, DECODER)
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(endpoint) -> Iterator[Outbox]:
    outbox = Outbox(endpoint)
    yield outbox
    outbox.close()


def receive(inbox: Inbox[SchedulerInput], count: int) -> list[SchedulerInput]:
    deadline_s = time.monotonic() + DEADLINE_S
    messages: list[SchedulerInput] = []
    while len(messages) < count and time.monotonic() < deadline_s:
        messages += inbox.poll(0.1)
    return messages


def test_a_message_that_waits_can_be_seen(inbox, outbox):
    assert not inbox.has_message()
    outbox.send(REQUEST)
    deadline_s = time.monotonic() + DEADLINE_S
    while not inbox.has_message() and time.monotonic() < deadline_s:
        pass
    assert inbox.has_message(), "and stays to be seen"
    assert inbox.poll() == [REQUEST]
    assert not inbox.has_message()


def test_messages_arrive_in_order_and_typed(inbox, outbox):
    sent = [REQUEST, AbortRequest("r1", "client disconnected"), Call(1, FlushCache())]
    for message in sent:
        outbox.send(message)

    assert receive(inbox, 3) == sent


def test_messages_wait_for_a_receiver_that_binds_later(endpoint, outbox):
    outbox.send(REQUEST)
    inbox = Inbox(endpoint, DECODER)

    assert receive(inbox, 1) == [REQUEST]
    inbox.close()


def test_many_messages_never_block_the_sender(inbox, outbox):
    for i in range(20_000):
        outbox.send(Call(i, FlushCache()))

    assert receive(inbox, 20_000) == [Call(i, FlushCache()) for i in range(20_000)]


@pytest.mark.parametrize(
    ("garbage", "tag"),
    [
        (b"", "unreadable"),
        (b"\xff\xff", "unreadable"),
        (b"not msgpack at all", "unreadable"),
        (msgspec.msgpack.encode([]), "unreadable"),
        (msgspec.msgpack.encode(["x\n2026 level=info", 1]), "unreadable"),
        (b"\x92" * 100_000, "unreadable"),
        (b"\x93\xaaFlushCache\x01" + b"\x91" * 100_000 + b"\x01", "unreadable"),
        (msgspec.msgpack.encode(["Exec", "rm"]), "Exec"),
        (msgspec.msgpack.encode(["GenerateRequest", "r1", "a secret prompt"]), "GenerateRequest"),
    ],
)
def test_a_malformed_message_is_dropped_and_the_next_one_is_read(inbox, outbox, caplog, garbage, tag):
    outbox._socket.send(garbage)
    outbox.send(REQUEST)

    assert receive(inbox, 1) == [REQUEST]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"dropped a malformed message bytes={len(garbage)} tag={tag} error=" in record.message
    assert "secret" not in caplog.text


def test_a_message_beyond_the_limit_is_refused_by_the_socket(inbox):
    assert inbox._socket.maxmsgsize == MAX_MESSAGE_BYTES


def test_poll_returns_empty_when_the_time_is_up(inbox):
    assert inbox.poll() == []
    assert inbox.poll(0.01) == []


def test_poll_wakes_when_the_control_channel_has_news(endpoint):
    wake = Wake()
    inbox = Inbox(endpoint, DECODER, wake=wake)
    os.write(wake.writer, b"x")

    started_s = time.monotonic()
    assert inbox.poll(60.0) == []
    assert time.monotonic() - started_s < DEADLINE_S
    inbox.close()
    wake.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_asyncio_receives_what_plain_code_sends(endpoint, outbox, loop_factory):
    async def scene() -> list[SchedulerInput]:
        inbox = AsyncInbox(endpoint, DECODER)
        received: list[SchedulerInput] = []
        async with asyncio.timeout(DEADLINE_S):
            for i in range(2000):  # bursts of all sizes, so that a lost wake-up would show
                outbox.send(Call(i, FlushCache()))
                if i % 7 == 0:
                    received += await inbox.receive()
            while len(received) < 2000:
                received += await inbox.receive()
        inbox.close()
        return received

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(scene()) == [Call(i, FlushCache()) for i in range(2000)]


def test_asyncio_survives_a_malformed_message(endpoint, outbox):
    async def scene() -> list[SchedulerInput]:
        inbox = AsyncInbox(endpoint, DECODER)
        for _ in range(600):  # more than are taken at once
            outbox._socket.send(b"\xff")
        outbox.send(REQUEST)
        received: list[SchedulerInput] = []
        async with asyncio.timeout(DEADLINE_S):
            while not received:
                received += await inbox.receive()
        inbox.close()
        return received

    assert asyncio.run(scene()) == [REQUEST]


def test_the_socket_is_a_file_only_its_directory_gives_access_to(endpoint, inbox):
    assert os.path.exists(endpoint.removeprefix("ipc://"))
    assert inbox._socket.getsockopt(zmq.LINGER) == 0


def test_a_fan_reaches_everyone_also_who_comes_late_and_in_order():
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        endpoints = [f"ipc://{path}/{name}.sock" for name in "ab"]
        early = Inbox(endpoints[0], DECODER)
        fan = FanOutbox(endpoints)
        messages = [AbortRequest(f"r{number}", "test") for number in range(200)]
        for message in messages[:100]:
            fan.send(message)
        late = Inbox(endpoints[1], DECODER)
        for message in messages[100:]:
            fan.send(message)

        assert receive(early, 200) == messages
        assert receive(late, 200) == messages
        for socket in (fan, early, late):
            socket.close()
