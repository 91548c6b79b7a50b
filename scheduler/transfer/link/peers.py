"""Prefill engines as the link of a decode engine sees them: the state of each (`Peer`), and `Lookups` of addresses."""

from __future__ import annotations

import enum
import ipaddress
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ....runtime.kv_backends.base import Work
from ....runtime.transport.cluster_ipc import numeric_address
from ....runtime.transport.kv_transfer import AbortAck, Claim, ClaimFailed, Prefilled
from ....runtime.transport.message_base import ProcessIdentity
from .link_thread import Socket

MAX_LOOKUPS: Final = 16
"""Lookups at the same time; each has a thread, which cannot be ended before the system has given up."""


class Lookup:
    """A lookup of the address of a prefill engine, in a thread of its own.

    Attributes:
        peer: HOST:PORT, as claims name it.
        address: the numeric host when it is over; "": there is none.
        error: why.
        claims: the claims that wait for it, with their times of arrival.
    """

    def __init__(self, peer: str, resolve: Callable[[str], str]) -> None:
        self.peer = peer
        self.claims: list[tuple[float, Claim]] = []
        self.address, self.error = "", ""
        self._resolve = resolve
        self._thread = threading.Thread(target=self._run, name="kv-transfer-dns", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.address = self._resolve(host_of(self.peer))
        except (OSError, ValueError) as error:  # ValueError: no host name at all
            self.error = str(error)


class Lookups:
    """The addresses of prefill engines that are named by host, looked up beside the link's thread, which uses this.

    A name server may take many seconds to answer, and the link's thread also stores pages and answers other engines.
    """

    def __init__(self, resolve: Callable[[str], str] = numeric_address) -> None:
        """`resolve`: as `numeric_address`."""
        self._resolve = resolve
        self._lookups: dict[str, Lookup] = {}

    def __len__(self) -> int:
        return len(self._lookups)

    def begin(self, peer: str, claim: Claim) -> str:
        """Look the host of a peer up, for a claim that waits for it; why that is not possible, or ""."""
        lookup = self._lookups.get(peer)
        if lookup is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                return f"the addresses of {MAX_LOOKUPS} other prefill engines are being looked up"
            lookup = self._lookups[peer] = Lookup(peer, self._resolve)
        lookup.claims.append((time.monotonic(), claim))
        return ""

    def drop(self, peer: str, attempt: int) -> None:
        """A claim does not wait any more."""
        lookup = self._lookups.get(peer)
        if lookup is not None:
            lookup.claims = [each for each in lookup.claims if each[1].attempt != attempt]

    def ended(self) -> list[Lookup]:
        """Take the lookups that have ended since the last call."""
        ended = [lookup for lookup in self._lookups.values() if lookup.is_over]
        for lookup in ended:
            del self._lookups[lookup.peer]
        return ended

    def late(self, since_s: float) -> list[tuple[str, Claim]]:
        """Take the claims that came before this time; their lookups go on until they end."""
        late = []
        for peer, lookup in self._lookups.items():
            late += [(peer, claim) for came_s, claim in lookup.claims if came_s < since_s]
            lookup.claims = [each for each in lookup.claims if each[0] >= since_s]
        return late


def host_of(peer: str) -> str:
    """The host of HOST:PORT or [HOST]:PORT."""
    return peer.rpartition(":")[0].removeprefix("[").removesuffix("]")


def known_address(peer: str) -> str:
    """The numeric host of a peer; "": it must be looked up. Never blocks."""
    host = host_of(peer)
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


class State(enum.Enum):
    """State of the connection to a prefill engine."""

    CONNECTING = enum.auto()
    WELCOME = enum.auto()
    REFUSED = enum.auto()
    SILENT = enum.auto()


Attempt = tuple[str, int]
"""`bootstrap_room`, and number of the claim."""
Answer = Prefilled | ClaimFailed | AbortAck


class Storing(NamedTuple):
    """Pages of a `PageData` that this engine writes into the pool of a rank."""

    attempt: Attempt
    number: int
    connection: int
    work: Work


@dataclass(slots=True)
class Peer:
    """A prefill engine.

    Attributes:
        waiting: claims that are not sent, with the time at which they came.
        must_greet: it is connected, and `Hello` is not sent.
        open: claims that were sent and are not answered, by (bootstrap_room, attempt).
        processes: the writing processes of all its ranks; empty before its first `Welcome`.
        given_up: claims that were aborted, or open when the engine was lost: it may still write. Each has the time when
            the engine can write no more, whatever it does; infinite while it is connected, because it then answers.
        storing: pages of it that are being stored.
        held: answers of claims with such pages.
        connection: how often it was connected.
        idle_since_s: since when it is not connected, and nothing waits for it; None: something does.
    """

    name: str
    socket: Socket
    monitor: Socket
    state: State = State.CONNECTING
    refusal: str = ""
    heard_s: float = 0.0
    pinged_s: float = 0.0
    looked_s: float = 0.0
    must_greet: bool = False
    waiting: list[tuple[float, Claim]] = field(default_factory=list)
    open: dict[Attempt, Claim] = field(default_factory=dict)
    processes: tuple[ProcessIdentity, ...] = ()
    given_up: dict[Attempt, float] = field(default_factory=dict)
    storing: list[Storing] = field(default_factory=list)
    held: list[Answer] = field(default_factory=list)
    connection: int = 0
    idle_since_s: float | None = None

    @property
    def is_dead(self) -> bool:
        """Whether it is certain that the processes of all its ranks have ended."""
        return bool(self.processes) and all(process.is_dead() for process in self.processes)

    def is_storing(self, attempt: Attempt) -> bool:
        """Whether pages of a claim are being stored."""
        return any(each.attempt == attempt for each in self.storing)
