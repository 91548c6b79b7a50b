"""`Suspects`: which requests may have killed the process that was just lost, and what becomes of them.

A request is suspect if it was with the scheduler and got on by fewer than `MIN_PROGRESS_TOKENS` since it had been
submitted: what kills a process does so again at the same place, while the others move on. Suspect once means nothing;
most losses are nobody's fault. Suspect twice in a row:

- If it is the only one, it is guilty: it gets an error, and is not submitted a third time.
- If there are several, they are tried: submitted one after the other, each when the one before it has got on or ended,
  while everybody else runs. A loss during a trial has a single suspect.

So a request that kills its process is found at the second loss, or at the third if others began together with it, and
none of those pays for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .request_log import LoggedRequest

MIN_PROGRESS_TOKENS: Final = 16
_MAX_STRIKES: Final = 2


class Suspects:
    """Strikes are counted in the requests themselves; here is who is on trial."""

    def __init__(self) -> None:
        self._struck: list[LoggedRequest] = []  # at the losses since the last verdict
        self._on_trial: list[LoggedRequest] = []  # the first of them is submitted

    @property
    def num_on_trial(self) -> int:
        """How many are tried, or wait for it."""
        return len(self._on_trial)

    def lost(self, live: Iterable[LoggedRequest]) -> None:
        """A process is lost, and with it all that was sent."""
        for request in live:
            if request.is_sent:
                request.is_sent = False
                if request.num_new_tokens < MIN_PROGRESS_TOKENS:
                    request.num_strikes += 1
                    self._struck.append(request)
                else:
                    request.num_strikes = 0

    def judge(self, live: list[LoggedRequest]) -> list[LoggedRequest]:
        """Those of the live requests that are guilty of the last loss; who else is suspect is tried from now on."""
        suspects = [each for each in self._struck if each.num_strikes >= _MAX_STRIKES]
        self._struck = []
        struck = [each for each in suspects if each in live]
        # One whose client has left meanwhile may have been the cause as well: who is left is not alone then.
        if len({request.generation for request in suspects}) == 1:
            self._on_trial = [request for request in self._on_trial if request not in struck]
            return struck
        self._on_trial += [request for request in struck if request not in self._on_trial]
        return []

    def to_submit(self, live: list[LoggedRequest]) -> list[LoggedRequest]:
        """Those of the live requests that the new process gets now: all but those who wait for their trial."""
        waiting = set(self._on_trial[1:])
        return [request for request in live if request not in waiting]

    def next_to_try(self, request: LoggedRequest, *, ended: bool) -> LoggedRequest | None:
        """Called with a request of which there is news: who is to be submitted now, if anybody."""
        if request not in self._on_trial:
            return None
        was_tried = request is self._on_trial[0]
        if not ended and not (was_tried and request.num_new_tokens >= MIN_PROGRESS_TOKENS):
            return None
        request.num_strikes = 0
        self._on_trial.remove(request)
        return self._on_trial[0] if was_tried and self._on_trial else None
