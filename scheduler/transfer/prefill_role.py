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
    PromptReleased,
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
from .role import NO_CHANGES, Changes, News, Step, TransferCounts, TransferRole, prompt_crc

logger = logging.getLogger(__name__)

KEPT_TOMBSTONES: Final = 16_384
"""Ended values of `bootstrap_room`; a late claim or a second request for one of them is refused."""


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
class _Outgoing:
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
    """See `TransferRole`. A prompt is forgotten after it was sent; its `bootstrap_room` stays as a tombstone."""

    def __init__(self, cache: PrefixCache, supply: PageSupply, page_size: int, *, timeout_s: float) -> None:
        """`timeout_s`: for a claim of a computed prompt, and for the request of a claim."""
        self._cache = cache
        self._supply = supply
        self._page_size = page_size
        self._timeout_s = timeout_s
        self._outgoing: dict[str, _Outgoing] = {}  # by bootstrap_room
        self._rids: dict[str, str] = {}  # rid -> bootstrap_room
        self._tombs: OrderedDict[str, None] = OrderedDict()
        # Claims that are over, with writes that are not.
        self._leaving: dict[tuple[str, str, int], _Claimed] = {}
        self._commands: list[TransferCommand] = []
        self._counts = TransferCounts()
        self._settled_step = 0

    @property
    def num_open(self) -> int:
        return len(self._leaving) + sum(outgoing.claim is not None for outgoing in self._outgoing.values())

    def reason_against(self, receives: bool) -> str:
        return (
            "the handoff of the request is for a decode engine, but this is a prefill engine"
            if receives
            else ""
        )

    def arrived(self, req: Req, now_s: float) -> Sequence[Step]:
        if req.handoff is None or req.output_len:
            return ()
        bootstrap_room = req.handoff.bootstrap_room
        if bootstrap_room in self._tombs or (
            bootstrap_room in self._outgoing and self._outgoing[bootstrap_room].rid
        ):
            logger.info(
                "the room of rid=%s has ended: its prompt is computed, and sent to no engine", req.rid
            )
            return ()
        outgoing = self._outgoing.setdefault(bootstrap_room, _Outgoing())
        outgoing.rid, outgoing.token_ids, outgoing.namespace = req.rid, req.fill_ids, req.extra_key
        outgoing.crc = prompt_crc(req.fill_ids, req.extra_key)
        outgoing.num_pages = req.prompt_len // self._page_size
        outgoing.expires_s = None
        self._rids[req.rid] = bootstrap_room
        return self._begin(bootstrap_room, outgoing)

    def plan(self, now_s: float) -> Changes:
        steps = []
        for bootstrap_room, outgoing in list(self._outgoing.items()):
            if outgoing.expires_s is not None and outgoing.expires_s <= now_s:
                reason = (
                    "no request for this room came" if not outgoing.rid else "no engine claimed the prompt"
                )
                steps += self._fail(
                    bootstrap_room, outgoing, "timeout", f"{reason} within {self._timeout_s:g} s"
                )
        return Changes(steps) if steps else NO_CHANGES

    def settled(self, batch: ScheduleBatch, forward_s: float) -> None:
        self._settled_step = batch.plan.step_id  # pages in the cache are of this step or of earlier ones
        if self._rids:
            for req in batch.reqs[: batch.num_extends]:
                if (bootstrap_room := self._rids.get(req.rid)) is not None:
                    self._write(bootstrap_room, self._outgoing[bootstrap_room])

    def answered(self, rows: Sequence[TokenOutput], now_s: float) -> Sequence[Step]:
        steps: list[Step] = []
        if not self._rids:
            return steps
        for row in rows:
            if row.finish is None or (bootstrap_room := self._rids.get(row.rid)) is None:
                continue
            outgoing = self._outgoing[bootstrap_room]
            if row.token_ids and row.finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
                outgoing.result = row
                if outgoing.claim is None:
                    outgoing.expires_s = now_s + self._timeout_s
                steps += self._continue(bootstrap_room, outgoing)
            else:
                if outgoing.claim is not None:
                    outgoing.claim.is_bad = row.finish.kind is FinishKind.ERROR
                reason = row.finish.message or f"the prompt's request ended ({row.finish.kind.value})"
                steps += self._fail(bootstrap_room, outgoing, "request", reason)
        return steps

    def handle(self, message: News, now_s: float) -> Changes:
        steps: list[Step] = []
        match message:
            case FromPeer(peer=peer, message=Claim() as claim):
                steps = self._claim(peer, claim, now_s)
            case FromPeer(peer=peer, message=ClaimAborted() as aborted):
                steps = self._abort(peer, aborted, now_s)
            case FromPeer(message=PromptReleased() as released):
                self._release(released.bootstrap_room)
            case FromPeer():
                logger.warning("dropped a message that is not for a prefill engine peer=%s", message.peer)
                return NO_CHANGES
            case PagesWritten():
                steps = self._written(message)
            case PeerLost():
                for outgoing in self._outgoing.values():
                    if outgoing.claim is not None and outgoing.claim.peer == message.peer:
                        steps.append(Step(outgoing.rid, "unclaimed", message.reason))
                        self._end_claim(outgoing)
                        outgoing.expires_s = (
                            now_s + self._timeout_s if not outgoing.rid or outgoing.result else None
                        )
        return Changes(steps) if steps else NO_CHANGES

    def take_commands(self) -> list[TransferCommand]:
        commands, self._commands = self._commands, []
        return commands

    def wake_s(self) -> float | None:
        return min(
            (outgoing.expires_s for outgoing in self._outgoing.values() if outgoing.expires_s is not None),
            default=None,
        )

    def leases(self) -> list[Lease]:
        claims = [
            *self._leaving.values(),
            *(outgoing.claim for outgoing in self._outgoing.values() if outgoing.claim is not None),
        ]
        return [claim.lease for claim in claims if claim.lease is not None]

    def figures(self) -> TransferFigures:
        counts, num_open = self._counts, self.num_open
        return TransferFigures(
            waiting=len(self._outgoing) + len(self._leaving) - num_open,
            open=num_open,
            held_pages=sum(lease.num_pages for lease in self.leases()),
            sent_pages=counts.sent_pages,
            transfer_s=counts.transfer_s,
            transfers=counts.transfers,
            failures=dict(counts.failures),
        )

    # ------------------------------------------------------------ claims

    def _claim(self, peer: str, message: Claim, now_s: float) -> list[Step]:
        bootstrap_room = message.bootstrap_room
        if bootstrap_room in self._tombs:
            self._commands.append(
                ToPeer(peer, ClaimFailed(bootstrap_room, message.attempt, "the room has ended before"))
            )
            return []
        outgoing = self._outgoing.get(bootstrap_room)
        if outgoing is None:
            outgoing = self._outgoing[bootstrap_room] = _Outgoing(expires_s=now_s + self._timeout_s)
        elif outgoing.claim is not None:  # of an earlier attempt, or of an engine that was restarted since
            old = outgoing.claim
            if old.peer == peer and message.attempt <= old.message.attempt:
                return []  # a copy
            old.failure = "another engine has claimed the prompt"
            self._end_claim(outgoing, _Ending.FAILED)
        pages: IntArray = np.frombuffer(message.pages, dtype=np.int32)
        outgoing.claim = _Claimed(peer, message, pages, num_ordered=message.first_page)
        if outgoing.rid:
            outgoing.expires_s = None
        return [
            Step(outgoing.rid, "claimed", f"{len(pages)} pages by {peer}"),
            *self._begin(bootstrap_room, outgoing),
        ]

    def _begin(self, bootstrap_room: str, outgoing: _Outgoing) -> list[Step]:
        """Begin to write if both the claim and the request have come."""
        if outgoing.claim is None or not outgoing.rid:
            return []
        if outgoing.claim.message.prompt_crc != outgoing.crc:
            reason = "the two engines have different prompts in this room: their tokenizers or chat templates differ"
            return self._fail(bootstrap_room, outgoing, "prompt", reason)
        return self._continue(bootstrap_room, outgoing)

    def _continue(self, bootstrap_room: str, outgoing: _Outgoing) -> list[Step]:
        """Write the pages that are cached and were not written; when all are, send the first token."""
        self._write(bootstrap_room, outgoing)
        claim = outgoing.claim
        if claim is None or outgoing.result is None or claim.num_writing:
            return []
        row, message = outgoing.result, claim.message
        num_pages = claim.num_ordered - message.first_page
        grammar = row.usage.grammar
        refused = None if grammar is None else grammar.first_overruled
        result = Prefilled(
            bootstrap_room,
            message.attempt,
            num_pages,
            row.token_ids,
            row.logprobs,
            row.usage.cached_tokens,
            None if refused is None else (refused.position, refused.wanted_id, refused.got_id),
        )
        self._commands.append(ToPeer(claim.peer, result))
        self._counts.transfers += 1
        self._end(bootstrap_room, outgoing)
        return [Step(row.rid, "sent", f"{num_pages} pages to {claim.peer}")]

    def _write(self, bootstrap_room: str, outgoing: _Outgoing) -> None:
        claim = outgoing.claim
        if claim is None:
            return
        end = min(outgoing.num_pages, claim.message.first_page + len(claim.pages))
        if claim.num_ordered >= end:
            return
        match = self._cache.match(outgoing.namespace, outgoing.token_ids, end)
        begin, end = claim.num_ordered, match.num_pages
        if end <= begin:
            return
        lease = self._cache.lock(outgoing.namespace, match)
        if claim.lease is not None:
            self._cache.release(claim.lease)
        claim.lease, claim.num_ordered = lease, end
        claim.num_writing += 1
        first = claim.message.first_page
        self._commands.append(
            WritePages(
                claim.peer,
                bootstrap_room,
                claim.message.attempt,
                self._cache.pages_of(lease)[begin:end].tobytes(),
                claim.pages[begin - first : end - first].tobytes(),
                self._settled_step,
            )
        )

    def _written(self, message: PagesWritten) -> list[Step]:
        self._counts.transfer_s += message.seconds
        key = (message.peer, message.bootstrap_room, message.attempt)
        claim = self._leaving.get(key)
        if claim is not None:
            claim.num_writing -= 1
            if not claim.num_writing:
                del self._leaving[key]
                self._leave(claim)
            return []
        outgoing = self._outgoing.get(message.bootstrap_room)
        assert outgoing is not None and outgoing.claim is not None, message
        claim = outgoing.claim
        claim.num_writing -= 1
        if message.error:
            return self._fail(message.bootstrap_room, outgoing, "write", message.error)
        return self._continue(message.bootstrap_room, outgoing)

    def _abort(self, peer: str, message: ClaimAborted, now_s: float) -> list[Step]:
        outgoing = self._outgoing.get(message.bootstrap_room)
        claim = None if outgoing is None else outgoing.claim
        if (
            outgoing is not None
            and claim is not None
            and (claim.peer, claim.message.attempt) == (peer, message.attempt)
        ):
            self._end_claim(outgoing, _Ending.ACK)
            outgoing.expires_s = (
                now_s + self._timeout_s if outgoing.result is not None or not outgoing.rid else None
            )
            return [Step(outgoing.rid, "unclaimed", f"{peer} gave it up")]
        if (
            peer,
            message.bootstrap_room,
            message.attempt,
        ) not in self._leaving:  # else the last write answers
            self._commands.append(ToPeer(peer, AbortAck(message.bootstrap_room, message.attempt)))
        return []

    def _release(self, bootstrap_room: str) -> None:
        """Drop a prompt that the decode engine does not need; its request, which may still come, runs alone."""
        outgoing = self._outgoing.get(bootstrap_room)
        if outgoing is None:
            self._bury(bootstrap_room)
        elif outgoing.claim is None:
            self._end(bootstrap_room, outgoing)

    # ------------------------------------------------------------ ends

    def _fail(self, bootstrap_room: str, outgoing: _Outgoing, kind: str, reason: str) -> list[Step]:
        """End a prompt; the decode engine is notified when nothing is written for it any more."""
        self._counts.failures[kind] += 1
        if outgoing.claim is not None:
            outgoing.claim.failure = reason
        self._end(bootstrap_room, outgoing, _Ending.FAILED)
        return [Step(outgoing.rid, "not sent", reason)]

    def _end(self, bootstrap_room: str, outgoing: _Outgoing, ending: _Ending = _Ending.NOTHING) -> None:
        self._end_claim(outgoing, ending)
        del self._outgoing[bootstrap_room]
        self._rids.pop(outgoing.rid, None)
        self._bury(bootstrap_room)

    def _bury(self, bootstrap_room: str) -> None:
        self._tombs[bootstrap_room] = None
        if len(self._tombs) > KEPT_TOMBSTONES:
            self._tombs.popitem(last=False)

    def _end_claim(self, outgoing: _Outgoing, ending: _Ending = _Ending.NOTHING) -> None:
        """Take the claim from a prompt. It is over, with its lease, after its last write."""
        claim, outgoing.claim = outgoing.claim, None
        if claim is None:
            return
        claim.ending = ending
        if claim.num_writing:
            self._leaving[claim.peer, claim.message.bootstrap_room, claim.message.attempt] = claim
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
        bootstrap_room, attempt = claim.message.bootstrap_room, claim.message.attempt
        match claim.ending:
            case _Ending.FAILED:
                self._commands.append(ToPeer(claim.peer, ClaimFailed(bootstrap_room, attempt, claim.failure)))
            case _Ending.ACK:
                self._commands.append(ToPeer(claim.peer, AbortAck(bootstrap_room, attempt)))
            case _Ending.NOTHING:
                pass
