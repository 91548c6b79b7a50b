"""`Suspects`: which requests may have killed the process that was just lost, and what becomes of them.

A request is suspect if a process was lost while it ran and it had got on by fewer than `MIN_PROGRESS_TOKENS` since it
had been submitted: what kills a process does so again at the same place, while the others move on. Who had only waited
in the scheduler's queue, and not just come, is suspect only if nobody ran. Suspect once means nothing; most losses are
nobody's fault. Suspect twice in a row:

- If it is the only one, it is guilty: it gets an error, and is not submitted a third time.
- If there are several, they are tried: submitted in groups one after the other, each when the one before it has got on
  or ended, while everybody else runs. A loss during a trial is that group's doing. It is divided again, until one is
  left: that one is guilty, and whoever still waits for a trial is let go.

The groups are as large as the restarts that are left allow: halves if there are plenty; one request each if the server
survives one more loss only, which then finds the guilty one for sure. There are at most `_MAX_GROUPS`.
So a request that kills its process is found at the second loss, or at the third or a later one if others began
together with it, and none of those pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

from .request_log import LoggedRequest

MIN_PROGRESS_TOKENS: Final = 16
MAX_TRIAL_S: Final = 30.0
"""After so long the next group is let in, too, and is larger: who cannot get on shall not hold up the others."""
_MAX_STRIKES: Final = 2
_MAX_GROUPS: Final = 32

_Ordered = dict[LoggedRequest, None]


class Suspects:
    """Strikes are counted in the requests themselves; here is who is on trial."""

    def __init__(self) -> None:
        self._struck: list[LoggedRequest] = []  # at the losses since the last verdict
        self._tried: _Ordered = {}  # submitted
        self._held: list[_Ordered] = []  # wait for their trial; the most suspect ones are the last set
        self._restarts_left = 0
        self._group_began_s = 0.0

    @property
    def num_on_trial(self) -> int:
        """How many are tried, or wait for it."""
        return len(self._tried) + sum(map(len, self._held))

    def lost(self, live: Iterable[LoggedRequest], started: Collection[str] | None = None) -> None:
        """A process is lost, and with it all that was sent.

        Args:
            live: all requests.
            started: the ids of those that the scheduler had begun to work on or to take in; None: nobody knows.
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
                request.num_strikes = 0
        tried = [request for request in stuck if request in self._tried]
        for request in tried or stuck:
            request.num_strikes += 1
            self._struck.append(request)

    def judge(self, live: Iterable[LoggedRequest], restarts_left: int, now_s: float) -> list[LoggedRequest]:
        """Those of the live requests that are guilty of the last loss; who else is suspect is tried from now on.

        Args:
            live: all requests.
            restarts_left: how many more losses the server survives.
            now_s: the time.
        """
        self._restarts_left = restarts_left
        self._group_began_s = now_s  # of whoever is on trial: it has been submitted again
        suspects = [each for each in self._struck if each.num_strikes >= _MAX_STRIKES]
        self._struck = []
        alive = set(live)
        struck = [each for each in suspects if each in alive]
        # One whose client has left meanwhile may have been the cause as well: who is left is not alone then.
        if len({request.generation for request in suspects}) == 1:
            self._let_go()
            return struck
        if struck:
            others = {request: None for request in self._tried if request not in struck}  # had not begun
            self._held += [each for each in (others, dict.fromkeys(struck)) if each]
            self._tried = {}
            self._try_more(now_s)
        return []

    def to_submit(self, live: Iterable[LoggedRequest]) -> list[LoggedRequest]:
        """Those of the live requests that the new process gets now: all but those who wait for their trial."""
        held = {request for each in self._held for request in each}
        return [request for request in live if request not in held]

    def next_to_try(self, request: LoggedRequest, now_s: float, *, ended: bool) -> list[LoggedRequest]:
        """Called with a request of which there is news: who is to be submitted now."""
        if ended:
            for each in self._held:
                each.pop(request, None)
            self._held = [each for each in self._held if each]
        if request not in self._tried or not (ended or request.num_new_tokens >= MIN_PROGRESS_TOKENS):
            return []
        request.num_strikes = 0
        del self._tried[request]
        return [] if self._tried else self._try_more(now_s)

    def overdue(self, now_s: float) -> list[LoggedRequest]:
        """Who is to be submitted now because the trial of others takes too long."""
        if not self._held or now_s - self._group_began_s <= MAX_TRIAL_S:
            return []
        return self._try_more(now_s)

    def _try_more(self, now_s: float) -> list[LoggedRequest]:
        """The next group; siblings are tried together, since they pay together."""
        if not self._held:
            return []
        suspects = self._held[-1]
        waiting = list(dict.fromkeys(request.generation for request in suspects))
        num_tried = len({request.generation for request in self._tried})
        chosen = set(waiting[: max(group_size(len(waiting), self._restarts_left), num_tried)])
        group = [request for request in suspects if request.generation in chosen]
        for request in group:
            del suspects[request]
        if not suspects:
            self._held.pop()
        self._tried |= dict.fromkeys(group)
        self._group_began_s = now_s
        return group

    def _let_go(self) -> None:
        """What the others were suspected of has its cause. If it has two, they are suspect again with the next loss."""
        for each in (self._tried, *self._held):
            for request in each:
                request.num_strikes = min(request.num_strikes, _MAX_STRIKES - 1)
        self._tried, self._held = {}, []


def group_size(num: int, num_losses: int) -> int:
    """How many of `num` suspects are tried at once, so that `num_losses` more losses find the guilty one."""
    num_groups = math.ceil(math.pow(num, 1.0 / max(num_losses, 1)) - 1e-9)
    return math.ceil(num / min(max(num_groups, 2), _MAX_GROUPS))
