"""`RequestStory`: what became of one request, taken from the records of the decision log one after the other."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from .cache_miss import CacheMiss
from .decision_log import Arrived, DecisionRecord, Left, PassRecord, Retraction, Settled
from .verdict import AddReqResult, Reason, Verdict


class Act(enum.StrEnum):
    """What a verdict meant for the request."""

    WAITED = "waited"
    STARTED = "started"
    COMPUTED = "computed"
    HELD_UP = "held up"


class Decision(NamedTuple):
    """Equal decisions of consecutive passes are one episode.

    Attributes:
        act, reason: see there.
        behind: the request at which those passes ended; "" if none.
    """

    act: Act
    reason: Reason
    behind: str = ""


@dataclasses.dataclass(slots=True)
class Episode:
    """One line of the story: an event, or a run of passes that decided the same.

    Attributes:
        cause: what it is.
        first_s, last_s: times of its first and last record.
        first_step, last_step: of the plans that came out of its passes; 0 if none did.
        num_passes: how many.
        num_tokens: prompt tokens computed in it.
        verdict: the last one of the request's own.
    """

    cause: Arrived | Decision | CacheMiss | Retraction | Left
    first_s: float
    last_s: float
    first_step: int = 0
    last_step: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    verdict: Verdict | None = None


class RequestStory:
    """The life of one request as far as its records were there to be taken.

    Attributes:
        rid: whose.
        episodes: in order of time.
        arrived, left: None where not recorded.
        waiting_since_s: since when it waits; None while it runs, and when it has ended.
        waited_s: seconds of waiting that are over.
        num_retractions: how often it lost its place.
    """

    __slots__ = (
        "arrived",
        "episodes",
        "left",
        "num_retractions",
        "rid",
        "waited_s",
        "waiting_since_s",
    )

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.episodes: list[Episode] = []
        self.arrived: Arrived | None = None
        self.left: Left | None = None
        self.waiting_since_s: float | None = None
        self.waited_s = 0.0
        self.num_retractions = 0

    @property
    def is_known(self) -> bool:
        """Whether any record was about it."""
        return bool(self.episodes)

    def take(self, record: DecisionRecord) -> None:
        """Take the next record; most are about others."""
        match record:
            case Arrived(rid=self.rid):
                self.arrived = record
                self.waiting_since_s = record.now_s
                self.episodes.append(Episode(record, record.now_s, record.now_s))
            case PassRecord():
                self._take_pass(record)
            case Settled():
                for left in record.left:
                    if left.rid == self.rid:
                        self._end(left, record.now_s)

    def _end(self, left: Left, now_s: float) -> None:
        self._stop_waiting(now_s)
        self.left = left
        self.episodes.append(Episode(left, now_s, now_s))

    def _take_pass(self, record: PassRecord) -> None:
        was_waiting = self.waiting_since_s is not None
        for retraction in record.retractions:
            if retraction.rid == self.rid:
                self.num_retractions += 1
                self.waiting_since_s = record.now_s
                self.episodes.append(Episode(retraction, record.now_s, record.now_s, record.step_id))
        verdict = next((each for each in record.verdicts if each.rid == self.rid), None)
        if verdict is not None and verdict.result is AddReqResult.CONTINUE:
            self._stop_waiting(record.now_s)
            self._decide(Decision(Act.STARTED, verdict.reason), record, verdict)
            for miss in record.cache_misses:
                if miss.rid == self.rid:
                    self.episodes.append(Episode(miss, record.now_s, record.now_s, record.step_id))
        elif verdict is not None:
            self._wait(verdict.reason, "", record, verdict)
        elif was_waiting and record.rest_reason is not None:
            self._wait(record.rest_reason, record.rest_behind, record, None)
        elif was_waiting and record.num_grammar:
            self._wait(Reason.GRAMMAR_PENDING, "", record, None)
        for verdict in record.continued:
            if verdict.rid == self.rid:
                act = Act.COMPUTED if verdict.result is AddReqResult.CONTINUE else Act.HELD_UP
                self._decide(Decision(act, verdict.reason), record, verdict)

    def _wait(self, reason: Reason, behind: str, record: PassRecord, verdict: Verdict | None) -> None:
        if self.waiting_since_s is None:  # its arrival is forgotten
            self.waiting_since_s = record.now_s
        self._decide(Decision(Act.WAITED, reason, behind), record, verdict)

    def _stop_waiting(self, now_s: float) -> None:
        if self.waiting_since_s is not None:
            self.waited_s += now_s - self.waiting_since_s
            self.waiting_since_s = None

    def _decide(self, decision: Decision, record: PassRecord, verdict: Verdict | None) -> None:
        """Begin an episode, or go on with the last one if it is the same."""
        episode = self.episodes[-1] if self.episodes else None
        if episode is None or episode.cause != decision:
            episode = Episode(decision, record.now_s, record.now_s, record.step_id)
            self.episodes.append(episode)
        episode.last_s = record.now_s
        episode.last_step = record.step_id or episode.last_step
        episode.first_step = episode.first_step or record.step_id
        episode.num_passes += 1
        episode.verdict = verdict or episode.verdict
        if verdict is not None and decision.act in (Act.STARTED, Act.COMPUTED):
            episode.num_tokens += verdict.extend_len
