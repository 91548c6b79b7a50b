"""`DecodeLink`: the thread of a decode engine that claims prompts from prefill engines and takes their pages."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import zmq
import zmq.utils.monitor

from ....runtime.kv_backends.base import TransferError
from ....runtime.transport.cluster_ipc import ClusterKey
from ....runtime.transport.ipc import decode_or_drop
from ....runtime.transport.kv_transfer import (
    AbortAck,
    Claim,
    ClaimAborted,
    ClaimFailed,
    FromPeer,
    Hello,
    KVLayout,
    PageData,
    PagesTaken,
    PeerLost,
    Ping,
    Pong,
    Prefilled,
    PromptReleased,
    Refused,
    SayHello,
    ToDecode,
    ToPeer,
    ToPrefill,
    TransferCommand,
    Welcome,
)
from .link_thread import LinkThread, connect
from .pages import DRAIN_S, PageReceiver
from .peers import Answer, Attempt, Lookups, Peer, State, Storing, known_address

logger = logging.getLogger(__name__)

PING_S: Final = 1.0
PEER_SILENCE_S: Final = 15.0
"""A prefill engine without an answer for so long is lost; far more than a busy machine delays one."""
CONNECT_S: Final = 15.0
"""A claim fails if its prefill engine has not been reached by then."""
FENCE_S: Final = 300.0
"""A prefill engine that was lost may write into the pages of its claims for at most so long. One that was stopped for
longer must not go on: start it again."""
LIVENESS_POLL_S: Final = 0.1
"""Between two checks whether the processes of an engine live: 0.4 ms each, while the link polls every millisecond."""
FORGET_S: Final = 60.0
MAX_PEERS: Final = 256
_BUSY_POLL_MS: Final = 1
_LOOKUP_POLL_MS: Final = 10
_IDLE_POLL_MS: Final = 500
_EVENTS_PER_POLL: Final = 64


class DecodeLink(LinkThread):
    """Claims prompts from prefill engines, and takes their pages."""

    def __init__(
        self,
        *,
        key: ClusterKey | None,
        layout: KVLayout,
        backend: str,
        receiver: PageReceiver,
        vocab_size: int,
        scheduler: str,
    ) -> None:
        """Start the thread. `vocab_size`: token ids are below it. Other arguments: see `PrefillLink`."""
        super().__init__(zmq.Context(), scheduler)
        self._vocab_size = vocab_size
        self._name = f"{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._key = key
        self._hello = Hello(layout, backend, receiver.targets())
        self._receiver = receiver
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)
        self._peers: dict[str, Peer] = {}
        self._lookups = Lookups()
        self._poller = zmq.Poller()
        self._thread.start()

    def _serve(self) -> None:
        self._poller.register(self._commands.wake, zmq.POLLIN)
        while not self._stops:
            makes_progress = self._receiver.polls and any(
                peer.open or peer.waiting or peer.given_up for peer in self._peers.values()
            )
            self._poller.poll(self._poll_ms(makes_progress))
            if makes_progress:
                self._receiver.progress()
            for command in self._commands.take():
                self._execute(command)
            self._take_addresses()
            for peer in self._peers.values():
                self._watch(peer)
                self._read(peer)
                self._check_stores(peer)
                self._check_time(peer)
            self._forget_idle()

    def _close_sockets(self) -> None:
        self._receiver.close()
        for peer in self._peers.values():
            self._close(peer)

    def _poll_ms(self, makes_progress: bool) -> int:
        """Milliseconds to wait for messages at most: no other event wakes the poll."""
        if makes_progress or any(peer.storing for peer in self._peers.values()):
            return _BUSY_POLL_MS
        return _LOOKUP_POLL_MS if len(self._lookups) else _IDLE_POLL_MS

    def _execute(self, command: TransferCommand | None) -> None:
        if command is None:
            self._stops = True
            return
        assert isinstance(command, ToPeer), command
        match command.message:
            case Claim():
                self._claim(command.peer, command.message)
            case ClaimAborted():
                self._abort(command.peer, command.message)
            case PromptReleased() as released:
                peer = self._peers.get(command.peer)
                if peer is not None and peer.state is State.WELCOME:  # else it finds out by itself
                    self._send_to(peer, released)

    def _claim(self, name: str, claim: Claim) -> None:
        peer = self._peers.get(name)
        if peer is None and len(self._peers) + len(self._lookups) >= MAX_PEERS:
            self._fail(name, claim, f"this engine is connected to {MAX_PEERS} prefill engines, the most")
            return
        if peer is None:
            address = known_address(name)
            if address:
                self._connect(name, address, [(time.monotonic(), claim)])
            elif reason := self._lookups.begin(name, claim):
                self._fail(name, claim, f"{name} cannot be reached: {reason}")
            return
        match peer.state:
            case State.WELCOME:
                peer.open[claim.bootstrap_room, claim.attempt] = claim
                self._send_to(peer, claim)
            case State.CONNECTING:
                peer.waiting.append((time.monotonic(), claim))
            case State.REFUSED:
                self._fail(name, claim, peer.refusal)
            case State.SILENT:
                self._fail(name, claim, f"no sign of life from {name} for {PEER_SILENCE_S:g} s")

    def _abort(self, name: str, message: ClaimAborted) -> None:
        peer = self._peers.get(name)
        attempt = message.bootstrap_room, message.attempt
        if peer is not None and attempt in peer.given_up:
            self._send_to(peer, message)  # a frozen engine answers when it goes on; else `_fence` does
            return
        if peer is not None and attempt in peer.open:
            del peer.open[attempt]
            self._send_to(peer, message)
            if not self._receiver.is_passive:
                peer.given_up[attempt] = math.inf
                return  # the prefill engine answers
        elif peer is not None:
            peer.waiting = [each for each in peer.waiting if each[1].attempt != message.attempt]
        answer = AbortAck(message.bootstrap_room, message.attempt)
        if peer is None:
            self._lookups.drop(name, message.attempt)
            self._outbox.send(FromPeer(name, answer))
        else:
            self._answer(peer, answer)

    def _answer(self, peer: Peer, answer: Answer) -> None:
        """Notify the scheduler how a claim has ended, when nothing is written into its pages any more."""
        if peer.is_storing((answer.bootstrap_room, answer.attempt)):
            peer.held.append(answer)
        else:
            self._outbox.send(FromPeer(peer.name, answer))

    def _fail(self, name: str, claim: Claim, reason: str) -> None:
        """Answer a claim that was not sent."""
        self._outbox.send(FromPeer(name, ClaimFailed(claim.bootstrap_room, claim.attempt, reason)))

    def _connect(self, name: str, address: str, claims: list[tuple[float, Claim]]) -> None:
        """Connect to a prefill engine for claims that wait for it."""
        try:
            socket, monitor = connect(
                self._context, address, int(name.rpartition(":")[2]), self._name, self._key
            )
        except (ValueError, zmq.ZMQError) as error:
            for _, claim in claims:
                self._fail(name, claim, f"{name} cannot be reached: {error}")
            return
        self._peers[name] = Peer(name, socket, monitor, waiting=claims)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _take_addresses(self) -> None:
        """Connect to the engines that have been looked up."""
        for looked in self._lookups.ended():
            if looked.address and looked.claims:
                self._connect(looked.peer, looked.address, looked.claims)
            for _, claim in looked.claims if looked.error else ():
                self._fail(looked.peer, claim, f"{looked.peer} cannot be reached: {looked.error}")
        for name, claim in self._lookups.late(time.monotonic() - CONNECT_S):
            self._fail(name, claim, f"the address of {name} was not found within {CONNECT_S:g} s")

    def _watch(self, peer: Peer) -> None:
        """Greet an engine when it is connected, again after each connection."""
        for _ in range(_EVENTS_PER_POLL):
            if peer.must_greet:
                peer.must_greet = not self._send_to(peer, self._hello)
            if not peer.monitor.poll(0):
                return
            event = zmq.utils.monitor.recv_monitor_message(peer.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                peer.must_greet = True
                peer.connection += 1
            else:  # the kernel has closed the connection, or the network has: its messages end here
                self._read(peer)
                if peer.state is not State.CONNECTING:
                    self._lose(peer, f"the connection to {peer.name} was closed")
                peer.state, peer.must_greet = State.CONNECTING, False

    def _read(self, peer: Peer) -> None:
        while peer.socket.poll(0):
            frames = peer.socket.recv_multipart(copy=False)
            message = decode_or_drop(frames[0].bytes, self._decoder)
            if message is None:
                continue
            peer.heard_s = time.monotonic()
            if peer.state is State.SILENT:
                logger.info("a prefill engine goes on peer=%s", peer.name)
                peer.state = State.WELCOME
                peer.given_up = dict.fromkeys(peer.given_up, math.inf)
            self._receive(peer, message, frames)

    def _receive(self, peer: Peer, message: ToDecode, frames: Sequence[zmq.Frame]) -> None:
        match message:
            case Welcome():
                logger.info("a prefill engine is ready peer=%s", peer.name)
                if message.processes != peer.processes:
                    # It does not know what its predecessor's kernel still holds.
                    self._expect_last_pages(peer, time.monotonic() + DRAIN_S)
                else:
                    self._fence(peer, math.inf)
                peer.state, peer.processes = State.WELCOME, message.processes
                waiting, peer.waiting = peer.waiting, []
                for _, claim in waiting:
                    self._claim(peer.name, claim)
            case Refused():
                peer.state = State.REFUSED
                peer.refusal = f"{peer.name} refuses this engine: {message.reason}"
                logger.error("%s", peer.refusal)
                waiting, peer.waiting = peer.waiting, []
                for _, claim in waiting:
                    self._fail(peer.name, claim, peer.refusal)
            case SayHello() if peer.state is State.CONNECTING:
                pass  # `Hello` is on its way; a second one would end the claims that are made after the first `Welcome`
            case SayHello():
                self._lose(peer, f"{peer.name} has forgotten this engine")
                peer.state, peer.must_greet = State.CONNECTING, True
            case Prefilled() | ClaimFailed() | AbortAck():
                self._end(peer, message)
            case PageData():
                if (message.bootstrap_room, message.attempt) in peer.open:
                    self._store(peer, message, frames[1:])
                else:
                    self._send_to(peer, PagesTaken(message.number))
            case Pong():
                pass

    def _end(self, peer: Peer, message: Answer) -> None:
        """The prefill engine writes no more for a claim."""
        attempt = message.bootstrap_room, message.attempt
        claimed = peer.open.pop(attempt, None)
        answer: Answer = message
        if not isinstance(message, Prefilled):
            peer.given_up.pop(attempt, None)
        elif claimed is None:
            return  # it was aborted, and the abort is answered, too
        elif not self._is_well_formed(message, claimed):
            answer = ClaimFailed(*attempt, f"the answer of {peer.name} is malformed")
        self._answer(peer, answer)

    def _is_well_formed(self, message: Prefilled, claim: Claim) -> bool:
        if len(message.output_ids) != 4 or not 0 <= message.num_pages <= len(claim.pages) // 4:
            return False
        return 0 <= int.from_bytes(message.output_ids, "little", signed=True) < self._vocab_size

    def _store(self, peer: Peer, message: PageData, frames: Sequence[zmq.Frame]) -> None:
        attempt = message.bootstrap_room, message.attempt
        try:
            pages = np.frombuffer(frames[0].buffer, dtype=np.int32)
            claimed = np.frombuffer(peer.open[attempt].pages, dtype=np.int32)
            if not np.isin(pages, claimed).all():
                raise ValueError("some were not claimed")
            work = self._receiver.store(message.rank, pages, [frame.buffer for frame in frames[1:]])
        except (ValueError, IndexError) as error:
            self._send_to(peer, PagesTaken(message.number))
            self._fail_open(peer, attempt, str(error))
            return
        peer.storing.append(Storing(attempt, message.number, peer.connection, work))

    def _check_stores(self, peer: Peer) -> None:
        """Note the pages that are stored, and give the answers that have waited for them."""
        if not peer.storing:
            return
        left = []
        for each in peer.storing:
            error = ""
            try:
                if not each.work.is_done():
                    left.append(each)
                    continue
            except TransferError as failed:
                error = str(failed)
            if each.connection == peer.connection:
                self._send_to(peer, PagesTaken(each.number))
            if error:
                self._fail_open(peer, each.attempt, error)
        peer.storing = left
        held, peer.held = peer.held, []
        for answer in held:
            self._answer(peer, answer)

    def _fail_open(self, peer: Peer, attempt: Attempt, error: str) -> None:
        if peer.open.pop(attempt, None) is None:
            return
        bootstrap_room, number = attempt
        self._send_to(peer, ClaimAborted(bootstrap_room, number))
        self._answer(peer, ClaimFailed(bootstrap_room, number, f"pages from {peer.name} do not fit: {error}"))

    def _check_time(self, peer: Peer) -> None:
        now_s = time.monotonic()
        if peer.waiting and now_s - peer.waiting[0][0] > CONNECT_S:
            late = [claim for since_s, claim in peer.waiting if now_s - since_s > CONNECT_S]
            peer.waiting = peer.waiting[len(late) :]
            for claim in late:
                reason = f"no prefill engine has answered at {peer.name} within {CONNECT_S:g} s"
                self._fail(peer.name, claim, reason)
        if peer.state is State.WELCOME and not peer.open:
            peer.heard_s = now_s  # nothing is expected of it
        if peer.state in (State.WELCOME, State.SILENT) and now_s - peer.pinged_s > PING_S:
            peer.pinged_s = now_s
            self._send_to(peer, Ping())
        if peer.state is State.WELCOME and now_s - peer.heard_s > PEER_SILENCE_S:
            peer.state = State.SILENT
            reason = f"no sign of life from {peer.name} for {PEER_SILENCE_S:g} s"
            self._lose(peer, reason)
        if peer.given_up:
            if now_s - peer.looked_s > LIVENESS_POLL_S:
                peer.looked_s = now_s
                if peer.is_dead:
                    self._expect_last_pages(peer, now_s + DRAIN_S)
            self._fence(peer, now_s)

    def _lose(self, peer: Peer, reason: str) -> None:
        """Give the claims of a peer up. Unless this engine writes the pages itself, the peer may still do so."""
        logger.warning("a prefill engine is lost peer=%s: %s", peer.name, reason)
        self._check_stores(peer)
        if not self._receiver.is_passive:
            peer.given_up.update(dict.fromkeys(peer.open, math.inf))
        peer.open.clear()
        self._expect_last_pages(peer, time.monotonic() + FENCE_S)
        # The scheduler now aborts all claims of this engine, and each abort is answered when its pages are free.
        self._outbox.send(PeerLost(peer.name, reason))

    def _expect_last_pages(self, peer: Peer, until_s: float) -> None:
        """A lost engine writes for the claims that were given up until then at most."""
        peer.given_up = {attempt: min(free_s, until_s) for attempt, free_s in peer.given_up.items()}

    def _fence(self, peer: Peer, now_s: float) -> None:
        """Answer the aborts of claims for which a lost engine writes no more."""
        for attempt in [attempt for attempt, free_s in peer.given_up.items() if free_s < now_s]:
            del peer.given_up[attempt]
            self._answer(peer, AbortAck(*attempt))

    def _forget_idle(self) -> None:
        """Disconnect where there has been no engine for a while; a later claim looks the address up again."""
        now_s = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.state is not State.CONNECTING or peer.waiting or peer.given_up or peer.storing:
                peer.idle_since_s = None
            elif peer.idle_since_s is None:
                peer.idle_since_s = now_s
            elif now_s - peer.idle_since_s > FORGET_S:
                self._poller.unregister(peer.socket)
                self._poller.unregister(peer.monitor)
                self._close(peer)
                del self._peers[peer.name]

    def _close(self, peer: Peer) -> None:
        peer.socket.disable_monitor()
        peer.monitor.close(linger=0)
        peer.socket.close(linger=0)

    def _send_to(self, peer: Peer, message: ToPrefill) -> bool:
        """Send a message; False: there is no connection, which the monitor reports, too."""
        with contextlib.suppress(zmq.Again):
            peer.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
            return True
        return False
