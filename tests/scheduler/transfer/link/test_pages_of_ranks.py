"""`Ranks`, and the senders with ranks that answer late, never, twice, out of order, or with an error."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.errors import RankLostError
from engine.runtime.kv_backends.base import TransferError
from engine.runtime.transport.kv_transfer import PageData, WritePages
from engine.runtime.transport.message_base import own_identity
from engine.runtime.transport.rank_transfer import (
    DropPeer,
    OrderDone,
    ReadOwnPages,
    ToWorker,
    WorkerReady,
    worker_name,
)
from engine.scheduler.transfer.link.local_pages import WINDOW, LocalSender
from engine.scheduler.transfer.link.pages import AllOf
from engine.scheduler.transfer.link.ranks import Ordered, Ranks

WAIT_MS = 30_000
TENSORS = (("bfloat16", 64),)
ORDER = ReadOwnPages(0, b"\1\0\0\0", 7)


class Worker:
    """The connection of a rank, which a test answers by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.identity = name.encode()
        self.socket.connect(endpoint)

    def say(self, message: Any, *frames: bytes) -> None:
        self.socket.send_multipart([msgspec.msgpack.encode(message), *frames])

    def next(self) -> Any:
        assert self.socket.poll(WAIT_MS)
        data, *_ = self.socket.recv_multipart()
        return msgspec.msgpack.decode(data, type=ToWorker)


@pytest.fixture
def endpoint() -> Iterator[str]:
    path = Path("/tmp") / f"ranks-{secrets.token_hex(6)}"
    yield f"ipc://{path}"
    path.unlink(missing_ok=True)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def wait_for(ordered: Ordered) -> None:
    """Until it has ended well."""
    while not ordered.is_done():
        ordered._ranks._socket.poll(WAIT_MS)


def test_each_answer_ends_its_order_once_and_in_any_order(endpoint: str, context: Any) -> None:
    ranks = Ranks(endpoint, num_ranks=2, life=4)
    worker = Worker(context, endpoint, worker_name(1, 4))
    worker.say(WorkerReady(own_identity(), TENSORS, b"target"))
    ranks.wait(30.0)
    assert [each.target for each in ranks.workers] == [b"target"]
    first, second = ranks.order(1, ORDER), ranks.order(1, ORDER)
    numbers = [worker.next().order for _ in range(2)]

    worker.say(OrderDone(numbers[1]), b"frame")
    worker.say(OrderDone(numbers[1], "twice"))
    worker.say(OrderDone(99, "of no order"))
    worker.socket.send(b"not a message")

    wait_for(second)
    assert [bytes(frame) for frame in second.frames] == [b"frame"]
    assert not first.is_done()
    worker.say(OrderDone(numbers[0], "no memory"))
    with pytest.raises(TransferError, match="rank 1: no memory"):
        wait_for(first)
    assert second.is_done()
    ranks.close()


def test_a_worker_of_an_earlier_life_is_not_heard(endpoint: str, context: Any) -> None:
    ranks = Ranks(endpoint, num_ranks=3, life=2)
    workers = [Worker(context, endpoint, worker_name(rank, life)) for rank, life in ((1, 1), (2, 2))]
    for worker in workers:
        worker.say(WorkerReady(own_identity(), TENSORS))
    with pytest.raises(RankLostError, match=r"0\.5 s for the KV transfers of rank 1$"):
        ranks.wait(0.5)
    ranks.close()


def order_until_it_fails(ranks: Ranks) -> None:
    """The kernel tells of the end of a connection a little later."""
    while True:
        assert not ranks.order(1, ORDER).is_done()


def test_an_order_for_a_rank_that_is_gone_fails(endpoint: str, context: Any) -> None:
    ranks = Ranks(endpoint, num_ranks=2, life=0)
    worker = Worker(context, endpoint, worker_name(1, 0))
    worker.say(WorkerReady(own_identity(), TENSORS))
    ranks.wait(30.0)
    worker.socket.close(linger=0)
    with pytest.raises(TransferError, match="rank 1: it cannot be reached"):
        order_until_it_fails(ranks)
    ranks.send(DropPeer("a"))
    ranks.close()


class Part:
    """`Work` that ends when the test says so."""

    def __init__(self) -> None:
        self.is_over = False
        self.error = ""

    def is_done(self) -> bool:
        if self.error:
            raise TransferError(self.error)
        return self.is_over


@given(
    ends=st.lists(st.sampled_from(["", "cut"]), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    never=st.booleans(),
)
def test_work_of_all_ranks_ends_with_the_last_one(ends: list[str], order: Any, never: bool) -> None:
    parts = [Part() for _ in ends]
    work = AllOf(parts)
    indices = list(range(len(ends)))
    order.shuffle(indices)
    for index in indices[: len(indices) - never]:
        assert not work.is_done() and not work.stop()
        parts[index].is_over, parts[index].error = True, ends[index]
    if never:
        assert not work.is_done() and not work.stop()
    elif any(ends):
        with pytest.raises(TransferError, match="cut"):
            work.is_done()
    else:
        assert work.is_done() and work.stop()


class FakeMemory:
    regions = ()
    tensors = TENSORS
    device_id = None
    page_bytes = 8 << 20  # a message for each page

    def read(self, pages: Any) -> list[memoryview]:
        return [memoryview(f"0:{pages[0]}".encode())]

    def write(self, pages: Any, frames: Any) -> None:
        raise AssertionError


class FakeRead:
    def __init__(self, rank: int, page: int) -> None:
        self.rank, self.page = rank, page
        self.is_over, self.error = False, ""
        self.frames = [f"{rank}:{page}".encode()]

    def is_done(self) -> bool:
        if self.error:
            raise TransferError(self.error)
        return self.is_over


class FakeRanks:
    def __init__(self, count: int) -> None:
        self.count = count
        self.reads: list[FakeRead] = []

    def __len__(self) -> int:
        return self.count

    def order(self, rank: int, order: ReadOwnPages) -> FakeRead:
        self.reads.append(FakeRead(rank, int(np.frombuffer(order.pages, dtype=np.int32)[0])))
        return self.reads[-1]


ACTIONS = st.lists(st.sampled_from(["look", "read", "take", "take twice", "fail", "stop"]), max_size=60)


@given(actions=ACTIONS, num_others=st.integers(0, 2), num_pages=st.integers(1, 9))
def test_local_pages_are_sent_once_and_few_are_under_way(
    actions: list[str], num_others: int, num_pages: int
) -> None:
    ranks: Any = FakeRanks(num_others)
    sender = LocalSender(FakeMemory(), ranks)
    sender.add_peer("peer", [b""] * (1 + num_others))
    sources = np.arange(1, num_pages + 1, dtype=np.int32)
    command = WritePages("peer", "a", 1, sources.tobytes(), (sources + 50).tobytes(), 7)
    sent: list[tuple[int, int]] = []
    untaken: list[int] = []
    error = ""

    def send(frames: Any) -> None:
        head = msgspec.msgpack.decode(frames[0], type=PageData)
        target = int(np.frombuffer(frames[1], dtype=np.int32)[0])
        assert bytes(frames[2]) == f"{head.rank}:{target - 50}".encode()
        sent.append((head.rank, target))
        untaken.append(head.number)

    work = sender.write(command, send)

    def look() -> bool:
        assert len([read for read in ranks.reads if not read.is_over]) + len(untaken) <= WINDOW
        if not error:
            return work.is_done()
        with pytest.raises(TransferError, match=error):
            work.is_done()
        return False

    for action in actions:
        open_reads = [read for read in ranks.reads if not read.is_over]
        oldest: Any = work._reading[0][2] if work._reading else None
        match action:
            case "look":
                look()
            case "read" if open_reads:
                open_reads[-1].is_over = True  # out of order
            case "take" if untaken:
                sender.taken("peer", untaken.pop(0))
            case "take twice" if untaken:
                number = untaken.pop()
                sender.taken("peer", number)
                sender.taken("peer", number)
            case "fail" if oldest is not None and not oldest.is_over and not error:
                oldest.error = error = "no memory"
            case "stop" if not error:
                assert work.stop()
                error = "peer is lost"
    if error:
        look()
        assert len(sent) == len(set(sent))
        sender.drop_peer("peer")
        sender.add_peer("peer", [b""])
        untaken.clear()
        error = ""
        ranks.reads.clear()
        sent.clear()
        work = sender.write(command, send)
    while not look():
        for read in ranks.reads:
            read.is_over = True
        while untaken:
            sender.taken("peer", untaken.pop())
    assert sorted(sent) == [(rank, 50 + n) for rank in range(1 + num_others) for n in range(1, num_pages + 1)]
