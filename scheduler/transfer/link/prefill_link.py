"""`PrefillLink`: the thread of a prefill engine that talks to decode engines and writes pages into theirs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from ....runtime.errors import ConfigError
from ....runtime.kv_backends.base import TransferError, Work
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
    PagesTaken,
    PagesWritten,
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
    WritePages,
)
from ....runtime.transport.message_base import ProcessIdentity
from .link_thread import Context, LinkThread, Listener
from .pages import PageSender, Sending
from .ranks import Frames

logger = logging.getLogger(__name__)

PEER_SILENCE_S: Final = 30.0
"""A decode engine with claims sends a sign of life each second."""
WRITE_S: Final = 60.0
"""A write without progress for so long is given up, and with it the connection to its decode engine."""
_MAX_PAUSE_S: Final = 1.0
"""Between two polls of a write; more is not counted: this process was stopped, and the backend with it."""
_MAX_BOOTSTRAP_ROOM_CHARS: Final = 256
_BUSY_POLL_MS: Final = 1
_IDLE_POLL_MS: Final = 1000


def _is_well_formed(claim: Claim) -> bool:
    return (
        len(claim.pages) % 4 == 0
        and claim.first_page >= 0
        and len(claim.bootstrap_room) <= _MAX_BOOTSTRAP_ROOM_CHARS
    )


@dataclass(slots=True)
class _Writing:
    """A `WritePages` that is under way.

    Attributes:
        command, write: the order, and its progress.
        started_s, checked_s: when it was begun, and when it was last polled.
        still_s: time under polls since it was begun, or since the peer last took pages of it.
        error: it has failed with this; until `drained_s` what it had begun may still arrive.
    """

    command: WritePages
    write: Sending
    started_s: float
    checked_s: float
    still_s: float = 0.0
    error: str = ""
    drained_s: float = 0.0


class PrefillLink(LinkThread):
    """Takes the claims of decode engines, and writes their pages."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        key: ClusterKey | None,
        layout: KVLayout,
        backend: str,
        sender: PageSender,
        processes: Sequence[ProcessIdentity],
        scheduler: str,
    ) -> None:
        """Listen, and start the thread.

        Args:
            host, port: where decode engines connect.
            key: encrypts the connections; None: they are plain.
            layout: of this engine's KV pool.
            backend, sender: `--transfer-backend`.
            processes: of all ranks, which write.
            scheduler: endpoint of the scheduler's inbox.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._layout = layout
        self._processes = tuple(processes)
        self._backend = backend
        self._sender = sender
        context: Context = zmq.Context()
        try:
            self._listener = Listener(context, host, port, key)
        except ConfigError:
            context.destroy(linger=0)
            raise
        super().__init__(context, scheduler)
        self._socket = self._listener.socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
        self._heard_s: dict[str, float] = {}  # of each welcome peer
        # peer -> its open (bootstrap_room, attempt) since its last `Hello`
        self._claims: dict[str, set[tuple[str, int]]] = {}
        self._greeting: dict[str, Hello] = {}  # peers that are welcome when earlier writes to them have ended
        self._joining: dict[str, Work] = {}  # peers that are welcome when all ranks know them
        # Lost peers that the backend still knows, for writes that are under way.
        self._leaving: set[str] = set()
        self._stuck: set[str] = set()  # peers with a write that did not end
        self._writing: list[_Writing] = []
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._commands.wake, zmq.POLLIN)
        while not self._stops:
            poller.poll(_BUSY_POLL_MS if self._writing or self._joining else _IDLE_POLL_MS)
            for command in self._commands.take():
                self._execute(command)
            while self._socket.poll(0):
                name, data = self._socket.recv_multipart()[:2]
                message = decode_or_drop(data, self._decoder)
                if message is not None:
                    self._receive(name.decode(errors="replace"), message)
            self._check_writes()
            self._greet_waiting()
            self._welcome()
            self._check_silence()

    def _close_sockets(self) -> None:
        self._sender.close()
        self._listener.close()

    def _execute(self, command: TransferCommand | None) -> None:
        match command:
            case None:
                self._stops = True
            case ToPeer(peer=peer, message=Prefilled() | ClaimFailed() | AbortAck() as message):
                self._claims.get(peer, set()).discard((message.bootstrap_room, message.attempt))
                self._send_to(peer, message)
            case ToPeer():
                raise AssertionError(f"not for a decode engine: {command.message}")
            case WritePages():
                self._write(command)

    def _write(self, command: WritePages) -> None:
        peer, now_s = command.peer, time.monotonic()
        if (command.bootstrap_room, command.attempt) not in self._claims.get(peer, ()):
            reason = f"{peer} is not connected any more"
            self._outbox.send(PagesWritten(peer, command.bootstrap_room, command.attempt, reason))
            return
        write = self._sender.write(command, lambda frames: self._send_frames(peer, frames))
        self._writing.append(_Writing(command, write, now_s, now_s))

    def _check_writes(self) -> None:
        left = []
        for each in self._writing:
            command, error = each.command, each.error
            now_s = time.monotonic()
            if error and now_s < each.drained_s:
                left.append(each)
                continue
            try:
                if not error and not each.write.is_done():
                    each.still_s += min(now_s - each.checked_s, _MAX_PAUSE_S)
                    each.checked_s = now_s
                    if each.still_s < WRITE_S:
                        left.append(each)
                        continue
                    error = f"the write has not ended within {WRITE_S:g} s"
                    if not each.write.stop():
                        self._stuck.add(command.peer)
                    self._lose(command.peer, error)
            except TransferError as failed:
                error = str(failed)
                if self._sender.drain_s:
                    each.error, each.drained_s = error, now_s + self._sender.drain_s
                    left.append(each)
                    continue
            self._outbox.send(
                PagesWritten(
                    command.peer, command.bootstrap_room, command.attempt, error, now_s - each.started_s
                )
            )
        self._writing = left

    def _receive(self, peer: str, message: ToPrefill) -> None:
        if isinstance(message, Hello):
            self._lose(peer, "it has connected again")
            self._greeting[peer] = message
            return
        if peer not in self._heard_s:  # silent for too long, or it takes this engine for its predecessor
            if peer not in self._greeting and peer not in self._joining:
                self._send_to(peer, SayHello())
            elif isinstance(message, Claim):
                # After the `Welcome` of an earlier connection; aborts are answered by the next one.
                reason = "this engine is still connecting to the decode engine"
                self._send_to(peer, ClaimFailed(message.bootstrap_room, message.attempt, reason))
            return
        self._heard_s[peer] = time.monotonic()
        match message:
            case Ping():
                self._send_to(peer, Pong())
            case PagesTaken():
                self._sender.taken(peer, message.number)
                self._note_progress(peer)
            case Claim() if not _is_well_formed(message):
                self._send_to(
                    peer, ClaimFailed(message.bootstrap_room, message.attempt, "the claim is malformed")
                )
            case Claim():
                self._claims[peer].add((message.bootstrap_room, message.attempt))
                self._outbox.send(FromPeer(peer, message))
            case ClaimAborted() | PromptReleased():
                self._outbox.send(FromPeer(peer, message))

    def _note_progress(self, peer: str) -> None:
        for each in self._writing:
            if each.command.peer == peer:
                each.still_s = 0.0

    def _greet_waiting(self) -> None:
        """Greet peers that have said hello, when no rank writes for an earlier connection any more."""
        for peer in [*dict.fromkeys((*self._leaving, *self._greeting))]:
            if any(each.command.peer == peer for each in self._writing):
                continue
            if peer in self._leaving:
                self._leaving.discard(peer)
                self._sender.drop_peer(peer)
            if (hello := self._greeting.pop(peer, None)) is not None:
                self._greet(peer, hello)

    def _greet(self, peer: str, hello: Hello) -> None:
        """Refuse a peer, or let all ranks connect to it."""
        reason = self._layout.difference(hello.layout)
        if not reason and hello.backend != self._backend:
            reason = f"they differ in --transfer-backend: {self._backend} and {hello.backend}"
        if not reason and peer in self._stuck:
            reason = "a write to it did not end, and may still arrive; start it again"
        if not reason:
            try:
                self._joining[peer] = self._sender.add_peer(peer, hello.targets)
            except TransferError as error:
                reason = str(error)
        if reason:
            self._refuse(peer, reason)

    def _refuse(self, peer: str, reason: str) -> None:
        logger.error("refused a decode engine peer=%s: %s", peer, reason)
        self._send_to(peer, Refused(reason))

    def _welcome(self) -> None:
        """Welcome the peers that all ranks are connected to."""
        for peer, joining in list(self._joining.items()):
            try:
                if not joining.is_done():
                    continue
            except TransferError as error:
                del self._joining[peer]
                self._sender.drop_peer(peer)
                self._refuse(peer, str(error))
                continue
            del self._joining[peer]
            logger.info("a decode engine has come peer=%s", peer)
            self._heard_s[peer] = time.monotonic()
            self._claims[peer] = set()
            self._send_to(peer, Welcome(self._processes))

    def _check_silence(self) -> None:
        now_s = time.monotonic()
        for peer, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > PEER_SILENCE_S:
                logger.warning("a decode engine is gone peer=%s", peer)
                self._lose(peer, f"no sign of life for {PEER_SILENCE_S:g} s")

    def _lose(self, peer: str, reason: str) -> None:
        """Forget a peer with its claims. Writes that are under way end by themselves; none is begun any more."""
        if self._joining.pop(peer, None) is not None:
            self._leaving.add(peer)  # no rank has written to it
        if self._heard_s.pop(peer, None) is None:
            return
        for each in self._writing:
            if each.command.peer == peer:
                each.write.stop()
        del self._claims[peer]
        self._leaving.add(peer)
        self._outbox.send(PeerLost(peer, reason))

    def _send_to(self, peer: str, message: ToDecode) -> None:
        self._send_frames(peer, [self._encoder.encode(message)])

    def _send_frames(self, peer: str, frames: Frames) -> None:
        try:
            self._socket.send_multipart([peer.encode(), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it has left; its silence will show it
            logger.info("a message to a decode engine is lost peer=%s: %s", peer, error.strerror)
