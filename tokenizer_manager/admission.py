"""Admission at the door: may this request run at all, and may it wait now.

Whether it can ever run is `runtime/feasibility.py`'s answer, the one the scheduler relies on too. How many may wait
is counted here, where a refusal costs nothing yet.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from ..runtime.errors import RequestError
from ..runtime.feasibility import Capacity, max_new_tokens_for, reason_against
from ..runtime.messages import SchedulerReport
from ..runtime.model_files.tokenizer import Tokenizer
from ..runtime.sampling_params import SamplingParams

_MAX_RETRY_AFTER_S: Final = 60
_MAX_UTF8_BYTES: Final = 4
_NUM_FINISH_TIMES: Final = 64
_FINISH_WINDOW_S: Final = 30.0


class QueueFullError(RequestError):
    """Too many requests wait: 429 with `Retry-After`.

    Attributes:
        retry_after_s: when there should be room, from the measured rate at which requests finish.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, code="queue_full", status=429)
        self.retry_after_s = retry_after_s


def check_may_fit(text: str, tokenizer: Tokenizer, capacity: Capacity, prompt_param: str) -> None:
    """Refuse a text that has too many tokens however it is tokenised, before that is done.

    Raises:
        RequestError: it can never run.
    """
    longest = max_new_tokens_for(0, capacity) - 1  # one position is for the answer
    if len(text) * _MAX_UTF8_BYTES <= longest:
        return  # even with a token for each byte
    num_tokens = tokenizer.min_num_tokens(text)
    if num_tokens > longest:
        raise RequestError(
            f"{prompt_param} has {len(text)} characters, which are at least {num_tokens} tokens, but at most {longest} "
            f"fit together with an answer; shorten it or raise --max-model-len or --max-total-tokens",
            param=prompt_param,
            code="context_length_exceeded",
        )


def resolve_length(
    sampling: SamplingParams, prompt_len: int, capacity: Capacity, *, prompt_param: str, length_param: str
) -> SamplingParams:
    """`sampling` with `max_new_tokens` set, if prompt and answer fit.

    Args:
        sampling: verified.
        prompt_len: tokens of the prompt.
        capacity: of the scheduler.
        prompt_param, length_param: the request's fields, for the error.

    Raises:
        RequestError: such a request can never run.
    """
    if prompt_len == 0:
        message = f"{prompt_param} has no tokens; a prompt has at least one"
        raise RequestError(message, param=prompt_param, code="empty_prompt")
    asked = sampling.max_new_tokens
    longest = max_new_tokens_for(prompt_len, capacity)
    wanted = asked if asked is not None else max(1, longest)
    reason = reason_against(prompt_len, wanted, capacity)
    if reason is not None:
        if "[" in prompt_param:
            reason = reason.replace("the prompt", prompt_param, 1)
        # Beyond the longest possible answer it is the length that is wrong, unless no length would do.
        param = length_param if asked is not None and longest >= 1 else prompt_param
        raise RequestError(reason, param=param, code="context_length_exceeded")
    if sampling.min_new_tokens > wanted:
        message = (
            f"min_tokens is {sampling.min_new_tokens}, but only {wanted} tokens can be generated; lower it"
        )
        raise RequestError(message, param="min_tokens", code="invalid_value")
    return msgspec.structs.replace(sampling, max_new_tokens=wanted)


class QueueGate:
    """Bounds the requests that wait in the scheduler.

    The scheduler's reports lag behind by up to half a second, so those sent since the last report are counted too,
    and free rows of the request pool count as room only if nobody waited at that time (else memory is what lacks).
    """

    def __init__(self, max_queued_requests: int, max_running_requests: int) -> None:
        self._max_queued = max_queued_requests
        self._max_running = max_running_requests
        self._sent_s: deque[float] = deque()
        self._finished_s: deque[float] = deque(maxlen=_NUM_FINISH_TIMES)
        self._num_running = 0
        self._num_queued = 0
        self._num_held = 0

    @contextlib.contextmanager
    def hold(self, num_new: int, num_live: int, now_s: float) -> Iterator[None]:
        """Keep places for requests while they are tokenised, so that this has a bound too; else as `check`."""
        self.check(num_new, num_live, now_s)
        self._num_held += num_new
        try:
            yield
        finally:
            self._num_held -= num_new

    def check(self, num_new: int, num_live: int, now_s: float) -> None:
        """Refuse `num_new` requests if they would have to wait in a full queue.

        Args:
            num_new: scheduler requests to be sent.
            num_live: those sent and not answered; exact, while what the reports say may be over by now.
            now_s: the time.

        Raises:
            QueueFullError: come back later.
            RequestError: so many could never be taken at once.
        """
        if num_new > self._max_queued + self._max_running:
            raise RequestError(
                f"the request asks for {num_new} answers (prompts times n or best_of), but at most "
                f"{self._max_running} run and {self._max_queued} wait; send fewer at once or raise "
                f"--max-queued-requests",
                param="n",
                code="invalid_value",
            )
        waiting = min(self._num_queued + len(self._sent_s), num_live)
        running = min(self._num_running, num_live - waiting)
        free_rows = self._max_running - running if self._num_queued == 0 else 0
        waiting += self._num_held
        excess = waiting + num_new - self._max_queued - free_rows
        if excess > 0:
            raise QueueFullError(
                f"{waiting} requests wait, the limit is {self._max_queued}; retry later, or raise "
                f"--max-queued-requests",
                self._seconds_for(excess, now_s),
            )

    def sent(self, now_s: float) -> None:
        """One request went to the scheduler."""
        self._sent_s.append(now_s)

    def restarted(self, num_live: int, now_s: float) -> None:
        """A new scheduler gets all live requests at once; what the one before reported is no longer so."""
        self._num_running = self._num_queued = 0
        self._sent_s = deque([now_s] * num_live)

    def finished(self, now_s: float) -> None:
        """One request has been answered."""
        self._finished_s.append(now_s)

    def reported(self, report: SchedulerReport) -> None:
        """Take the scheduler's own counts, as of its report."""
        self._num_running = report.num_running_reqs
        self._num_queued = report.num_queue_reqs
        while self._sent_s and self._sent_s[0] < report.sent_s:
            self._sent_s.popleft()

    def _seconds_for(self, num_requests: int, now_s: float) -> int:
        """How long until so many more have finished, at the rate of the last ones."""
        times = self._finished_s
        while times and now_s - times[0] > _FINISH_WINDOW_S:
            times.popleft()
        if len(times) < 2:
            return 1
        rate = len(times) / max(now_s - times[0], 1e-3)
        return min(max(math.ceil(num_requests / rate), 1), _MAX_RETRY_AFTER_S)
