"""`RequestStory`: the history of one request, built from the records of the decision log one after the other."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final, NamedTuple

from ..records.decision_log import (
    Arrived,
    DecisionRecord,
    Finished,
    Handover,
    PassRecord,
    Retraction,
    Settled,
)
from ..records.verdict import AddReqResult, CacheMiss, Reason, Verdict


class Place(enum.Enum):
    """The last known state of the request; it determines which parts of a pass can concern it."""

    UNKNOWN = enum.auto()
    RECEIVING = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    GONE = enum.auto()


KV_IS_HERE: Final = ("received", "not received", "computed here", "loaded", "not loaded")
"""Events of a `Handover` after which a request waits as any other."""


class Beginning(NamedTuple):
    """The first facts about an unfinished request; the log may have dropped the record of its arrival.

    Attributes:
        arrived: equal to that record.
        grammar_s: when its grammar came; None if it did not, or none was needed.
        started_s: when it first got memory; None if it never did.
    """

    arrived: Arrived
    grammar_s: float | None = None
    started_s: float | None = None


class Forgotten(NamedTuple):
    """A time without records.

    Attributes:
        started_s: when the request first got memory in that time; None if it waited the whole time.
    """

    started_s: float | None


class Act(enum.StrEnum):
    """The effect of a verdict on the request."""

    WAITED = "waited"
    STARTED = "started"
    COMPUTED = "computed"
    HELD_UP = "held up"


class Decision(NamedTuple):
    """Equal decisions of consecutive passes are one episode.

    Attributes:
        act, reason: see `Act` and `Reason`.
        behind: the request at which those passes ended; "" if none.
    """

    act: Act
    reason: Reason
    behind: str = ""


@dataclasses.dataclass(slots=True)
class Episode:
    """One line of the story: an event, or consecutive passes with the same decision.

    Attributes:
        cause: the event or decision.
        first_s, last_s: times of its first and last record.
        first_step, last_step: first and last step planned by its passes; 0 if none was.
        num_passes: number of passes.
        num_tokens: prompt tokens computed in it.
        verdict: the last verdict about the request itself.
    """

    cause: Arrived | Forgotten | Decision | CacheMiss | Retraction | Finished | Handover
    first_s: float
    last_s: float
    first_step: int = 0
    last_step: int = 0
    num_passes: int = 0
    num_tokens: int = 0
    verdict: Verdict | None = None


class RequestStory:
    """The history of one request, from the records that were taken.

    The scheduler's loop waits while a live log is read, so a record that cannot concern the request costs almost
    nothing.

    Attributes:
        rid: of the request.
        episodes: in order of time.
        arrived, left: None if not recorded.
        forgotten: set if the first records were dropped and a `Beginning` replaces them.
        waiting_since_s: start of the current wait; None while it runs, and when it has ended.
        waited_s: seconds of completed waits.
        was_started: whether it ever got memory.
        num_retractions: how often it was retracted.
        num_tiles: tiles that were encoded for it.
        grammar_s: seconds from its arrival until its grammar was compiled; None if it did not wait for one, or still
            does.
        ended_by_grammar: whether its grammar was complete.
    """

    __slots__ = (
        "_needs_grammar",
        "_place",
        "arrived",
        "ended_by_grammar",
        "episodes",
        "forgotten",
        "grammar_s",
        "left",
        "num_retractions",
        "num_tiles",
        "rid",
        "waited_s",
        "waiting_since_s",
        "was_started",
    )

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self._clear()

    def _clear(self) -> None:
        self.episodes: list[Episode] = []
        self.arrived: Arrived | None = None
        self.forgotten: Forgotten | None = None
        self.left: Finished | None = None
        self.waiting_since_s: float | None = None
        self.waited_s = 0.0
        self.was_started = False
        self.num_retractions = self.num_tiles = 0
        self.grammar_s: float | None = None
        self.ended_by_grammar = False
        self._needs_grammar = False
        self._place = Place.UNKNOWN

    @property
    def is_known(self) -> bool:
        """Whether any record concerned the request."""
        return bool(self.episodes)

    def begin(self, beginning: Beginning, first_s: float) -> None:
        """Begin with facts from another source; the records from `first_s` on follow."""
        self._arrive(beginning.arrived)
        if beginning.grammar_s is not None and beginning.grammar_s < first_s:
            self._take_grammar(beginning.grammar_s)
        started_s = beginning.started_s
        if started_s is not None and started_s < first_s:
            self._stop_waiting(started_s)
            self.was_started = True
            self._place = Place.UNKNOWN  # it may have been retracted since
        else:
            started_s = None
        self.forgotten = Forgotten(started_s)
        self.episodes.append(Episode(self.forgotten, beginning.arrived.now_s, first_s))

    def take(self, record: DecisionRecord) -> None:
        """Take the next record; most concern other requests."""
        if isinstance(record, PassRecord):
            if self._place is not Place.GONE:
                self._take_pass(record)
        elif isinstance(record, Settled):
            for left in record.left:
                if left.rid == self.rid:
                    self._end(left, record.now_s)
                    self.ended_by_grammar = record.grammar_ends.get(self.rid) == ""
            if self._needs_grammar and self.rid in record.grammars:
                self._take_grammar(record.now_s)
        elif record.rid == self.rid:
            if isinstance(record, Arrived):
                self._arrive(record)
            else:
                self._hand_over(record)

    def _hand_over(self, record: Handover) -> None:
        self.episodes.append(Episode(record, record.now_s, record.now_s))
        if record.event == "looked up":
            self._place = Place.RECEIVING
        elif record.event in KV_IS_HERE and self._place is Place.RECEIVING:
            self._place = Place.WAITING

    def _arrive(self, arrived: Arrived) -> None:
        self._clear()
        self.arrived = arrived
        self.waiting_since_s = arrived.now_s
        self._needs_grammar = arrived.needs_grammar
        self._place = Place.RECEIVING if arrived.awaits_kv else Place.WAITING
        self.episodes.append(Episode(arrived, arrived.now_s, arrived.now_s))

    def _take_grammar(self, now_s: float) -> None:
        assert self.arrived is not None, "its arrival says that it needs a grammar"
        self._needs_grammar = False
        self.grammar_s = now_s - self.arrived.now_s

    def _end(self, left: Finished, now_s: float) -> None:
        self._stop_waiting(now_s)
        self.left = left
        self._place = Place.GONE
        self.episodes.append(Episode(left, now_s, now_s))

    def _take_pass(self, record: PassRecord) -> None:
        rid, place = self.rid, self._place
        if record.num_tiles:
            self.num_tiles += record.num_tiles.get(rid, 0)
        was_waiting = self.waiting_since_s is not None
        for retraction in record.retractions:
            if retraction.rid == rid:
                self.num_retractions += 1
                self.waiting_since_s = record.now_s
                self._place = Place.WAITING
                self.episodes.append(Episode(retraction, record.now_s, record.now_s, record.step_id))
        if self._place is Place.RECEIVING:
            return
        if self._place is not Place.RUNNING:
            for verdict in record.verdicts:
                if verdict[0] == rid:  # `rid` by index, in a plain loop: the hot spot of an explanation
                    self._take_verdict(verdict, record)
                    break
            else:
                if was_waiting:
                    self._take_rest(record)
            if self._place is Place.WAITING:
                return
        if place is not Place.WAITING:
            for verdict in record.continued:
                if verdict.rid == rid:
                    act = Act.COMPUTED if verdict.result is AddReqResult.CONTINUE else Act.HELD_UP
                    self._decide(act, verdict.reason, "", record, verdict)

    def _take_verdict(self, verdict: Verdict, record: PassRecord) -> None:
        if verdict.result is not AddReqResult.CONTINUE:
            self._wait(verdict.reason, "", record, verdict)
            return
        self._stop_waiting(record.now_s)
        self.was_started = True
        self._place = Place.RUNNING
        self._decide(Act.STARTED, verdict.reason, "", record, verdict)
        for miss in record.cache_misses:
            if miss.rid == self.rid:
                self.episodes.append(Episode(miss, record.now_s, record.now_s, record.step_id))

    def _take_rest(self, record: PassRecord) -> None:
        """The request has no verdict of its own. `rest_reason` excludes requests that wait for their grammar."""
        if self._needs_grammar and record.num_grammar:
            self._wait(Reason.GRAMMAR_PENDING, "", record, None)
        elif record.rest_reason is not None:
            self._wait(record.rest_reason, record.rest_behind, record, None)
        elif record.num_grammar:
            self._wait(Reason.GRAMMAR_PENDING, "", record, None)

    def _wait(self, reason: Reason, behind: str, record: PassRecord, verdict: Verdict | None) -> None:
        if self.waiting_since_s is None:  # the log has dropped its arrival
            self.waiting_since_s = record.now_s
        self._place = Place.WAITING
        self._decide(Act.WAITED, reason, behind, record, verdict)

    def _stop_waiting(self, now_s: float) -> None:
        if self.waiting_since_s is not None:
            self.waited_s += now_s - self.waiting_since_s
            self.waiting_since_s = None

    def _decide(
        self, act: Act, reason: Reason, behind: str, record: PassRecord, verdict: Verdict | None
    ) -> None:
        """Begin an episode, or continue the last one if its decision is the same."""
        episode = self.episodes[-1] if self.episodes else None
        if episode is None or episode.cause != (act, reason, behind):
            episode = Episode(Decision(act, reason, behind), record.now_s, record.now_s, record.step_id)
            self.episodes.append(episode)
        episode.last_s = record.now_s
        episode.num_passes += 1
        if record.step_id:
            episode.last_step = record.step_id
            episode.first_step = episode.first_step or record.step_id
        if verdict is not None:
            episode.verdict = verdict
            if act is Act.STARTED or act is Act.COMPUTED:
                episode.num_tokens += verdict.extend_len
