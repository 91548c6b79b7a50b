"""`Peer`: a prefill engine as the link of a decode engine sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from ....runtime.kv_backends.base import Work
from ....runtime.transport.kv_transfer import AbortAck, Claim, ClaimFailed, Prefilled
from ....runtime.transport.process_identity import ProcessIdentity
from .connection import Socket


class State(enum.Enum):
    """Of the connection."""

    CONNECTING = enum.auto()
    WELCOME = enum.auto()
    REFUSED = enum.auto()
    SILENT = enum.auto()


Attempt = tuple[str, int]
"""Room, and number of the claim."""
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
        open: claims that were sent and are not answered, by (room, attempt).
        processes: those that write, of all its ranks; empty before its first `Welcome`.
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
