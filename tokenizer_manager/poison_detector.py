"""`PoisonDetector`: finds the requests that crash a process, among all that ran when one was lost.

A request is *suspect* at a loss if it ran and had fewer than `MIN_PROGRESS_TOKENS` new tokens since it was submitted: a
poison request crashes at the same place again, while the others advance. A request that only waited in the scheduler's
queue, and had not just arrived, is suspect only if no request ran. One loss has no consequence: most are caused by no
request. After two consecutive losses with the same suspects:

- A single suspect is poison: it gets an error, and is not submitted a third time.
- Several suspects are quarantined: they are submitted in groups, each when the group before it has advanced or ended,
  while all other requests run. A loss while a group runs is caused by that group, which is divided again until one
  request is left. That one is poison, and the requests that are still quarantined are released.

The size of a group follows from the restarts that are left: halves if there are plenty; single requests if the server
survives one more loss only, which then finds the poison request for sure. There are at most `_MAX_GROUPS` groups.
A request that crashes its process is thus found at the second loss, or at the third or a later one if it started
together with others; none of the others is failed for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

from .request_log import LoggedRequest

MIN_PROGRESS_TOKENS: Final = 16
MAX_GROUP_S: Final = 30.0
"""After this time the next group is submitted as well, and is larger: a request without progress must not block it."""
_MAX_CRASHES: Final = 2
_MAX_GROUPS: Final = 32

_Group = dict[LoggedRequest, None]
"""An ordered set."""


class PoisonDetector:
    """Holds the quarantine; `LoggedRequest.num_crashes` counts the losses of each request."""

    def __init__(self) -> None:
        self._suspects: list[LoggedRequest] = []  # of the losses since the last `isolate`
        self._running: _Group = {}  # quarantined and submitted
        self._waiting: list[
            _Group
        ] = []  # quarantined and not submitted; the last group is the most suspect one
        self._restarts_left = 0
        self._group_began_s = 0.0

    @property
    def num_quarantined(self) -> int:
        """Requests in quarantine, submitted or not."""
        return len(self._running) + sum(map(len, self._waiting))

    def lost(self, live: Iterable[LoggedRequest], started: Collection[str] | None = None) -> None:
        """A process is lost, with every request that was sent to it.

        Args:
            live: all requests.
            started: ids of the requests that the scheduler had started or was receiving; None if unknown.
        """
        sent = [request for request in live if request.is_sent]
        ran = [each for each in sent if started is None or each.num_new_tokens or each.rid in started]
        for request in sent:
            request.is_sent = False
        stuck = []
        for request in ran or sent:
            if request.num_new_tokens < MIN_PROGRESS_TOKENS:
                stuck.append(request)
            else:
                request.num_crashes = 0
        quarantined = [request for request in stuck if request in self._running]
        for request in quarantined or stuck:
            request.num_crashes += 1
            self._suspects.append(request)

    def isolate(self, live: Iterable[LoggedRequest], restarts_left: int, now_s: float) -> list[LoggedRequest]:
        """The poison requests of the last loss; all choices of one generation. Other suspects are quarantined.

        Args:
            live: all requests.
            restarts_left: further losses that the server survives.
            now_s: the time.
        """
        self._restarts_left = restarts_left
        self._group_began_s = now_s  # the running group is submitted again
        suspects = [each for each in self._suspects if each.num_crashes >= _MAX_CRASHES]
        self._suspects = []
        alive = set(live)
        left = [each for each in suspects if each in alive]
        # A suspect that ended meanwhile may have been the cause: the only one left is then not proven to be it.
        if len({request.generation for request in suspects}) == 1:
            self._release()
            return left
        if left:
            others = {request: None for request in self._running if request not in left}  # had not started
            self._waiting += [each for each in (others, dict.fromkeys(left)) if each]
            self._running = {}
            self._take_group(now_s)
        return []

    def to_submit(self, live: Iterable[LoggedRequest]) -> list[LoggedRequest]:
        """The live requests that a new process gets now: all but the waiting ones of the quarantine."""
        waiting = {request for each in self._waiting for request in each}
        return [request for request in live if request not in waiting]

    def next_group(self, request: LoggedRequest, now_s: float, *, ended: bool) -> list[LoggedRequest]:
        """The requests to submit now that `request` has new tokens, or has ended."""
        if ended:
            for each in self._waiting:
                each.pop(request, None)
            self._waiting = [each for each in self._waiting if each]
        if request not in self._running or not (ended or request.num_new_tokens >= MIN_PROGRESS_TOKENS):
            return []
        request.num_crashes = 0
        del self._running[request]
        return [] if self._running else self._take_group(now_s)

    def overdue_group(self, now_s: float) -> list[LoggedRequest]:
        """The requests to submit now because the running group has taken longer than `MAX_GROUP_S`."""
        if not self._waiting or now_s - self._group_began_s <= MAX_GROUP_S:
            return []
        return self._take_group(now_s)

    def _take_group(self, now_s: float) -> list[LoggedRequest]:
        """The next group; the choices of a generation stay together, since one error fails all of them."""
        if not self._waiting:
            return []
        suspects = self._waiting[-1]
        generations = list(dict.fromkeys(request.generation for request in suspects))
        num_running = len({request.generation for request in self._running})
        chosen = set(generations[: max(group_size(len(generations), self._restarts_left), num_running)])
        group = [request for request in suspects if request.generation in chosen]
        for request in group:
            del suspects[request]
        if not suspects:
            self._waiting.pop()
        self._running |= dict.fromkeys(group)
        self._group_began_s = now_s
        return group

    def _release(self) -> None:
        """End the quarantine: the cause is found. A second cause makes its requests suspect at the next loss."""
        for each in (self._running, *self._waiting):
            for request in each:
                request.num_crashes = min(request.num_crashes, _MAX_CRASHES - 1)
        self._running, self._waiting = {}, []


def group_size(num: int, num_losses: int) -> int:
    """How many of `num` suspects a group has, so that `num_losses` more losses find the poison request."""
    num_groups = math.ceil(math.pow(num, 1.0 / max(num_losses, 1)) - 1e-9)
    return math.ceil(num / min(max(num_groups, 2), _MAX_GROUPS))
