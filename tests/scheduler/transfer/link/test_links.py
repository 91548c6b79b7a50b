"""`PrefillLink` and `DecodeLink` over a real connection: claims, pages, refusals, and ends of either side."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from msgspec.structs import replace

from engine.model_runner.memory.page_memory import PageMemory
from engine.runtime.errors import ConfigError
from engine.runtime.transport.cluster_ipc import load_cluster_key
from engine.runtime.transport.kv_transfer import (
    AbortAck,
    Claim,
    ClaimAborted,
    ClaimFailed,
    FromPeer,
    Hello,
    KVLayout,
    PagesWritten,
    PeerLost,
    Ping,
    Prefilled,
    SayHello,
    ToDecode,
    ToPeer,
    ToPrefill,
    Welcome,
    WritePages,
)
from engine.runtime.transport.message_base import Message, own_identity
from engine.scheduler.transfer.link import decode_link, prefill_link
from engine.scheduler.transfer.link import peers as lookups
from engine.scheduler.transfer.link.decode_link import DecodeLink
from engine.scheduler.transfer.link.local_pages import LocalReceiver, LocalSender
from engine.scheduler.transfer.link.pages import DRAIN_S
from engine.scheduler.transfer.link.peers import Lookups, Peer
from engine.scheduler.transfer.link.ranks import Ranks

from .sides import WAIT_S, LaterTime, MakeSides, Side, claim, free_port, ids, make_pool, make_prefill_link


class Unfinished:
    """A write that ends when the test wants it to."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def is_done(self) -> bool:
        return self.is_over.is_set()

    def stop(self) -> bool:
        return False


class UnfinishedSender(LocalSender):
    """All its writes are one `Unfinished`."""

    def __init__(self, memory: PageMemory, ranks: Ranks) -> None:
        super().__init__(memory, ranks)
        self.under_way = Unfinished()

    def write(self, *arguments: object) -> Unfinished:  # type: ignore[override]
        return self.under_way


class Polled(LocalReceiver):
    """A backend that makes progress on both sides."""

    is_passive = False
    polls = True

    def __init__(self, memory: PageMemory, ranks: Ranks) -> None:
        super().__init__(memory, ranks)
        self.has_progressed = threading.Event()

    def progress(self) -> None:
        self.has_progressed.set()


class WrittenFromOutside(LocalReceiver):
    """As a backend whose prefill engines write into this engine's memory."""

    is_passive = False


def test_pages_arrive_before_the_first_token(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides()
    for view in prefill.pool.page_views:
        view.normal_()
    sent = claim(decode, peer)

    got = prefill.next()
    assert isinstance(got, FromPeer) and got.message == sent
    result = Prefilled("a", 1, 2, ids(3))
    prefill.link.send([WritePages(got.peer, "a", 1, ids(1, 2), ids(5, 6), 1)])
    written = prefill.next()
    assert isinstance(written, PagesWritten) and not written.error
    prefill.link.send([ToPeer(got.peer, result)])

    assert decode.next() == FromPeer(peer, result)
    for here, there in zip(prefill.pool.page_views, decode.pool.page_views, strict=True):
        assert torch.equal(there[5:7], here[1:3])


def test_pages_of_an_aborted_claim_are_dropped(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides()
    claim(decode, peer)
    got = prefill.next()
    assert isinstance(got, FromPeer)
    for view in prefill.pool.page_views:
        view.fill_(1.0)
    for view in decode.pool.page_views:
        view.fill_(2.0)
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])
    assert decode.next() == FromPeer(peer, AbortAck("a", 1))

    prefill.link.send([WritePages(got.peer, "a", 1, ids(1, 2), ids(5, 6), 1)])
    prefill.link.send([ToPeer(got.peer, ClaimFailed("a", 1, "gone"))])

    assert decode.next() == FromPeer(peer, ClaimFailed("a", 1, "gone"))
    assert all(bool((view == 2.0).all()) for view in decode.pool.page_views)
    told = [prefill.next() for _ in range(2)]
    assert any(isinstance(each, FromPeer) and each.message == ClaimAborted("a", 1) for each in told)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 16}, "they differ in --page-size: 4 and 16"),
        ({"weights": "other"}, "they differ in weight files (fingerprint): w and other"),
        ({"model": "x"}, "they differ in configuration of the model (digest):  and x"),
        ({"release": "2"}, "they differ in engine version: 1 and 2"),
        ({"tp": 2}, "they differ in --tp: 1 and 2"),
        (
            {"tensors": (("int8", 5),)},
            "they differ in KV dtype or shape: 4 tensors (bfloat16 with 64 bytes a page)",
        ),
    ],
)
def test_another_layout_is_refused_by_name(
    make_sides: MakeSides, changes: dict[str, Any], words: str
) -> None:
    own = KVLayout("1", "w", 4, PageMemory(make_pool().views).tensors)
    _, decode, peer = make_sides(layout=msgspec.structs.replace(own, **changes))
    claim(decode, peer)

    news = decode.next()

    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
    assert words in news.message.reason


def test_another_backend_is_refused(make_sides: MakeSides) -> None:
    _, decode, peer = make_sides(backend="nixl")
    claim(decode, peer)
    news = decode.next()
    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
    assert "they differ in --transfer-backend: local and nixl" in news.message.reason


def test_the_end_of_the_prefill_engine_is_noticed_at_once(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides()
    claim(decode, peer)
    prefill.next()

    prefill.close()

    news = decode.next()
    assert isinstance(news, PeerLost) and news.peer == peer


def test_no_engine_at_the_address(make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_link, "CONNECT_S", 0.2)
    _, decode, _ = make_sides()
    claim(decode, f"127.0.0.1:{free_port()}")
    news = decode.next()
    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
    assert "no prefill engine has answered" in news.message.reason


def test_an_address_that_does_not_exist(make_sides: MakeSides) -> None:
    _, decode, _ = make_sides()
    claim(decode, "host.invalid:1")
    news = decode.next()
    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
    assert "host.invalid:1 cannot be reached" in news.message.reason


class SlowNames:
    """A name server that answers when the test wants it."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def __call__(self, host: str) -> str:
        assert self.answers.wait(WAIT_S)
        return "127.0.0.1"


def test_a_slow_name_server_holds_up_no_other_engine(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, peer = make_sides()
    names = SlowNames()
    decode.link._lookups = Lookups(names)
    other, _, address = make_sides()
    slow = f"slow.example:{address.rpartition(':')[2]}"
    claim(decode, slow)
    claim(decode, slow, bootstrap_room="b", attempt=2)
    sent = claim(decode, peer, bootstrap_room="c", attempt=3)
    got = prefill.next()
    assert isinstance(got, FromPeer) and got.message == sent
    decode.link.send([ToPeer(slow, ClaimAborted("a", 1))])
    assert decode.next() == FromPeer(slow, AbortAck("a", 1))

    names.answers.set()

    got = other.next()
    assert isinstance(got, FromPeer) and isinstance(got.message, Claim) and got.message.attempt == 2


def test_a_name_server_that_does_not_answer_fails_the_claim(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "CONNECT_S", 0.2)
    monkeypatch.setattr(lookups, "MAX_LOOKUPS", 1)
    _, decode, _ = make_sides()
    names = SlowNames()
    decode.link._lookups = Lookups(names)
    claim(decode, "slow.example:1")
    claim(decode, "other.example:1", attempt=2)
    reasons = [answer.message.reason for answer in (decode.next(), decode.next())]  # type: ignore[union-attr]
    assert reasons == [
        "other.example:1 cannot be reached: the addresses of 1 other prefill engines are being looked up",
        "the address of slow.example:1 was not found within 0.2 s",
    ]
    names.answers.set()


def test_a_claim_that_was_not_sent_is_aborted_at_once(make_sides: MakeSides) -> None:
    _, decode, _ = make_sides()
    nowhere = f"127.0.0.1:{free_port()}"
    claim(decode, nowhere)
    decode.link.send([ToPeer(nowhere, ClaimAborted("a", 1))])
    assert decode.next() == FromPeer(nowhere, AbortAck("a", 1))


def test_a_key_is_needed_where_the_other_side_has_one(
    make_sides: MakeSides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "CONNECT_S", 1.0)
    file = tmp_path / "key"
    file.write_text("k" * 40)
    file.chmod(0o600)
    key = load_cluster_key(str(file))
    prefill, decode, peer = make_sides(prefill_key=key, decode_key=key)
    claim(decode, peer)
    assert isinstance(prefill.next(), FromPeer)

    _, stranger, peer = make_sides(prefill_key=key)
    claim(stranger, peer)
    news = stranger.next()
    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)


def test_a_port_in_use_is_an_error_at_the_start(make_sides: MakeSides) -> None:
    prefill, _, peer = make_sides()
    with pytest.raises(ConfigError, match="set another --bootstrap-port"):
        make_prefill_link(prefill, int(peer.rpartition(":")[2]))


def test_a_failure_of_the_thread_is_raised_in_the_loop(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decode, peer = make_sides()

    def fail(*_arguments: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(DecodeLink, "_claim", fail)
    claim(decode, peer)
    decode.link._thread.join(WAIT_S)

    with pytest.raises(RuntimeError, match="a bug"):
        decode.link.send([])


def test_pages_of_a_lost_engine_are_held_until_it_says_hello_again(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside)
    claim(decode, peer)
    prefill.next()
    prefill.link.close()

    assert decode.next() == PeerLost(peer, f"the connection to {peer} was closed")
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])  # no answer: it may still be writing
    prefill.link = make_prefill_link(prefill, int(peer.rpartition(":")[2]))

    claim(decode, peer, attempt=2)
    assert decode.next() == FromPeer(peer, AbortAck("a", 1))
    got = prefill.next()
    assert isinstance(got, FromPeer) and isinstance(got.message, Claim) and got.message.attempt == 2


def test_an_abort_without_an_answer_holds_its_pages_when_the_connection_breaks(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside)
    claim(decode, peer)
    prefill.next()
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])
    prefill.next()
    prefill.link.close()
    prefill.link = None

    assert decode.next() == PeerLost(peer, f"the connection to {peer} was closed")


def test_an_engine_that_is_connected_is_never_fenced_by_time(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "FENCE_S", 0.0)
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside)
    claim(decode, peer)
    got = prefill.next()
    assert isinstance(got, FromPeer)
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])
    prefill.next()
    claim(decode, peer, bootstrap_room="b", attempt=2)  # the link has looked at its times in between
    prefill.next()
    prefill.link.send([ToPeer(got.peer, AbortAck("a", 1))])
    assert decode.next() == FromPeer(peer, AbortAck("a", 1))


def begin_to_write(prefill: Side, decode: Side, peer: str) -> FromPeer:
    """A claim, and a write for it that does not end."""
    claim(decode, peer)
    got = prefill.next()
    assert isinstance(got, FromPeer)
    prefill.link.send([WritePages(got.peer, "a", 1, ids(1, 2), ids(5, 6), 1)])
    return got


def test_an_engine_is_welcome_again_when_nothing_is_written_to_it_any_more(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "PING_S", 1000.0)  # silent
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside, sender=UnfinishedSender)
    got = begin_to_write(prefill, decode, peer)
    monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 0.1)
    assert isinstance(prefill.next(), PeerLost)
    monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 100.0)

    claim(decode, peer, bootstrap_room="b", attempt=2)
    assert isinstance(decode.next(), PeerLost)
    claim(decode, peer, bootstrap_room="c", attempt=3)  # waits until it is welcome
    assert decode.inbox.poll(0.3) == []  # the pages of the first claim are not free
    prefill.link._sender.under_way.is_over.set()

    assert decode.next() == FromPeer(peer, AbortAck("a", 1))
    told = {type(prefill.next()), type(prefill.next())}
    assert told == {PagesWritten, FromPeer}, got


def test_an_engine_to_which_a_write_never_ended_is_refused(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_link, "WRITE_S", 0.1)
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside, sender=UnfinishedSender)
    begin_to_write(prefill, decode, peer)
    told = [prefill.next(), prefill.next()]
    assert {type(each) for each in told} == {PagesWritten, PeerLost}

    claim(decode, peer, bootstrap_room="b", attempt=2)
    assert isinstance(decode.next(), PeerLost)
    claim(decode, peer, bootstrap_room="c", attempt=3)
    news = decode.next()
    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
    assert "a write to it did not end" in news.message.reason


def test_a_prefill_engine_that_was_stopped_gives_no_write_up(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend has made no progress meanwhile, either; and a peer with a write that did not end stays refused."""
    monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 1e9)
    monkeypatch.setattr(prefill_link, "time", clock := LaterTime())
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside, sender=UnfinishedSender)
    begin_to_write(prefill, decode, peer)
    claim(decode, peer, bootstrap_room="b", attempt=2)
    prefill.next()  # the write has begun

    clock.added_s = 2 * prefill_link.WRITE_S

    assert prefill.inbox.poll(0.2) == []
    prefill.link._sender.under_way.is_over.set()
    written = prefill.next()
    assert isinstance(written, PagesWritten) and not written.error


def test_progress_is_made_until_an_abort_is_answered(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides(receiver=Polled)
    claim(decode, peer)
    prefill.next()
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])
    prefill.next()

    for _ in range(3):
        decode.link._receiver.has_progressed.clear()
        assert decode.link._receiver.has_progressed.wait(WAIT_S)


def test_claims_that_have_ended_are_forgotten(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides()
    for attempt in range(1, 4):
        claim(decode, peer, attempt=attempt)
        got = prefill.next()
        assert isinstance(got, FromPeer)
        prefill.link.send([ToPeer(got.peer, ClaimFailed("a", attempt, "no"))])
        assert isinstance(decode.next(), FromPeer)
    assert list(prefill.link._claims.values()) == [set()]


@pytest.mark.parametrize("lives", [0, 1])
def test_pages_are_free_soon_after_the_processes_of_all_ranks_have_ended(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch, lives: int
) -> None:
    monkeypatch.setattr(decode_link, "DRAIN_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    processes = [replace(own_identity(), pid=gone.pid), own_identity()]
    processes = processes if lives else processes[:1] * 2
    prefill, decode, peer = make_sides(receiver=Polled, processes=processes)
    claim(decode, peer)
    prefill.next()
    prefill.link.close()
    prefill.link = None
    assert decode.next() == PeerLost(peer, f"the connection to {peer} was closed")
    decode.link._receiver.has_progressed.clear()
    if lives:
        assert decode.inbox.poll(0.5) == []
    else:
        assert decode.next() == FromPeer(peer, AbortAck("a", 1))
    assert decode.link._receiver.has_progressed.is_set()  # what was under way has arrived before


def test_a_process_of_another_place_is_never_known_to_be_dead() -> None:
    own = own_identity()
    assert not own.is_dead()
    assert replace(own, start="1").is_dead()
    assert not replace(own, start="1", place="elsewhere").is_dead()


def test_a_frozen_engine_that_goes_on_answers_the_abort(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "PEER_SILENCE_S", 0.2)
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside)
    monkeypatch.setattr(prefill.link, "_receive", held := Held(prefill.link._receive))
    claim(decode, peer)
    lost = decode.next()
    assert isinstance(lost, PeerLost)
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])

    monkeypatch.setattr(decode_link, "PEER_SILENCE_S", 100.0)
    held.goes_on.set()

    told = [prefill.next(), prefill.next()]
    assert [each.message for each in told if isinstance(each, FromPeer)][1] == ClaimAborted("a", 1)
    assert isinstance(told[0], FromPeer)
    prefill.link.send([ToPeer(told[0].peer, AbortAck("a", 1))])
    assert decode.next() == FromPeer(peer, AbortAck("a", 1))


class Held:
    """A link that answers the first message, `Hello`, and then nothing until it goes on."""

    def __init__(self, receive: Callable[..., None]) -> None:
        self._receive = receive
        self._has_greeted = False
        self.goes_on = threading.Event()

    def __call__(self, *message: object) -> None:
        if self._has_greeted:
            self.goes_on.wait(WAIT_S)
        self._has_greeted = True
        self._receive(*message)


def test_an_engine_that_goes_on_is_not_fenced_by_time(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claims of later are not those that were given up when it was silent."""
    monkeypatch.setattr(decode_link, "time", clock := LaterTime())
    monkeypatch.setattr(decode_link, "PEER_SILENCE_S", 0.2)
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside)
    monkeypatch.setattr(prefill.link, "_receive", held := Held(prefill.link._receive))
    claim(decode, peer)
    assert isinstance(decode.next(), PeerLost)
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])
    monkeypatch.setattr(decode_link, "PEER_SILENCE_S", 1e9)
    held.goes_on.set()
    told = [prefill.next(), prefill.next()]
    assert isinstance(told[0], FromPeer)
    prefill.link.send([ToPeer(told[0].peer, AbortAck("a", 1))])
    assert decode.next() == FromPeer(peer, AbortAck("a", 1))

    clock.added_s = 2 * decode_link.FENCE_S
    claim(decode, peer, bootstrap_room="b", attempt=2)
    prefill.next()
    decode.link.send([ToPeer(peer, ClaimAborted("b", 2))])
    prefill.next()

    assert decode.inbox.poll(0.2) == []  # it may be writing


def test_pages_of_an_engine_that_stays_away_are_free_in_the_end(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "FENCE_S", 0.1)
    prefill, decode, peer = make_sides(receiver=WrittenFromOutside)
    claim(decode, peer)
    prefill.next()
    prefill.link.close()
    prefill.link = None
    assert isinstance(decode.next(), PeerLost)
    assert decode.next() == FromPeer(peer, AbortAck("a", 1))


def test_a_decode_engine_that_was_frozen_is_welcome_again(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "PING_S", 1000.0)  # silent
    monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 0.1)
    prefill, decode, peer = make_sides()
    claim(decode, peer)
    got = prefill.next()
    assert isinstance(got, FromPeer)
    assert prefill.next() == PeerLost(got.peer, "no sign of life for 0.1 s")
    prefill.link.send([WritePages(got.peer, "a", 1, ids(1, 2), ids(5, 6), 1)])
    late = prefill.next()
    assert isinstance(late, PagesWritten) and "not connected any more" in late.error
    monkeypatch.setattr(prefill_link, "PEER_SILENCE_S", 100.0)

    claim(decode, peer, bootstrap_room="b", attempt=2)  # it does not know that it was forgotten
    assert decode.next() == PeerLost(peer, f"{peer} has forgotten this engine")
    sent = claim(decode, peer, bootstrap_room="c", attempt=3)
    again = prefill.next()
    assert isinstance(again, FromPeer) and again.message == sent


class ByHand:
    """The connection of a prefill engine, or of a decode engine, for which a test answers by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.linger = 0
        self._head: list[bytes] = []

    def say(self, message: Message) -> None:
        self.socket.send_multipart([*self._head, msgspec.msgpack.encode(message)])

    def next(self, union: Any) -> Any:
        """The next message, without signs of life."""
        while self.socket.poll(1000 * int(WAIT_S)):
            *self._head, data = self.socket.recv_multipart()
            message = msgspec.msgpack.decode(data, type=union)
            if not isinstance(message, Ping):
                return message
        raise AssertionError("no message")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def greeted_by_hand(decode: Side, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[ByHand, str]:
    """A prefill engine that is played by the test and has got the claim of room a."""
    prefill = ByHand(context, zmq.ROUTER)
    peer = f"127.0.0.1:{prefill.socket.bind_to_random_port('tcp://127.0.0.1')}"
    claim(decode, peer)
    assert isinstance(prefill.next(ToPrefill), Hello)
    prefill.say(Welcome((own_identity(),)))
    assert isinstance(prefill.next(ToPrefill), Claim)
    return prefill, peer


def test_an_engine_that_has_forgotten_this_one_is_greeted_once(
    make_sides: MakeSides, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """It says so for each message that it gets before the `Hello`. With a second one its `Welcome` would be stale."""
    _, decode, _ = make_sides()
    prefill, peer = greeted_by_hand(decode, context)
    prefill.say(SayHello())
    assert isinstance(prefill.next(ToPrefill), Hello)
    assert decode.next() == PeerLost(peer, f"{peer} has forgotten this engine")
    sent = claim(decode, peer, bootstrap_room="b", attempt=2)

    prefill.say(SayHello())
    prefill.say(Welcome((own_identity(),)))

    assert prefill.next(ToPrefill) == sent
    assert decode.inbox.poll(0.1) == []


def test_pages_of_a_dead_engine_are_not_free_at_once_when_its_successor_comes(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """The successor cannot promise that all of it has arrived."""
    monkeypatch.setattr(decode_link, "time", clock := LaterTime())
    _, decode, _ = make_sides(receiver=Polled)
    prefill, peer = greeted_by_hand(decode, context)
    prefill.socket.close()
    assert isinstance(decode.next(), PeerLost)
    after = ByHand(context, zmq.ROUTER)
    after.socket.bind(f"tcp://{peer}")
    assert isinstance(after.next(ToPrefill), Hello)
    sent = claim(decode, peer, bootstrap_room="b", attempt=2)
    after.say(Welcome((replace(own_identity(), place="another container"),)))
    assert after.next(ToPrefill) == sent
    decode.link.send([ToPeer(peer, ClaimAborted("b", 2))])
    assert after.next(ToPrefill) == ClaimAborted("b", 2)
    assert decode.inbox.poll(0.1) == []

    clock.added_s = DRAIN_S

    assert decode.next() == FromPeer(peer, AbortAck("a", 1))
    assert decode.inbox.poll(0.1) == []  # its successor has to answer for the other claim


def test_an_answer_to_no_claim_is_dropped(
    make_sides: MakeSides, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    _, decode, _ = make_sides()
    prefill, peer = greeted_by_hand(decode, context)
    prefill.say(Prefilled("b", 2, 1000, b""))
    prefill.say(ClaimFailed("a", 1, "no"))
    assert decode.next() == FromPeer(peer, ClaimFailed("a", 1, "no"))


def test_whether_an_engine_is_dead_is_looked_up_now_and_then(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs some reads of /proc, in a thread beside the scheduler's loop that may poll for minutes."""
    prefill, decode, peer = make_sides(receiver=Polled)
    looks: list[float] = []
    monkeypatch.setattr(Peer, "is_dead", property(lambda _: looks.append(time.monotonic())))
    claim(decode, peer)
    prefill.next()
    decode.link.send([ToPeer(peer, ClaimAborted("a", 1))])
    assert decode.inbox.poll(0.5) == []
    times = list(looks)
    assert 1 <= len(times) <= 2 + (times[-1] - times[0]) / decode_link.LIVENESS_POLL_S


class JoiningSender(LocalSender):
    """Its peers are never connected."""

    def add_peer(self, peer: str, targets: Sequence[bytes]) -> Unfinished:  # type: ignore[override]
        return Unfinished()


def test_a_claim_before_the_welcome_is_answered(
    make_sides: MakeSides, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    prefill, _, peer = make_sides(sender=JoiningSender)
    decode = ByHand(context, zmq.DEALER)
    decode.socket.identity = b"decode"
    decode.socket.connect(f"tcp://{peer}")
    decode.say(Hello(prefill.layout(), "local", (b"",)))
    decode.say(Claim("a", 1, 0, ids(5, 6), 7))

    failed = decode.next(ToDecode)

    assert failed == ClaimFailed("a", 1, "this engine is still connecting to the decode engine")
    assert prefill.inbox.poll(0.1) == []


@pytest.mark.parametrize("change", [{"pages": b"123"}, {"first_page": -1}, {"bootstrap_room": "r" * 300}])
def test_a_malformed_claim_fails_alone(make_sides: MakeSides, change: dict[str, Any]) -> None:
    prefill, decode, peer = make_sides()
    message = msgspec.structs.replace(Claim("a", 1, 0, ids(5, 6), 7), **change)
    decode.link.send([ToPeer(peer, message)])
    news = decode.next()
    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
    claim(decode, peer, bootstrap_room="good", attempt=2)
    got = prefill.next()
    assert (
        isinstance(got, FromPeer) and isinstance(got.message, Claim) and got.message.bootstrap_room == "good"
    )


@pytest.mark.parametrize(
    "change", [{"num_pages": 3}, {"output_ids": b""}, {"output_ids": ids(97)}, {"num_pages": -1}]
)
def test_a_malformed_answer_fails_its_claim(make_sides: MakeSides, change: dict[str, Any]) -> None:
    prefill, decode, peer = make_sides()
    claim(decode, peer)
    got = prefill.next()
    assert isinstance(got, FromPeer)
    answer = msgspec.structs.replace(Prefilled("a", 1, 2, ids(3)), **change)
    prefill.link.send([ToPeer(got.peer, answer)])
    assert decode.next() == FromPeer(peer, ClaimFailed("a", 1, f"the answer of {peer} is malformed"))


def test_pages_that_were_not_claimed_are_not_written(make_sides: MakeSides) -> None:
    prefill, decode, peer = make_sides()
    for view in decode.pool.page_views:
        view.fill_(2.0)
    claim(decode, peer)
    got = prefill.next()
    assert isinstance(got, FromPeer)
    prefill.link.send([WritePages(got.peer, "a", 1, ids(1, 2), ids(5, 7), 1)])
    news = decode.next()
    assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
    assert "some were not claimed" in news.message.reason
    assert all(bool((view == 2.0).all()) for view in decode.pool.page_views)


def test_an_address_without_an_engine_is_forgotten(
    make_sides: MakeSides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_link, "CONNECT_S", 0.05)
    monkeypatch.setattr(decode_link, "FORGET_S", 0.05)
    monkeypatch.setattr(decode_link, "MAX_PEERS", 1)
    prefill, decode, peer = make_sides()
    nowhere = f"127.0.0.1:{free_port()}"
    claim(decode, nowhere)
    assert isinstance(decode.next(), FromPeer)
    attempt = 2
    while decode.link._peers:  # each claim is refused until then
        claim(decode, "127.0.0.1:1", attempt=attempt)
        news = decode.next()
        assert isinstance(news, FromPeer) and isinstance(news.message, ClaimFailed)
        attempt += 1
        if "the most" not in news.message.reason:
            break
    monkeypatch.setattr(decode_link, "MAX_PEERS", 100)
    claim(decode, peer, attempt=1000)
    got = prefill.next()
    assert isinstance(got, FromPeer) and isinstance(got.message, Claim)
