"""`TimelineBuilder`: makes a `Timeline` from the records of a decision log, which it reads one by one.

The cost of a pass is proportional to its own verdicts, not to the number of waiting requests: a request that shares
the reason of the rest is touched again only when its state changes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from ...runtime.errors import ConfigError
from ...runtime.text import counted
from ...scheduler.records.decision_log import (
    Arrived,
    DecisionRecord,
    Finished,
    Handover,
    PassRecord,
    Retraction,
    Settled,
)
from ...scheduler.records.verdict import AddReqResult, Reason, Verdict
from .story import Mark, MarkKind, PassTable, Span, SpanKind, Timeline, TracedRequest, coarsen

MAX_SPANS: Final = 1_000_000
"""When there are more, short ones are merged; a span takes about 150 bytes."""


class EmptyLogError(ConfigError):
    """A log without a single pass."""


class _Phase(enum.Enum):
    WAIT = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


class _Track:
    """A request that has not been answered: its story, and what it has been doing since pass `since`."""

    __slots__ = ("on_host", "phase", "since", "story")

    def __init__(self, story: TracedRequest, phase: _Phase, since: int) -> None:
        self.story = story
        self.phase = phase
        self.since = since
        self.on_host = False


class TimelineBuilder:
    """See the module. `add` the records in order, then `build` once."""

    def __init__(self, *, origin_s: float | None = None, max_spans: int = MAX_SPANS) -> None:
        """Begin; `origin_s` is second 0 of the axis, by default the time of the first record."""
        self._origin_s = origin_s
        self._max_spans = max_spans
        self._passes = PassTable()
        self._settled_s: list[float] = []  # per pass; 0 until its step is settled
        self._empty_s: dict[int, float] = {}  # pass -> when, after it, no request was left
        self._idle: set[int] = set()  # passes that found no request
        self._requests: list[TracedRequest] = []
        self._tracks: dict[str, _Track] = {}
        self._pass_of_step: dict[int, int] = {}
        self._num_spans = 0
        self._resolution = 1

    def add(self, record: DecisionRecord) -> None:
        """Take the next record."""
        if self._origin_s is None:
            self._origin_s = record.now_s
        match record:
            case PassRecord():
                self._add_pass(record)
            case Settled():
                self._settle(record)
            case Arrived():
                self._arrive(record)
            case Handover():
                pass  # in the timeline the request waits
        if self._num_spans > self._max_spans:
            self._coarsen()

    def build(self) -> Timeline:
        """The timeline of all records.

        Raises:
            EmptyLogError: there was no pass.
        """
        num_passes = len(self._passes)
        if self._origin_s is None or not num_passes:
            raise EmptyLogError(
                "the log has no scheduling pass; it was written by a server that had nothing to do"
            )
        for track in self._tracks.values():
            self._close(track, num_passes - 1)
        self._set_ends()
        return Timeline(self._passes, self._requests, self._origin_s, self._resolution)

    # ------------------------------------------------------------ records

    def _arrive(self, record: Arrived) -> None:
        track = self._new_track(record.rid, _Phase.WAIT, len(self._passes))
        story = track.story
        story.arrived_s = record.now_s
        story.prompt_len, story.max_new_tokens = record.prompt_len, record.max_new_tokens
        story.priority, story.tenant, story.group = record.priority, record.tenant, record.group

    def _add_pass(self, record: PassRecord) -> None:
        idx = len(self._passes)
        for retraction in record.retractions:  # first: a retracted request already waits in this pass
            self._retract(retraction, idx)
        prefill_tokens = 0
        for verdict in record.continued:
            prefill_tokens += self._continue(verdict, idx)
        for verdict in record.verdicts:
            prefill_tokens += self._judge(verdict, idx)
        for look in record.cache_misses:
            track = self._tracks.get(look.rid)
            if track is not None:
                track.story.cache_looks.append(look)
        self._append_figures(record, prefill_tokens)

    def _settle(self, record: Settled) -> None:
        last = len(self._passes) - 1
        idx = self._pass_of_step.pop(record.step_id, None)
        if idx is not None:
            self._settled_s[idx] = record.now_s
            self._passes.step_s[idx] = record.forward_s
        for left in record.left:
            self._leave(left, record.now_s, last if idx is None else idx)

    def _leave(self, left: Finished, now_s: float, idx: int) -> None:
        track = self._tracks.get(left.rid) or self._new_track(left.rid, _Phase.DECODE, 0)
        # A later step may have been planned before the end was known. Its token counts for nothing, but a wait goes on
        # to the last pass.
        self._close(track, idx if track.phase is _Phase.DECODE else len(self._passes) - 1)
        story = track.story
        story.finish, story.finished_s = left.kind, now_s
        story.output_len, story.message = left.output_len, left.message
        del self._tracks[left.rid]
        if not self._tracks:
            self._empty_s.setdefault(len(self._passes) - 1, now_s)

    # ------------------------------------------------------------ decisions

    def _judge(self, verdict: Verdict, idx: int) -> int:
        """A pass looked at a waiting request; returns the tokens that the step computes for it."""
        track = self._track(verdict.rid, _Phase.WAIT, idx)
        self._close(track, idx - 1)
        if verdict.result is not AddReqResult.CONTINUE:
            self._wait(track, verdict, idx)
            return 0
        if verdict.reason is Reason.SWAPPED_IN or track.on_host:
            text = f"swapped in: {counted(verdict.prefix_len, 'token', commas=True)} came back from the host"
            track.story.marks.append(Mark(MarkKind.SWAPPED_IN, idx, text))
        track.on_host = False
        return self._compute(track, verdict, idx, is_last=not verdict.reason.is_cut)

    def _continue(self, verdict: Verdict, idx: int) -> int:
        """A pass looked at a partial prefill."""
        track = self._track(verdict.rid, _Phase.PREFILL, idx)
        track.phase = _Phase.PREFILL  # a verdict SWAPPED_IN does not say whether its chunk was the last
        self._close(track, idx - 1)
        if verdict.result is not AddReqResult.CONTINUE:
            self._wait(track, verdict, idx)
            return 0
        return self._compute(track, verdict, idx, is_last=verdict.extend_len >= verdict.need)

    def _compute(self, track: _Track, verdict: Verdict, idx: int, *, is_last: bool) -> int:
        track.story.spans.append(_span(SpanKind.PREFILL, verdict, idx))
        self._num_spans += 1
        track.since = idx + 1
        track.phase = _Phase.DECODE if is_last else _Phase.PREFILL
        return verdict.extend_len

    def _wait(self, track: _Track, verdict: Verdict, idx: int) -> None:
        """Lengthen the wait for the same reason, or begin one."""
        spans = track.story.spans
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.kind is SpanKind.WAIT
            and last.last == idx - 1
            and last.reason is verdict.reason
            and last.on_host == track.on_host
        ):
            last.last = idx
            last.num_verdicts += 1
            last.prefix_len, last.extend_len, last.output_len = verdict[3:6]
            last.need, last.have = verdict.need, verdict.have
        else:
            span = _span(SpanKind.WAIT, verdict, idx)
            span.on_host = track.on_host
            spans.append(span)
            self._num_spans += 1
        track.since = idx + 1

    def _retract(self, retraction: Retraction, idx: int) -> None:
        track = self._track(retraction.rid, _Phase.DECODE, 0)
        self._close(track, idx - 1)
        swapped = retraction.mode == "swap"
        words = "swapped out" if swapped else "retracted, to be computed again"
        text = (
            f"{words} ({retraction.cause}): {counted(retraction.num_pages, 'page', commas=True)}, "
            f"{counted(retraction.output_len, 'token', commas=True)} generated so far"
        )
        track.story.marks.append(Mark(MarkKind.SWAPPED_OUT if swapped else MarkKind.RETRACTED, idx, text))
        track.phase, track.since, track.on_host = _Phase.WAIT, idx, swapped

    # ------------------------------------------------------------ tracks

    def _track(self, rid: str, phase: _Phase, since: int) -> _Track:
        """The request, which may have arrived before the log began."""
        return self._tracks.get(rid) or self._new_track(rid, phase, since)

    def _new_track(self, rid: str, phase: _Phase, since: int) -> _Track:
        track = self._tracks[rid] = _Track(TracedRequest(rid), phase, since)
        self._requests.append(track.story)
        return track

    def _close(self, track: _Track, last: int) -> None:
        """Add the span from `since` to `last`, for the passes without a verdict."""
        if track.since > last:
            return
        if track.phase is not _Phase.PREFILL:  # a partial prefill without a chunk is a gap
            kind = SpanKind.WAIT if track.phase is _Phase.WAIT else SpanKind.DECODE
            track.story.spans.append(Span(kind, track.since, last, on_host=track.on_host))
            self._num_spans += 1
        track.since = last + 1

    def _coarsen(self) -> None:
        """Merge short spans, so that memory stays bounded for any log."""
        self._num_spans = 0
        self._resolution *= 2
        for story in self._requests:
            story.spans = coarsen(story.spans, self._resolution)
            self._num_spans += len(story.spans)
        # If that did not help, each request has about its minimum of spans: the next attempt comes much later.
        self._max_spans = max(self._max_spans, self._num_spans * 3 // 2)

    # ------------------------------------------------------------ figures

    def _append_figures(self, record: PassRecord, prefill_tokens: int) -> None:
        passes = self._passes
        if not (record.step_id or record.num_waiting or record.num_running or self._tracks):
            self._idle.add(len(passes))
        if record.step_id:
            self._pass_of_step[record.step_id] = len(passes)
        if record.notes:
            passes.notes[len(passes)] = record.notes
        self._settled_s.append(0.0)
        before, after = record.budget_before, record.budget_after
        shared = record.rest_reason
        if shared is None and record.num_grammar:
            shared = Reason.GRAMMAR_PENDING
        free, evictable, locked, held = record.pages
        figures = {
            "start_s": record.now_s,
            "step_ids": record.step_id,
            "modes": record.mode,
            "num_waiting": record.num_waiting,
            "num_running": record.num_running,
            "num_decodes": record.num_decodes,
            "prefill_tokens": prefill_tokens,
            "step_s": 0.0,
            "evicted_pages": record.evicted_pages,
            "free_pages": free,
            "evictable_pages": evictable,
            "locked_pages": locked,
            "held_pages": held,
            "kv_before": -1 if before is None else max(before.rem_total_tokens, 0),
            "kv_after": -1 if after is None else max(after.rem_total_tokens, 0),
            "step_before": -1 if before is None else max(min(before[2:]), 0),
            "step_after": -1 if after is None else max(min(after[2:]), 0),
            "rest_reasons": shared,
            "num_rest": record.num_rest + record.num_grammar,
            "policies": record.policy,
        }
        for name, figure in figures.items():
            getattr(passes, name).append(figure)

    def _set_ends(self) -> None:
        passes, starts = self._passes, self._passes.start_s
        for idx, settled_s in enumerate(self._settled_s):
            start_s = starts[idx]
            next_s = starts[idx + 1] if idx + 1 < len(starts) else 0.0
            ends = [each for each in (settled_s, next_s) if each >= start_s]
            end_s = min(ends) if ends else start_s + passes.step_s[idx]
            live_until_s = self._empty_s.get(idx, next_s or end_s)
            if idx in self._idle:
                end_s = live_until_s = start_s
            passes.end_s.append(end_s)
            passes.live_until_s.append(max(start_s, min(live_until_s, next_s or live_until_s)))


def read_timeline(records: Iterable[DecisionRecord], *, origin_s: float | None = None) -> Timeline:
    """The timeline of some records.

    Raises:
        EmptyLogError: there is no pass among them.
    """
    builder = TimelineBuilder(origin_s=origin_s)
    for record in records:
        builder.add(record)
    return builder.build()


def _span(kind: SpanKind, verdict: Verdict, idx: int) -> Span:
    _rid, _result, reason, prefix_len, extend_len, output_len, need, have = verdict
    return Span(
        kind, idx, idx, reason, False, 1, 1, prefix_len, extend_len, output_len, need, have, first_have=have
    )
