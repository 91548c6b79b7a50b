"""`DecodeRole`: takes prompts that other engines compute, and decodes them."""

from __future__ import annotations

import bisect
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...runtime.messages import Finish, FinishKind, TokenOutput
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
)
from ..admission.budget import Reservations
from ..arrays import TOKEN_ID_BYTES, IntArray
from ..grammar.grammar_rules import MATCHED_GRAMMAR, advance
from ..memory.kv_memory import KVMemory
from ..memory.pages import IncomingPages
from ..prefix_cache.base import Lease, PrefixCache, PrefixMatch
from ..records.stats import SchedulerStats
from ..requests.outputs import StopRules, output_row
from ..requests.req import Req, ReqStatus
from ..requests.requests import Requests
from .role import NO_CHANGES, Changes, News, Step, TransferCounts, TransferRole, prompt_crc

logger = logging.getLogger(__name__)

FAILED_STATUS: Final = 503

_BY_ARRIVAL: Final = operator.attrgetter("seq")


@dataclass(slots=True)
class _Incoming:
    """A prompt that was claimed.

    Attributes:
        req: the request; it is RECEIVING.
        peer, attempt: of the claim.
        lease: the part of the prompt that the prefix cache had.
        pages: [n] the pages for the rest, whole ones only.
        claimed_s, expires_s: when it was claimed, and when it is given up.
    """

    req: Req
    peer: str
    attempt: int
    lease: Lease
    pages: IntArray
    claimed_s: float
    expires_s: float


def _by_priority(req: Req) -> tuple[int, int]:
    return -req.priority, req.seq


class DecodeRole(TransferRole):
    """See `TransferRole`. Prompts are claimed in the order of arrival, each when its pages can be had."""

    def __init__(
        self,
        requests: Requests,
        cache: PrefixCache,
        kv: KVMemory,
        incoming: IncomingPages,
        *,
        reservations: Reservations,
        stop_rules: StopRules,
        stats: SchedulerStats,
        max_open: int,
        timeout_s: float,
        fallback: bool,
        by_priority: bool,
    ) -> None:
        """Take the parts.

        Args:
            max_open: prompts that are claimed at the same time.
            timeout_s: for a claim; the prompt waits and is computed in this time.
            fallback: compute a prompt here if it does not come; else its request fails.
            by_priority: requests of the highest priority claim first.
        """
        self._requests = requests
        self._cache = cache
        self._kv = kv
        self._incoming = incoming
        self._reservations = reservations
        self._stop_rules = stop_rules
        self._stats = stats
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._fallback = fallback
        self._queue: list[Req] = []  # not claimed yet, in the order of their claims; some may have ended
        self._order: Callable[[Req], Any] = _by_priority if by_priority else _BY_ARRIVAL
        self._open: dict[str, _Incoming] = {}  # by bootstrap_room
        self._bootstrap_rooms: dict[str, str] = {}  # rid -> bootstrap_room, for `_open`
        # (peer, attempt) -> pages that may still be written to
        self._draining: dict[tuple[str, int], IntArray] = {}
        self._last_attempt = 0
        self._commands: list[TransferCommand] = []
        self._counts = TransferCounts()

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self._draining)

    def reason_against(self, receives: bool) -> str:
        return (
            ""
            if receives
            else "the handoff of the request is for a prefill engine, but this is a decode engine"
        )

    def arrived(self, req: Req, now_s: float) -> Sequence[Step]:
        if req.status is ReqStatus.RECEIVING:
            bisect.insort(self._queue, req, key=self._order)
        return ()

    def plan(self, now_s: float) -> Changes:
        steps: list[Step] = []
        rows: list[TokenOutput] = []
        for bootstrap_room, incoming in [*self._open.items()] if self._open else ():
            if incoming.expires_s <= now_s:
                self._give_up(bootstrap_room, incoming)
                self._without(
                    incoming.req, "timeout", f"no prompt within {self._timeout_s:g} s", now_s, steps, rows
                )
        self._claim_waiting(now_s, steps)
        return Changes(steps, rows) if steps or rows else NO_CHANGES

    def answered(self, rows: Sequence[TokenOutput], now_s: float) -> Sequence[Step]:
        """A request may end while its prompt is on the way: aborted, or at its time limit."""
        steps: list[Step] = []
        for row in rows if self._open else ():
            if row.finish is not None and (bootstrap_room := self._bootstrap_rooms.get(row.rid)) is not None:
                self._give_up(bootstrap_room, self._open[bootstrap_room])
                steps.append(Step(row.rid, "unclaimed", "the request has ended"))
        return steps

    def handle(self, message: News, now_s: float) -> Changes:
        steps: list[Step] = []
        rows: list[TokenOutput] = []
        grammar_ends: dict[str, str] = {}
        match message:
            case FromPeer(peer=peer, message=Prefilled() as prefilled):
                self._take(peer, prefilled, now_s, steps, rows, grammar_ends)
            case FromPeer(peer=peer, message=ClaimFailed() | AbortAck() as ended):
                self._end_attempt(peer, ended, now_s, steps, rows)
            case PeerLost():
                self._lose(message, now_s, steps, rows)
            case FromPeer() | PagesWritten():
                logger.warning("dropped a message that is not for a decode engine peer=%s", message.peer)
            case _:
                pass
        return Changes(steps, rows, grammar_ends) if steps or rows else NO_CHANGES

    def take_commands(self) -> list[TransferCommand]:
        commands, self._commands = self._commands, []
        return commands

    def wake_s(self) -> float | None:
        return min((incoming.expires_s for incoming in self._open.values()), default=None)

    def leases(self) -> list[Lease]:
        return [incoming.lease for incoming in self._open.values()]

    def figures(self) -> TransferFigures:
        counts = self._counts
        return TransferFigures(
            waiting=sum(req.status is ReqStatus.RECEIVING for req in self._queue),
            open=self.num_open,
            held_pages=self._incoming.num_pages,
            received_pages=counts.received_pages,
            transfer_s=counts.transfer_s,
            transfers=counts.transfers,
            failures=dict(counts.failures),
        )

    # ------------------------------------------------------------ claims

    def _claim_waiting(self, now_s: float, steps: list[Step]) -> None:
        """Claim for the requests of the queue, up to the first one that lacks memory."""
        left: list[Req] = []
        for index, req in enumerate(self._queue):
            if req.status is not ReqStatus.RECEIVING:
                continue  # it has ended
            if self._sibling_is_open(req):
                left.append(req)  # its pages are on the way
            elif len(self._open) >= self._max_open or not self._claim(req, now_s, steps):
                left += self._queue[index:]
                break
        self._queue = left

    def _claim(self, req: Req, now_s: float, steps: list[Step]) -> bool:
        """Claim a prompt, or queue its request to be computed here; False: neither is possible now."""
        assert req.handoff is not None
        # The first token comes with the prompt, so all whole pages of the prompt can be used.
        num_pages = req.prompt_len // self._kv.page_size
        match = self._cache.match(req.extra_key, req.fill_ids, num_pages)
        missing = num_pages - match.num_pages
        bootstrap_room = req.handoff.bootstrap_room
        if not missing or bootstrap_room in self._open:
            why = "all whole pages are cached" if not missing else f"the room {bootstrap_room} is in use"
            if not missing:
                self._commands.append(ToPeer(req.handoff.peer, PromptReleased(bootstrap_room)))
            self._requests.kv_ready(req, now_s)
            steps.append(Step(req.rid, "computed here", why))
            return True
        if not self._has_room(missing, match):
            return False
        lease = self._cache.lock(req.extra_key, match, req.priority)
        pages = self._incoming.take(missing)
        self._last_attempt += 1
        peer, attempt = req.handoff.peer, self._last_attempt
        self._bootstrap_rooms[req.rid] = bootstrap_room
        self._open[bootstrap_room] = _Incoming(
            req, peer, attempt, lease, pages, now_s, now_s + self._timeout_s
        )
        crc = prompt_crc(req.fill_ids, req.extra_key)
        self._commands.append(
            ToPeer(peer, Claim(bootstrap_room, attempt, match.num_pages, pages.tobytes(), crc))
        )
        steps.append(Step(req.rid, "claimed", f"{missing} of {num_pages} pages from {peer}"))
        return True

    def _sibling_is_open(self, req: Req) -> bool:
        return bool(req.group) and any(incoming.req.group == req.group for incoming in self._open.values())

    def _has_room(self, missing: int, match: PrefixMatch) -> bool:
        needed = missing + self._kv.unlocked_pages(match)
        return self._reservations.leave_room(needed, self._kv.available_pages)

    def _give_up(self, bootstrap_room: str, incoming: _Incoming) -> None:
        """Abort a claim. Its pages stay taken until nothing can be written to them any more."""
        self._close(bootstrap_room, incoming)
        self._cache.release(incoming.lease)
        self._draining[incoming.peer, incoming.attempt] = incoming.pages
        self._commands.append(ToPeer(incoming.peer, ClaimAborted(bootstrap_room, incoming.attempt)))

    def _close(self, bootstrap_room: str, incoming: _Incoming) -> None:
        del self._open[bootstrap_room], self._bootstrap_rooms[incoming.req.rid]

    # ------------------------------------------------------------ answers of the prefill engine

    def _take(
        self,
        peer: str,
        message: Prefilled,
        now_s: float,
        steps: list[Step],
        rows: list[TokenOutput],
        grammar_ends: dict[str, str],
    ) -> None:
        incoming = self._open.get(message.bootstrap_room)
        if incoming is None or (incoming.peer, incoming.attempt) != (peer, message.attempt):
            return  # given up before; the ack of the abort follows
        self._close(message.bootstrap_room, incoming)
        req, lease, count = incoming.req, incoming.lease, message.num_pages
        page_bytes = self._kv.page_size * TOKEN_ID_BYTES
        begin = lease.num_pages * page_bytes
        written, rest = incoming.pages[:count], incoming.pages[count:]
        if count:
            self._incoming.adopt(lease, req.fill_ids[begin : begin + count * page_bytes], written)
        self._incoming.give_back(rest)
        self._cache.release(lease)
        self._counts.transfers += 1
        self._counts.received_pages += count
        self._counts.transfer_s += now_s - incoming.claimed_s
        steps.append(Step(req.rid, "received", f"{count} pages from {peer}"))
        rows.append(self._first_token(req, message, now_s, grammar_ends))

    def _first_token(
        self, req: Req, message: Prefilled, now_s: float, grammar_ends: dict[str, str]
    ) -> TokenOutput:
        """Add the token that the prefill engine has sampled to the output; the request goes on after it, or ends."""
        token_id = int(np.frombuffer(message.output_ids, dtype=np.int32)[0])
        req.fill_ids += message.output_ids
        req.output_len = 1
        req.cached_tokens = message.cached_tokens
        self._stats.generation_tokens += 1
        if message.overruled is not None and req.grammar_figures is not None:
            req.grammar_figures.overruled(*message.overruled)
            self._stats.overruled_tokens += 1
        self._stats.prompt_tokens += req.prompt_len
        self._stats.prompt_received_tokens += req.prompt_len
        finish = self._stop_rules.finish(req, token_id)
        if req.matcher is not None:
            finish = advance(req, token_id, finish)
            if finish is not None and (req.matcher.error or finish.matched == MATCHED_GRAMMAR):
                grammar_ends[req.rid] = req.matcher.error
        if finish is not None:
            return self._requests.finish(req, finish, now_s, message.output_ids, message.logprobs)
        row = output_row(req, message.output_ids, logprobs=message.logprobs)
        self._requests.kv_ready(req, now_s)
        return row

    def _end_attempt(
        self,
        peer: str,
        message: ClaimFailed | AbortAck,
        now_s: float,
        steps: list[Step],
        rows: list[TokenOutput],
    ) -> None:
        """Nothing is written for this attempt any more."""
        pages = self._draining.pop((peer, message.attempt), None)
        if pages is not None:
            self._incoming.give_back(pages)
            return
        incoming = self._open.get(message.bootstrap_room)
        if incoming is None or (incoming.peer, incoming.attempt) != (peer, message.attempt):
            return
        reason = (
            message.reason if isinstance(message, ClaimFailed) else "the prefill engine gave the prompt up"
        )
        self._close(message.bootstrap_room, incoming)
        self._cache.release(incoming.lease)
        self._incoming.give_back(incoming.pages)
        self._without(incoming.req, "prefill", reason, now_s, steps, rows)

    def _lose(self, message: PeerLost, now_s: float, steps: list[Step], rows: list[TokenOutput]) -> None:
        for bootstrap_room, incoming in list(self._open.items()):
            if incoming.peer == message.peer:
                # The link answers when nothing is written for it any more.
                self._give_up(bootstrap_room, incoming)
                self._without(incoming.req, "lost", message.reason, now_s, steps, rows)

    def _without(
        self, req: Req, kind: str, reason: str, now_s: float, steps: list[Step], rows: list[TokenOutput]
    ) -> None:
        """The prompt of a request does not come: compute it here, or end the request."""
        self._counts.failures[kind] += 1
        logger.warning(
            "no prompt from the prefill engine rid=%s fallback=%s: %s", req.rid, self._fallback, reason
        )
        steps.append(Step(req.rid, "not received", reason))
        if self._fallback:
            self._requests.kv_ready(req, now_s)
            return
        message = f"the prompt did not arrive from the prefill engine: {reason}; send the request again"
        finish = Finish(FinishKind.ERROR, message=message, status=FAILED_STATUS)
        rows.append(self._requests.finish(req, finish, now_s))
