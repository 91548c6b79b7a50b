"""`Door`: what becomes of a request for which there is no room: refused, let in at another one's cost, or kept waiting.

    --overload refuse   it is told to come back (429) - unless something less urgent waits: that goes instead, the least
                        urgent first, of those the latest; a request that has a token is never sent away
    --overload queue    it waits here, before it is tokenised, most urgent first; for routers that take a 429 for a
                        broken server. Its time limits count; how much text waits has a bound, above which it is refused

The manager asks; the `QueueGate` counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from ...runtime.config.server_config import OverloadMode
from ...runtime.errors import RequestError
from ..generation import Generation, GenerationRequest
from .queue_limiter import QueueFullError, QueueGate

_MAX_WAITING_BYTES: Final = 1 << 30  # of the prompts that --overload queue keeps; 64 of the largest bodies
_BYTES_PER_ID: Final = 40  # an int in a list


class _Freed(NamedTuple):
    """What would wait no more."""

    requests: int
    tokens: int


_NOTHING: Final = _Freed(0, 0)
_Turn = tuple[bool, int, int]
"""Whose turn comes first: who has its places and lacks tokens only; the more urgent; the earlier."""


class DoorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What may wait, and how.

    Attributes:
        max_queued_requests: in the scheduler.
        max_queued_tokens: of their prompts.
        overload: what happens beyond.
        queue_timeout_s: the server's limit on waiting; None: none.
        request_timeout_s: the server's limit on all of a request; None: none.
    """

    max_queued_requests: int
    max_queued_tokens: int
    overload: OverloadMode = "refuse"
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None


class Door:
    """Where requests come in.

    Attributes:
        gate: for whoever sees requests start and end.
    """

    def __init__(
        self,
        limits: DoorLimits,
        max_running_requests: int,
        *,
        generations: Callable[[], Iterable[Generation]],
        num_live: Callable[[], int],
        send_away: Callable[[Generation, QueueFullError], None],
        check_open: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Make a door to a scheduler without requests.

        Args:
            limits: what may wait.
            max_running_requests: of the scheduler.
            generations: the open ones.
            num_live: how many requests of the scheduler they are.
            send_away: ends one with an error.
            check_open: raises if no requests are taken any more.
            clock: CLOCK_MONOTONIC.
        """
        self.gate = QueueGate(limits.max_queued_requests, max_running_requests, limits.max_queued_tokens)
        self._limits = limits
        self._generations = generations
        self._num_live = num_live
        self._send_away = send_away
        self._check_open = check_open
        self._clock = clock
        self._line: list[tuple[_Turn, asyncio.Future[None]]] = []  # a heap
        self._num_arrivals = itertools.count()
        self._num_waiting_bytes = 0

    @contextlib.asynccontextmanager
    async def places_for(self, request: GenerationRequest, arrival_s: float) -> AsyncIterator[None]:
        """Keep the places of a request while it is tokenised; waits for them under `--overload queue`.

        Raises:
            QueueFullError: there are none.
            RequestError: there could never be so many, or its time is over.
        """
        num_new = len(request.prompts) * request.n
        if request.probe:
            yield
            return
        self.gate.check_possible(num_new)
        await self._room(
            request,
            arrival_s,
            lambda freed: self.gate.reason_against(num_new, self._num_live(), self._clock(), freed.requests),
            has_places=False,
        )
        with self.gate.hold(num_new):
            self._wake_next()  # there may be room for more
            yield
        self._wake_next()

    async def room_for_tokens(self, request: GenerationRequest, num_tokens: int, arrival_s: float) -> None:
        """The same for the tokens of all its prompts, once they are known.

        Raises:
            QueueFullError, RequestError: as above.
        """
        if not request.probe:
            await self._room(
                request,
                arrival_s,
                lambda freed: self.gate.reason_against_tokens(num_tokens, self._clock(), freed.tokens),
                has_places=True,
            )

    def may_have_room(self) -> None:
        """Something has ended, or the scheduler has reported."""
        self._wake_next()

    def close(self) -> None:
        """Whoever waits here shall look again what has become of the engine."""
        while self._line:
            self._wake_next()

    # ------------------------------------------------------------ internals

    async def _room(
        self,
        request: GenerationRequest,
        arrival_s: float,
        reason: Callable[[_Freed], QueueFullError | None],
        *,
        has_places: bool,
    ) -> None:
        """Return once there is no reason any more."""
        priority = request.scheduling.priority
        if self._limits.overload == "refuse":
            if (refusal := reason(_NOTHING)) is not None:
                self._make_room(priority, reason, refusal)
            return
        turn = (not has_places, -priority, next(self._num_arrivals))
        while (refusal := reason(_NOTHING)) is not None or self._is_behind(turn):
            await self._wait(request, turn, arrival_s, refusal)

    def _make_room(
        self, priority: int, reason: Callable[[_Freed], QueueFullError | None], refusal: QueueFullError
    ) -> None:
        """End as many less urgent requests without a token as it takes; none if that would not be enough.

        Raises:
            QueueFullError: it would not.
        """
        waiting = [g for g in self._generations() if g.scheduling.priority < priority and not g.started]
        waiting.sort(key=lambda g: (g.scheduling.priority, -g.arrival_s))
        freed, victims = _NOTHING, list[Generation]()
        while reason(freed) is not None:
            if len(victims) == len(waiting):
                raise refusal
            victims.append(victim := waiting[len(victims)])
            num_tokens = sum(len(choice.prompt_ids) for choice in victim.choices)
            freed = _Freed(freed.requests + len(victim.choices), freed.tokens + num_tokens)
        for victim in victims:
            message = (
                f"a more urgent request took the place of this one, whose priority is {victim.scheduling.priority}; "
                f"retry later, or send a higher priority"
            )
            self.gate.withdrawn(len(victim.choices), self._clock())
            self._send_away(victim, QueueFullError(message, refusal.retry_after_s, refusal.position))

    def _is_behind(self, turn: _Turn) -> bool:
        """Whether somebody waits here whose turn comes first."""
        self._drop_gone()
        return bool(self._line) and self._line[0][0] < turn

    async def _wait(
        self, request: GenerationRequest, turn: _Turn, arrival_s: float, refusal: QueueFullError | None
    ) -> None:
        """Wait until it may be this one's turn; whoever is woken for nothing waits again."""
        num_bytes = sum(len(p) if isinstance(p, str) else _BYTES_PER_ID * len(p) for p in request.prompts)
        if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
            raise refusal or QueueFullError("too much text waits for a place; retry later", retry_after_s=1)
        wishes = request.scheduling
        own = (wishes.queue_timeout_s, wishes.timeout_s)
        limits = (*own, self._limits.queue_timeout_s, self._limits.request_timeout_s)
        limit_s = min((limit for limit in limits if limit is not None), default=None)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (turn, place))
        self._num_waiting_bytes += num_bytes
        try:
            async with asyncio.timeout(
                None if limit_s is None else max(arrival_s + limit_s - self._clock(), 0)
            ):
                await place
        except TimeoutError:
            raise RequestError(
                f"the request waited {limit_s:g} s for a place in the queue, which is its limit; retry later, or raise "
                f"queue_timeout",
                code="queue_timeout",
                status=503,
            ) from None
        finally:
            self._num_waiting_bytes -= num_bytes
            place.cancel()
        self._check_open()

    def _wake_next(self) -> None:
        self._drop_gone()
        if self._line:
            heapq.heappop(self._line)[1].set_result(None)

    def _drop_gone(self) -> None:
        while self._line and self._line[0][1].done():
            heapq.heappop(self._line)
