"""`OverloadControl`: what happens to a request that does not fit into the queue.

    --overload refuse   it is refused (429), unless requests of lower priority wait: those are aborted instead, lowest
                        priority first, then latest arrival; a request that has a token is never aborted
    --overload queue    it waits here, before tokenization, highest priority first; for routers that take a 429 for a
                        broken server. Its time limits apply. Beyond a bound on the waiting text it is refused

`QueueLimiter` counts what waits in the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

import msgspec

from ...runtime.config.server_config import OverloadMode
from ...runtime.errors import QueueFullError, RequestError
from ..aborter import Aborter
from ..engine_state import EngineState
from ..generation import Generation, GenerationRequest
from ..request_log import RequestLog
from .queue_limiter import QueueLimiter

_MAX_WAITING_BYTES: Final = (
    1 << 30
)  # of the prompts that wait under --overload queue: 64 of the largest bodies
_BYTES_PER_ID: Final = 40  # an int in a list


class _Freed(NamedTuple):
    """Requests and prompt tokens that aborting some requests would take off the queue."""

    requests: int
    tokens: int


_NOTHING: Final = _Freed(0, 0)
_Turn = tuple[bool, int, int]
"""Sorts waiting requests: first those that only lack room for tokens, then by priority, then by arrival."""


class OverloadLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on waiting requests.

    Attributes:
        max_queued_requests: that wait in the scheduler.
        max_queued_tokens: of their prompts.
        overload: what happens to requests beyond these.
        queue_timeout_s: the server's limit on the time to start a request; None for none.
        request_timeout_s: the server's limit on the time to finish a request; None for none.
    """

    max_queued_requests: int
    max_queued_tokens: int
    overload: OverloadMode = "refuse"
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None


class OverloadControl:
    """Admits requests while there is room."""

    def __init__(
        self,
        limits: OverloadLimits,
        limiter: QueueLimiter,
        log: RequestLog,
        *,
        engine: EngineState,
        aborter: Aborter,
        clock: Callable[[], float],
    ) -> None:
        """Take the parts.

        Args:
            limits: on waiting requests.
            limiter: counts them.
            log: the live requests.
            engine: whether requests are still accepted once there is room.
            aborter: ends requests of lower priority.
            clock: CLOCK_MONOTONIC.
        """
        self._limits = limits
        self._limiter = limiter
        self._log = log
        self._engine = engine
        self._aborter = aborter
        self._clock = clock
        self._waiters: list[tuple[_Turn, asyncio.Future[None]]] = []  # a heap
        self._num_arrivals = itertools.count()
        self._num_waiting_bytes = 0

    @contextlib.asynccontextmanager
    async def admit(self, request: GenerationRequest, arrival_s: float) -> AsyncIterator[None]:
        """Reserve queue places for a request while it is tokenized; under `--overload queue`, wait for them.

        Raises:
            QueueFullError: the queue is full.
            RequestError: the queue could never hold it, or its time limit has passed.
        """
        num_new = len(request.prompts) * request.n
        if request.probe:
            yield
            return
        if request.scheduling.background:  # it waits in the scheduler, and never before others here
            if (refusal := self._limiter.reason_against_background(num_new, self._clock())) is not None:
                raise refusal
            with self._limiter.reserve(num_new, background=True):
                yield
            return
        self._limiter.check_possible(num_new, request.prompt_param if request.poolings else "n")
        await self._wait_for_room(
            request,
            arrival_s,
            lambda freed: self._limiter.reason_against(
                num_new, len(self._log), self._clock(), freed.requests
            ),
            has_place=False,
        )
        with self._limiter.reserve(num_new):
            self.wake_next()  # there may be room for more
            yield
        self.wake_next()

    async def admit_tokens(self, request: GenerationRequest, num_tokens: int, arrival_s: float) -> None:
        """As `admit`, for the tokens of all prompts of an admitted request.

        Raises:
            QueueFullError, RequestError: as for `admit`.
        """
        if not (request.probe or request.scheduling.background):
            await self._wait_for_room(
                request,
                arrival_s,
                lambda freed: self._limiter.reason_against_tokens(num_tokens, self._clock(), freed.tokens),
                has_place=True,
            )

    def wake_next(self) -> None:
        """Let the next waiting request check for room: a request has ended, or the limiter has new counts."""
        self._drop_cancelled()
        if self._waiters:
            heapq.heappop(self._waiters)[1].set_result(None)

    def close(self) -> None:
        """Wake all waiting requests: the engine accepts none any more, and each finds that out."""
        while self._waiters:
            self.wake_next()

    # ------------------------------------------------------------ internals

    async def _wait_for_room(
        self,
        request: GenerationRequest,
        arrival_s: float,
        reason: Callable[[_Freed], QueueFullError | None],
        *,
        has_place: bool,
    ) -> None:
        """Return once `reason` returns None."""
        priority = request.scheduling.priority
        if self._limits.overload == "refuse":
            if (refusal := reason(_NOTHING)) is not None:
                self._abort_less_urgent(priority, reason, refusal)
            return
        turn = (not has_place, -priority, next(self._num_arrivals))
        while (refusal := reason(_NOTHING)) is not None or self._has_earlier(turn):
            await self._wait(request, turn, arrival_s, refusal)

    def _abort_less_urgent(
        self, priority: int, reason: Callable[[_Freed], QueueFullError | None], refusal: QueueFullError
    ) -> None:
        """Abort as many requests of lower priority without a token as needed; none if they are not enough.

        Raises:
            QueueFullError: they are not enough.
        """
        waiting = [
            g
            for g in self._log.generations
            if g.scheduling.priority < priority and not (g.started or g.scheduling.background)
        ]
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
                f"a more urgent request took the queue place of this one (priority {victim.scheduling.priority}); "
                f"retry later, or send a higher priority"
            )
            self._limiter.withdrawn(len(victim.choices), self._clock())
            error = QueueFullError(message, refusal.retry_after_s, refusal.position)
            self._aborter.fail(victim, error, "made room for a more urgent request")

    def _has_earlier(self, turn: _Turn) -> bool:
        """Whether a request waits here that comes before this turn."""
        self._drop_cancelled()
        return bool(self._waiters) and self._waiters[0][0] < turn

    async def _wait(
        self, request: GenerationRequest, turn: _Turn, arrival_s: float, refusal: QueueFullError | None
    ) -> None:
        """Wait to be woken when there may be room; the caller checks, and waits again if there is none."""
        num_bytes = sum(len(p) if isinstance(p, str) else _BYTES_PER_ID * len(p) for p in request.prompts)
        if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
            raise refusal or QueueFullError("too much text waits for a place; retry later", retry_after_s=1)
        scheduling = request.scheduling
        own = (scheduling.queue_timeout_s, scheduling.timeout_s)
        limits = (*own, self._limits.queue_timeout_s, self._limits.request_timeout_s)
        limit_s = min((limit for limit in limits if limit is not None), default=None)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (turn, woken))
        self._num_waiting_bytes += num_bytes
        try:
            async with asyncio.timeout(
                None if limit_s is None else max(arrival_s + limit_s - self._clock(), 0)
            ):
                await woken
        except TimeoutError:
            raise RequestError(
                f"the request waited {limit_s:g} s for a place in the queue, which is its limit; retry later, or raise "
                f"queue_timeout",
                code="queue_timeout",
                status=503,
            ) from None
        finally:
            self._num_waiting_bytes -= num_bytes
            woken.cancel()
        self._engine.check_accepting()

    def _drop_cancelled(self) -> None:
        while self._waiters and self._waiters[0][1].done():
            heapq.heappop(self._waiters)
