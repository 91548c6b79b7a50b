"""`PrefillRole`: sends the prompts that this engine computes to the engines that decode them."""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...runtime.messages import FinishKind, TokenOutput
from ...runtime.transport.kv_transfer import (
    AbortAck,
    Claim,
    ClaimAborted,
    ClaimFailed,
    FromPeer,
    PagesWritten,
    PeerLost,
    Prefilled,
    RoomReleased,
    ToPeer,
    TransferCommand,
    TransferFigures,
    WritePages,
)
from ..arrays import IntArray
from ..batch import ScheduleBatch
from ..memory.pages import PageSupply
from ..prefix_cache.base import Lease, PrefixCache
from ..requests.req import Req
from .role import NO_CHANGES, Changes, Step, TransferCounts, TransferNews, TransferRole, prompt_crc

logger = logging.getLogger(__name__)

KEPT_TOMBSTONES: Final = 16_384
"""Rooms that have ended; a late claim or a second request for one of them is refused."""


class _Ending(enum.Enum):
    """The answer to a decode engine when nothing is written for its claim any more."""

    NOTHING = enum.auto()
    FAILED = enum.auto()
    ACK = enum.auto()


@dataclass(slots=True)
class _Claimed:
    """A claim of a decode engine.

    Attributes:
        peer, message: who claims what.
        pages: [n] int32, where the pages go.
        num_ordered: pages of the prompt, from its beginning, that were written or are being written.
        num_writing: writes that have not ended.
        lease: locks those pages; None before the first write.
        ending, failure: the answer when it is over.
        is_bad: the KV may be wrong; pages that no request uses leave the cache with the lease.
    """

    peer: str
    message: Claim
    pages: IntArray
    num_ordered: int
    num_writing: int = 0
    lease: Lease | None = None
    ending: _Ending = _Ending.NOTHING
    failure: str = ""
    is_bad: bool = False


@dataclass(slots=True)
class _Room:
    """A prompt for another engine.

    Attributes:
        rid: its request here; "" before it has come.
        token_ids, namespace: the prompt.
        crc: of both; see `prompt_crc`.
        num_pages: whole pages of the prompt.
        expires_s: when it ends if nothing happens; None while its request runs.
        result: the row with the first token; None before it is computed.
        claim: the current claim.
    """

    rid: str = ""
    token_ids: bytes = b""
    namespace: str = ""
    crc: int = 0
    num_pages: int = 0
    expires_s: float | None = None
    result: TokenOutput | None = None
    claim: _Claimed | None = None


class PrefillRole(TransferRole):
    """See `TransferRole`. A room is forgotten when its prompt was sent, and kept as a tombstone."""

    def __init__(self, cache: PrefixCache, supply: PageSupply, page_size: int, *, timeout_s: float) -> None:
        """`timeout_s`: for a claim of a computed prompt, and for the request of a claim."""
        self._cache = cache
        self._supply = supply
        self._page_size = page_size
        self._timeout_s = timeout_s
        self._rooms: dict[str, _Room] = {}
        self._rids: dict[str, str] = {}  # rid -> room
        self._tombs: OrderedDict[str, None] = OrderedDict()
        # Claims that are over, with writes that are not.
        self._leaving: dict[tuple[str, str, int], _Claimed] = {}
        self._commands: list[TransferCommand] = []
        self._counts = TransferCounts()
        self._settled_step = 0

    @property
    def num_open(self) -> int:
        return len(self._leaving) + sum(room.claim is not None for room in self._rooms.values())

    def reason_against(self, receives: bool) -> str:
        return (
            "the handoff of the request is for a decode engine, but this is a prefill engine"
            if receives
            else ""
        )

    def arrived(self, req: Req) -> Sequence[Step]:
        assert req.handoff is not None
        name = req.handoff.room
        if name in self._tombs or (name in self._rooms and self._rooms[name].rid):
            logger.info(
                "the room of rid=%s has ended: its prompt is computed, and sent to no engine", req.rid
            )
            return ()
        room = self._rooms.setdefault(name, _Room())
        room.rid, room.token_ids, room.namespace = req.rid, req.fill_ids, req.extra_key
        room.crc = prompt_crc(req.fill_ids, req.extra_key)
        room.num_pages = req.prompt_len // self._page_size
        room.expires_s = None
        self._rids[req.rid] = name
        return self._begin(name, room)

    def plan(self, now_s: float) -> Changes:
        steps = []
        for name, room in list(self._rooms.items()):
            if room.expires_s is not None and room.expires_s <= now_s:
                reason = "no request for this room came" if not room.rid else "no engine claimed the prompt"
                steps += self._fail(name, room, "timeout", f"{reason} within {self._timeout_s:g} s")
        return Changes(steps) if steps else NO_CHANGES

    def settled(self, batch: ScheduleBatch) -> None:
        self._settled_step = batch.plan.step_id  # pages in the cache are of this step or of earlier ones
        if self._rids:
            for req in batch.reqs[: batch.num_extends]:
                if (name := self._rids.get(req.rid)) is not None:
                    self._write(name, self._rooms[name])

    def answered(self, rows: Sequence[TokenOutput], now_s: float) -> Sequence[Step]:
        steps: list[Step] = []
        if not self._rids:
            return steps
        for row in rows:
            if row.finish is None or (name := self._rids.get(row.rid)) is None:
                continue
            room = self._rooms[name]
            if row.token_ids and row.finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
                room.result = row
                if room.claim is None:
                    room.expires_s = now_s + self._timeout_s
                steps += self._continue(name, room)
            else:
                if room.claim is not None:
                    room.claim.is_bad = row.finish.kind is FinishKind.ERROR
                reason = row.finish.message or f"the prompt's request ended ({row.finish.kind.value})"
                steps += self._fail(name, room, "request", reason)
        return steps

    def handle(self, message: TransferNews, now_s: float) -> Changes:
        steps: list[Step] = []
        match message:
            case FromPeer(peer=peer, message=Claim() as claim):
                steps = self._claim(peer, claim, now_s)
            case FromPeer(peer=peer, message=ClaimAborted() as aborted):
                steps = self._abort(peer, aborted, now_s)
            case FromPeer(message=RoomReleased() as released):
                self._release(released.room)
            case FromPeer():
                logger.warning("dropped a message that is not for a prefill engine peer=%s", message.peer)
                return NO_CHANGES
            case PagesWritten():
                steps = self._written(message)
            case PeerLost():
                for room in self._rooms.values():
                    if room.claim is not None and room.claim.peer == message.peer:
                        steps.append(Step(room.rid, "unclaimed", message.reason))
                        self._end_claim(room)
                        room.expires_s = now_s + self._timeout_s if not room.rid or room.result else None
        return Changes(steps) if steps else NO_CHANGES

    def take_commands(self) -> list[TransferCommand]:
        commands, self._commands = self._commands, []
        return commands

    def wake_s(self) -> float | None:
        return min(
            (room.expires_s for room in self._rooms.values() if room.expires_s is not None), default=None
        )

    def leases(self) -> list[Lease]:
        claims = [
            *self._leaving.values(),
            *(room.claim for room in self._rooms.values() if room.claim is not None),
        ]
        return [claim.lease for claim in claims if claim.lease is not None]

    def figures(self) -> TransferFigures:
        counts, num_open = self._counts, self.num_open
        return TransferFigures(
            waiting=len(self._rooms) + len(self._leaving) - num_open,
            open=num_open,
            held_pages=sum(lease.num_pages for lease in self.leases()),
            sent_pages=counts.sent_pages,
            transfer_s=counts.transfer_s,
            transfers=counts.transfers,
            failures=dict(counts.failures),
        )

    # ------------------------------------------------------------ claims

    def _claim(self, peer: str, message: Claim, now_s: float) -> list[Step]:
        name = message.room
        if name in self._tombs:
            self._commands.append(
                ToPeer(peer, ClaimFailed(name, message.attempt, "the room has ended before"))
            )
            return []
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = _Room(expires_s=now_s + self._timeout_s)
        elif room.claim is not None:  # of an earlier attempt, or of an engine that was restarted since
            old = room.claim
            if old.peer == peer and message.attempt <= old.message.attempt:
                return []  # a copy
            old.failure = "another engine has claimed the prompt"
            self._end_claim(room, _Ending.FAILED)
        pages: IntArray = np.frombuffer(message.pages, dtype=np.int32)
        room.claim = _Claimed(peer, message, pages, num_ordered=message.first_page)
        if room.rid:
            room.expires_s = None
        return [
            Step(room.rid, "claimed", f"{len(pages)} pages by {peer}"),
            *self._begin(name, room),
        ]

    def _begin(self, name: str, room: _Room) -> list[Step]:
        """A room has got its claim or its request; if it has both, begin to write."""
        if room.claim is None or not room.rid:
            return []
        if room.claim.message.prompt_crc != room.crc:
            reason = "the two engines have different prompts in this room: their tokenizers or chat templates differ"
            return self._fail(name, room, "prompt", reason)
        return self._continue(name, room)

    def _continue(self, name: str, room: _Room) -> list[Step]:
        """Write the pages that are cached and were not written; when all are, send the first token."""
        self._write(name, room)
        claim = room.claim
        if claim is None or room.result is None or claim.num_writing:
            return []
        row, message = room.result, claim.message
        num_pages = claim.num_ordered - message.first_page
        grammar = row.usage.grammar
        refused = None if grammar is None else grammar.first_overruled
        result = Prefilled(
            name,
            message.attempt,
            num_pages,
            row.token_ids,
            row.logprobs,
            row.usage.cached_tokens,
            None if refused is None else (refused.position, refused.wanted_id, refused.got_id),
        )
        self._commands.append(ToPeer(claim.peer, result))
        self._counts.transfers += 1
        self._end(name, room)
        return [Step(row.rid, "sent", f"{num_pages} pages to {claim.peer}")]

    def _write(self, name: str, room: _Room) -> None:
        claim = room.claim
        if claim is None:
            return
        end = min(room.num_pages, claim.message.first_page + len(claim.pages))
        if claim.num_ordered >= end:
            return
        match = self._cache.match(room.namespace, room.token_ids, end)
        begin, end = claim.num_ordered, match.num_pages
        if end <= begin:
            return
        lease = self._cache.lock(room.namespace, match)
        if claim.lease is not None:
            self._cache.release(claim.lease)
        claim.lease, claim.num_ordered = lease, end
        claim.num_writing += 1
        first = claim.message.first_page
        self._commands.append(
            WritePages(
                claim.peer,
                name,
                claim.message.attempt,
                self._cache.pages_of(lease)[begin:end].tobytes(),
                claim.pages[begin - first : end - first].tobytes(),
                self._settled_step,
            )
        )

    def _written(self, message: PagesWritten) -> list[Step]:
        self._counts.transfer_s += message.seconds
        key = (message.peer, message.room, message.attempt)
        claim = self._leaving.get(key)
        if claim is not None:
            claim.num_writing -= 1
            if not claim.num_writing:
                del self._leaving[key]
                self._leave(claim)
            return []
        room = self._rooms.get(message.room)
        assert room is not None and room.claim is not None, message
        claim = room.claim
        claim.num_writing -= 1
        if message.error:
            return self._fail(message.room, room, "write", message.error)
        return self._continue(message.room, room)

    def _abort(self, peer: str, message: ClaimAborted, now_s: float) -> list[Step]:
        room = self._rooms.get(message.room)
        claim = None if room is None else room.claim
        if (
            room is not None
            and claim is not None
            and (claim.peer, claim.message.attempt) == (peer, message.attempt)
        ):
            self._end_claim(room, _Ending.ACK)
            room.expires_s = now_s + self._timeout_s if room.result is not None or not room.rid else None
            return [Step(room.rid, "unclaimed", f"{peer} gave it up")]
        if (peer, message.room, message.attempt) not in self._leaving:  # else the last write answers
            self._commands.append(ToPeer(peer, AbortAck(message.room, message.attempt)))
        return []

    def _release(self, name: str) -> None:
        """The prompt of a room is not needed; its request, which may not have come yet, goes on alone."""
        room = self._rooms.get(name)
        if room is None:
            self._bury(name)
        elif room.claim is None:
            self._end(name, room)

    # ------------------------------------------------------------ ends

    def _fail(self, name: str, room: _Room, kind: str, reason: str) -> list[Step]:
        """End a room; the decode engine is notified when nothing is written for it any more."""
        self._counts.failures[kind] += 1
        if room.claim is not None:
            room.claim.failure = reason
        self._end(name, room, _Ending.FAILED)
        return [Step(room.rid, "not sent", reason)]

    def _end(self, name: str, room: _Room, ending: _Ending = _Ending.NOTHING) -> None:
        self._end_claim(room, ending)
        del self._rooms[name]
        self._rids.pop(room.rid, None)
        self._bury(name)

    def _bury(self, name: str) -> None:
        self._tombs[name] = None
        if len(self._tombs) > KEPT_TOMBSTONES:
            self._tombs.popitem(last=False)

    def _end_claim(self, room: _Room, ending: _Ending = _Ending.NOTHING) -> None:
        """Take the claim from a room. It is over, with its lease, after its last write."""
        claim, room.claim = room.claim, None
        if claim is None:
            return
        claim.ending = ending
        if claim.num_writing:
            self._leaving[claim.peer, claim.message.room, claim.message.attempt] = claim
        else:
            self._leave(claim)

    def _leave(self, claim: _Claimed) -> None:
        if claim.lease is not None:
            self._counts.sent_pages += claim.num_ordered - claim.message.first_page
            if claim.is_bad:
                self._supply.give_back(self._cache.forget(claim.lease))
            else:
                self._cache.release(claim.lease)
            claim.lease = None
        room, attempt = claim.message.room, claim.message.attempt
        match claim.ending:
            case _Ending.FAILED:
                self._commands.append(ToPeer(claim.peer, ClaimFailed(room, attempt, claim.failure)))
            case _Ending.ACK:
                self._commands.append(ToPeer(claim.peer, AbortAck(room, attempt)))
            case _Ending.NOTHING:
                pass
