"""Links of engines with two ranks: each moves its part of the pages, and none is free before all ranks are done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.model_runner.memory.page_memory import PageMemory
from engine.runtime.transport.kv_transfer import (
    AbortAck,
    ClaimAborted,
    ClaimFailed,
    FromPeer,
    KVLayout,
    PagesWritten,
    PeerLost,
    Prefilled,
    ToPeer,
    WritePages,
    digest_of,
)
from engine.scheduler.transfer.link import decode_link, prefill_link
from engine.scheduler.transfer.link import local_pages as local
from engine.scheduler.transfer.link.pages import DRAIN_S, DirectReceiver, DirectSender
from engine.scheduler.transfer.link.ranks import Ranks

from .fake_backend import FakeTarget, FakeWriter
from .sides import WAIT_S, LaterTime, MakeSides, Side, claim, ids, make_pool, make_prefill_link

STEP = 3


def begin(prefill: Side, decode: Side, peer: str, *, computed: bool = True) -> str:
    """A claim, and a write for it; returns the decode engine's name."""
    claim(decode, peer)
    got = prefill.next()
    assert isinstance(got, FromPeer), got
    if computed:
        prefill.workers[0].launched(STEP)
    prefill.link.send([WritePages(got.peer, "a", 1, ids(1, 2), ids(5, 6), STEP)])
    return got.peer


def finish(prefill: Side, decode: Side, peer: str, name: str) -> None:
    """The write ends well, then the first token comes."""
    written = prefill.next()
    assert isinstance(written, PagesWritten) and not written.error, written
    result = Prefilled("a", 1, 2, ids(3))
    prefill.link.send([ToPeer(name, result)])
    assert decode.next() == FromPeer(peer, result)


def expect_pages(prefill: Side, decode: Side) -> None:
    for ours, theirs in zip(prefill.pools, decode.pools, strict=True):
        for here, there in zip(ours.page_views, theirs.page_views, strict=True):
            assert torch.equal(there[5:7], here[1:3])


class HeldMemory:
    """The memory of a rank, whose writes wait until the test lets them go on."""

    def __init__(self, memory: PageMemory) -> None:
        self._memory = memory
        self.began = threading.Event()
        self.goes_on = threading.Event()

    def write(self, pages: Any, frames: Sequence[memoryview | bytes]) -> None:
        self.began.set()
        assert self.goes_on.wait(WAIT_S)
        self._memory.write(pages, frames)


def hold_stores(side: Side) -> HeldMemory:
    """Of rank 1."""
    held = HeldMemory(side.memories[1])
    side.workers[0]._memory = held  # type: ignore[assignment]
    return held


class TestThroughTheConnection:
    def test_the_parts_of_all_ranks_arrive_before_the_first_token(
        self, make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local, "MESSAGE_BYTES", 1)  # a message for each page
        monkeypatch.setattr(local, "WINDOW", 1)
        prefill, decode, peer = make_sides(num_ranks=2)
        prefill.fill()
        name = begin(prefill, decode, peer)
        finish(prefill, decode, peer, name)
        expect_pages(prefill, decode)

    def test_a_rank_sends_no_page_that_it_has_not_computed(self, make_sides: MakeSides) -> None:
        prefill, decode, peer = make_sides(num_ranks=2)
        prefill.fill()
        name = begin(prefill, decode, peer, computed=False)
        prefill.workers[0].launched(STEP - 1)
        assert prefill.inbox.poll(0.1) == []
        prefill.workers[0].launched(STEP)
        finish(prefill, decode, peer, name)
        expect_pages(prefill, decode)

    def test_an_abort_is_answered_when_no_rank_stores_any_more(self, make_sides: MakeSides) -> None:
        prefill, decode, peer = make_sides(num_ranks=2)
        held = hold_stores(decode)
        name = begin(prefill, decode, peer)
        assert held.began.wait(WAIT_S)
        decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])
        told = prefill.next()
        assert isinstance(told, FromPeer) and told.message == ClaimAborted("a", 1)
        prefill.link.send([ToPeer(name, ClaimFailed("a", 1, "it was aborted"))])
        assert decode.inbox.poll(0.1) == []

        held.goes_on.set()

        answers = [decode.next(), decode.next()]
        assert FromPeer(peer, AbortAck("a", 1)) in answers
        assert FromPeer(peer, ClaimFailed("a", 1, "it was aborted")) in answers

    def test_pages_that_are_being_stored_outlive_their_connection(self, make_sides: MakeSides) -> None:
        prefill, decode, peer = make_sides(num_ranks=2)
        held = hold_stores(decode)
        begin(prefill, decode, peer)
        assert held.began.wait(WAIT_S)
        prefill.close()
        assert decode.next() == PeerLost(peer, f"the connection to {peer} was closed")
        decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])  # as the scheduler does then
        assert decode.inbox.poll(0.1) == []

        held.goes_on.set()

        assert decode.next() == FromPeer(peer, AbortAck("a", 1))

    def test_a_rank_that_cannot_store_fails_the_claim(
        self, make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill, decode, peer = make_sides(num_ranks=2)
        monkeypatch.setattr(decode.memories[1], "write", self.refuse)
        begin(prefill, decode, peer)
        news = decode.next()
        assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
        assert news.message.reason == f"pages from {peer} do not fit: rank 1: too large"
        told = {type(each) for each in (prefill.next(), prefill.next())}
        assert told == {FromPeer, PagesWritten}  # the abort, and the end of the write

    def refuse(self, *_arguments: object) -> None:
        raise ValueError("too large")

    def test_a_lost_decode_engine_holds_up_no_write(
        self, make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill, decode, peer = make_sides(num_ranks=2)
        held = hold_stores(decode)
        name = begin(prefill, decode, peer)
        assert held.began.wait(WAIT_S)
        decode.link._stops = True
        monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 0.3)
        assert prefill.next() == PeerLost(name, "no sign of life for 0.3 s")
        written = prefill.next()
        assert isinstance(written, PagesWritten) and written.error == f"{name} is lost"
        held.goes_on.set()

    def test_another_layout_of_a_rank_is_refused_by_name(self, make_sides: MakeSides) -> None:
        tensors = PageMemory(make_pool().views).tensors
        _, decode, peer = make_sides(num_ranks=2, layout=KVLayout("1", "w", 4, tensors, tp=2, others=("x",)))
        claim(decode, peer)
        news = decode.next()
        assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
        words = f"they differ in KV dtype or shape of rank 1 (digest): {digest_of(tensors)} and x"
        assert news.message.reason.endswith(words)


class TestWrittenByEachRank:
    """With a transfer library."""

    def make(self, make_sides: MakeSides, refusal: str = "") -> tuple[Side, Side, str, list[FakeWriter]]:
        """The sides, and the writers of rank 0 and rank 1."""
        writers: list[FakeWriter] = []

        def writer(memory: PageMemory) -> FakeWriter:
            writers.append(FakeWriter(memory))
            return writers[-1]

        def sender(memory: PageMemory, ranks: Ranks) -> DirectSender:
            writers.insert(0, FakeWriter(memory))
            writers[1].refusal = refusal
            return DirectSender(writers[0], ranks)

        def receiver(memory: PageMemory, ranks: Ranks) -> DirectReceiver:
            return DirectReceiver(FakeTarget(memory), ranks)

        sides = make_sides(num_ranks=2, sender=sender, receiver=receiver, writer=writer, target=FakeTarget)
        return *sides, writers

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_a_write_is_done_when_all_ranks_have_written(
        self, make_sides: MakeSides, order: tuple[int, int]
    ) -> None:
        prefill, decode, peer, writers = self.make(make_sides)
        prefill.fill()
        name = begin(prefill, decode, peer)
        writes = [writer.next_write() for writer in writers]
        writes[order[0]].end()
        assert prefill.inbox.poll(0.1) == []
        writes[order[1]].end()
        finish(prefill, decode, peer, name)
        expect_pages(prefill, decode)

    def test_a_rank_writes_no_page_that_it_has_not_computed(self, make_sides: MakeSides) -> None:
        prefill, decode, peer, writers = self.make(make_sides)
        name = begin(prefill, decode, peer, computed=False)
        writers[0].next_write().end()
        assert prefill.inbox.poll(0.1) == [] and not writers[1].begun
        prefill.workers[0].launched(STEP + 1)
        writers[1].next_write().end()
        finish(prefill, decode, peer, name)

    @pytest.mark.parametrize("failing", [0, 1])
    def test_a_failure_is_told_when_nothing_of_any_rank_can_arrive_any_more(
        self, make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch, failing: int
    ) -> None:
        """Until then no other request may have the pages: a kernel may still deliver what it was handed before."""
        monkeypatch.setattr(prefill_link, "time", clock := LaterTime())
        prefill, decode, peer, writers = self.make(make_sides)
        begin(prefill, decode, peer)
        writes = [writer.next_write() for writer in writers]
        writes[failing].end("the wire is cut")
        assert prefill.inbox.poll(0.1) == []
        writes[1 - failing].end()
        assert prefill.inbox.poll(0.1) == []
        clock.added_s = DRAIN_S
        written = prefill.next()
        assert isinstance(written, PagesWritten) and written.error.endswith("the wire is cut")
        assert written.error.startswith("rank 1: ") == bool(failing)

    def test_a_peer_that_a_rank_cannot_reach_is_refused_by_name(self, make_sides: MakeSides) -> None:
        _, decode, peer, _ = self.make(make_sides, refusal="no route")
        claim(decode, peer)
        news = decode.next()
        assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
        assert news.message.reason == f"{peer} refuses this engine: rank 1: no route"

    def test_all_ranks_make_progress_while_a_claim_is_open(self, make_sides: MakeSides) -> None:
        prefill, decode, peer, _ = self.make(make_sides)
        own, other = decode.link._receiver._target, decode.workers[0]._target
        assert other is not None
        claim(decode, peer)
        prefill.next()
        before = own.num_progress, other.num_progress  # type: ignore[attr-defined]
        assert decode.inbox.poll(0.2) == []
        after = own.num_progress, other.num_progress  # type: ignore[attr-defined]
        assert after[0] > before[0] and after[1] > before[1]

    def test_pages_are_free_when_the_last_rank_of_an_earlier_connection_has_written(
        self, make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The decode engine connects again while rank 1 still writes for its earlier connection."""
        monkeypatch.setattr(decode_link, "PING_S", 1000.0)  # silent
        prefill, decode, peer, writers = self.make(make_sides)
        begin(prefill, decode, peer)
        writes = [writer.next_write() for writer in writers]
        monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 0.1)
        assert isinstance(prefill.next(), PeerLost)
        monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 100.0)
        writes[0].end()
        claim(decode, peer, bootstrap_room="b", attempt=2)
        lost = decode.next()
        assert isinstance(lost, PeerLost)
        claim(decode, peer, bootstrap_room="c", attempt=3)
        assert decode.inbox.poll(0.2) == []

        writes[1].end()

        assert decode.next() == FromPeer(peer, AbortAck("a", 1))
        told = {type(prefill.next()), type(prefill.next())}
        assert told == {PagesWritten, FromPeer}

    def test_a_rank_that_never_ends_its_write_makes_the_engine_refuse(
        self, make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prefill_link, "WRITE_S", 0.2)
        prefill, decode, peer, writers = self.make(make_sides)
        begin(prefill, decode, peer)
        writers[0].next_write().end()
        late = writers[1].next_write()
        told = [prefill.next(), prefill.next()]
        assert {type(each) for each in told} == {PagesWritten, PeerLost}
        assert isinstance(decode.next(), PeerLost)
        claim(decode, peer, bootstrap_room="c", attempt=3)
        news = decode.next()
        assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
        assert "a write to it did not end" in news.message.reason
        late.end()  # its answer is not waited for any more
        assert prefill.inbox.poll(0.1) == []


def test_a_restarted_prefill_engine_is_welcome_with_all_its_ranks(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides(num_ranks=2)
    name = begin(prefill, decode, peer)
    finish(prefill, decode, peer, name)
    prefill.link.close()
    assert decode.next() == PeerLost(peer, f"the connection to {peer} was closed")
    for worker in prefill.workers:
        worker.close()
    prefill.workers.clear()
    prefill.fill()
    prefill.link = make_prefill_link(prefill, int(peer.rpartition(":")[2]))

    name = begin(prefill, decode, peer)
    finish(prefill, decode, peer, name)
    expect_pages(prefill, decode)
