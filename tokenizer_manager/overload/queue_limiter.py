"""`QueueLimiter`: how many requests and prompt tokens wait in the scheduler, and whether more fit.

It only counts. `OverloadControl` decides what happens to a request that does not fit.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from typing import Final

from ...runtime.errors import QueueFullError, RequestError
from ...runtime.scheduler_report import SchedulerReport
from ..request_log import LoggedRequest

_MAX_RETRY_AFTER_S: Final = 60
_NUM_FINISH_TIMES: Final = 64
_FINISH_WINDOW_S: Final = 30.0
BACKGROUND_PER_ROW: Final = 4
"""Enough lines that a scheduler always finds one for a free row, and few enough that their prompts take no memory."""


class QueueLimiter:
    """Counts waiting requests and their prompt tokens.

    The scheduler's reports are up to half a second old, so requests sent since the last report are counted too. Free
    rows of the request pool count as room only if no request waited at the time of the report (otherwise memory is the
    bottleneck). Tokens are counted exactly, from the time when a request is sent to its first token.

    Requests of the background are outside these limits: `BACKGROUND_PER_ROW` of them may be live for each row, and they
    take neither a place in the queue nor a row from others.

    Attributes:
        num_unstarted: live requests without a token yet; those of the background left out.
    """

    def __init__(
        self, max_queued_requests: int, max_running_requests: int, max_queued_tokens: float = math.inf
    ) -> None:
        self.num_unstarted = 0
        self._max_queued = max_queued_requests
        self._max_running = max_running_requests
        self._max_tokens = max_queued_tokens
        self._sent_s: deque[float] = deque()
        self._withdrawn_s: deque[float] = deque()
        self._finished_s: deque[float] = deque(maxlen=_NUM_FINISH_TIMES)
        self._num_running = 0
        self._num_queued = 0
        self._num_reserved = 0
        self._num_tokens = 0
        self._num_background = self._num_background_reserved = 0

    # ------------------------------------------------------------ limits

    @contextlib.contextmanager
    def reserve(self, num_new: int, *, background: bool = False) -> Iterator[None]:
        """Count requests as waiting while they are tokenized, so that tokenization is bounded too."""
        num_background = num_new if background else 0
        self._num_reserved += num_new - num_background
        self._num_background_reserved += num_background
        try:
            yield
        finally:
            self._num_reserved -= num_new - num_background
            self._num_background_reserved -= num_background

    def reason_against_background(self, num_new: int, now_s: float) -> QueueFullError | None:
        """As `reason_against`, for requests of the background.

        Raises:
            RequestError: there are more than ever fit.
        """
        most = BACKGROUND_PER_ROW * self._max_running
        if num_new > most:
            raise RequestError(
                f"the request asks for {num_new} answers, but at most {most} flex requests run or wait; send fewer at "
                "once",
                param="n",
                code="invalid_value",
            )
        num_live = self._num_background + self._num_background_reserved
        excess = num_live + num_new - most
        if excess <= 0:
            return None
        return QueueFullError(
            f"{num_live} flex requests run or wait, the limit is {most} ({BACKGROUND_PER_ROW} for each of "
            "--max-running-requests); retry later",
            self._seconds_for(excess, now_s),
            num_live,
        )

    def check_possible(self, num_new: int, param: str = "n") -> None:
        """Refuse more requests at once than can ever run and wait.

        Args:
            num_new: scheduler requests of one request.
            param: the field that the error names: of inputs, or "n" for answers.

        Raises:
            RequestError: there are more.
        """
        if num_new > self._max_queued + self._max_running:
            what = "answers (prompts times n or best_of)" if param == "n" else f"results ({param})"
            raise RequestError(
                f"the request asks for {num_new} {what}, but at most {self._max_running} run and {self._max_queued} "
                "wait; send fewer at once or raise --max-queued-requests",
                param=param,
                code="invalid_value",
            )

    def reason_against(
        self, num_new: int, num_live: int, now_s: float, num_freed: int = 0
    ) -> QueueFullError | None:
        """Why `num_new` more requests do not fit into the queue; None if they fit.

        Args:
            num_new: scheduler requests to be sent.
            num_live: requests sent and not answered, of both classes; exact, while the last report may be outdated.
            now_s: the time.
            num_freed: answer as if this many had been withdrawn.
        """
        num_live -= num_freed + self._num_background
        num_withdrawn = len(self._withdrawn_s) + num_freed
        waiting = min(max(self._num_queued + len(self._sent_s) - num_withdrawn, 0), num_live)
        running = min(self._num_running, num_live - waiting)
        free_rows = self._max_running - running if self._num_queued == 0 else 0
        waiting += self._num_reserved
        excess = waiting + num_new - self._max_queued - free_rows
        if excess <= 0:
            return None
        more = f" and {free_rows} that may start at once" if free_rows > 0 else ""
        return QueueFullError(
            f"{waiting} request{' waits' if waiting == 1 else 's wait'}, the limit is {self._max_queued}{more}; retry "
            "later, or raise --max-queued-requests",
            self._seconds_for(excess, now_s),
            waiting,
        )

    def reason_against_tokens(
        self, num_tokens: int, now_s: float, num_freed: int = 0
    ) -> QueueFullError | None:
        """As `reason_against`, for prompt tokens. If none wait, any number fits: it never would otherwise."""
        num_waiting = self._num_tokens - num_freed
        if num_waiting == 0 or num_waiting + num_tokens <= self._max_tokens:
            return None
        share = min((num_waiting + num_tokens - self._max_tokens) / num_waiting, 1.0)
        return QueueFullError(
            f"{num_waiting} tokens of prompts wait, the limit is {self._max_tokens}, and this request has "
            f"{num_tokens}; retry later, or raise --max-queued-tokens",
            self._seconds_for(math.ceil(share * self.num_unstarted), now_s),
            self.num_unstarted,
        )

    # ------------------------------------------------------------ events

    def ended(self, logged: LoggedRequest, now_s: float) -> None:
        """A request was answered or aborted, with or without a first token."""
        if logged.message.background:
            self._num_background -= 1
        elif logged.choice.first_token_s is None:
            self.started(len(logged.choice.prompt_ids))
        self.finished(now_s)

    def sent(self, now_s: float, num_tokens: int = 0, *, background: bool = False) -> None:
        """A request with a prompt of `num_tokens` tokens is sent to the scheduler."""
        if background:
            self._num_background += 1
            return
        self._sent_s.append(now_s)
        self.num_unstarted += 1
        self._num_tokens += num_tokens

    def started(self, num_tokens: int) -> None:
        """A request that is not of the background has its first token, or ended without one."""
        self.num_unstarted -= 1
        self._num_tokens -= num_tokens

    def restarted(self, num_live: int, now_s: float) -> None:
        """A new scheduler gets all live requests at once; reports of the one before it no longer hold."""
        self._num_running = self._num_queued = 0
        self._sent_s = deque([now_s] * (num_live - self._num_background))
        self._withdrawn_s.clear()

    def finished(self, now_s: float) -> None:
        """A request was answered or aborted."""
        self._finished_s.append(now_s)

    def withdrawn(self, num_requests: int, now_s: float) -> None:
        """Waiting requests were aborted: there is room at once, not only with the next report."""
        self._withdrawn_s.extend([now_s] * num_requests)

    def reported(self, report: SchedulerReport) -> None:
        """Take the scheduler's own counts from its report."""
        self._num_running = report.num_running_reqs - report.num_background_running_reqs
        self._num_queued = report.num_queue_reqs - report.num_background_queue_reqs
        for times in (self._sent_s, self._withdrawn_s):
            while times and times[0] < report.sent_s:
                times.popleft()

    def _seconds_for(self, num_requests: int, now_s: float) -> int:
        """Estimated time until `num_requests` more have finished, at the rate of the last ones."""
        times = self._finished_s
        while times and now_s - times[0] > _FINISH_WINDOW_S:
            times.popleft()
        if len(times) < 2:
            return 1
        rate = len(times) / max(now_s - times[0], 1e-3)
        return min(max(math.ceil(num_requests / rate), 1), _MAX_RETRY_AFTER_S)
