"""`Timeline`: the content of a decision log, per request and per pass. Pure values; `timeline.py` makes them.

Passes are numbered from 0 in the order of the log. A `Span` covers whole passes, both ends included, so that requests
and the figures of passes share one axis; `PassTable` turns passes into seconds.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import msgspec

from ...runtime.messages import FinishKind
from ...runtime.step_plan import ForwardMode
from ...scheduler.records.verdict import CacheMiss, Reason


class SpanKind(enum.IntEnum):
    """The activity of a request over some passes. The numbers are in the page's data."""

    WAIT = 0
    PREFILL = 1
    DECODE = 2


class Span(msgspec.Struct, gc=False):
    """A request did one thing in the passes `first` to `last`.

    Attributes:
        kind: what.
        reason: of the verdict. None for decodes, and for waits without one of their own: their passes gave one
            reason to all requests that they did not look at, `PassTable.rest_reasons`.
        on_host: WAIT only: its KV memory is on the host.
        num_verdicts: how many this span combines; 0 if it has none of its own.
        num_reasons: how many different waits `coarsen` merged; else 1.
        prefix_len, extend_len, output_len, need, have: the arithmetic of the last verdict; `extend_len` of PREFILL is
            the sum of its chunks.
        first_have: the `have` of the first verdict.
    """

    kind: SpanKind
    first: int
    last: int
    reason: Reason | None = None
    on_host: bool = False
    num_verdicts: int = 0
    num_reasons: int = 1
    prefix_len: int = 0
    extend_len: int = 0
    output_len: int = 0
    need: int = 0
    have: int = 0
    first_have: int = 0

    @property
    def num_passes(self) -> int:
        """Its length."""
        return self.last - self.first + 1


class MarkKind(enum.IntEnum):
    """Something that happened to a request at one moment. The numbers are in the page's data."""

    RETRACTED = 0
    SWAPPED_OUT = 1
    SWAPPED_IN = 2


class Mark(NamedTuple):
    """See `MarkKind`; `text` describes it for the reader."""

    kind: MarkKind
    pass_idx: int
    text: str


class TracedRequest(msgspec.Struct):
    """One request from arrival to answer.

    Attributes:
        rid, prompt_len, max_new_tokens, priority, tenant, group: as it arrived; -1 for lengths that the log lacks.
        arrived_s: None when it came before the log began.
        spans, marks: in order of time.
        cache_looks: one for each admission.
        finish: how it ended; None if it had not ended when the log ended.
        finished_s: when; None likewise.
        output_len: tokens generated for it.
        message: the message to its client, for errors and aborts.
    """

    rid: str
    prompt_len: int = -1
    max_new_tokens: int = -1
    priority: int = 0
    tenant: str = ""
    group: str = ""
    arrived_s: float | None = None
    spans: list[Span] = msgspec.field(default_factory=list)
    marks: list[Mark] = msgspec.field(default_factory=list)
    cache_looks: list[CacheMiss] = msgspec.field(default_factory=list)
    finish: FinishKind | None = None
    finished_s: float | None = None
    output_len: int = 0
    message: str = ""

    @property
    def cached_len(self) -> int:
        """Prompt tokens that the prefix cache had at the first admission."""
        return self.cache_looks[0].prefix_len if self.cache_looks else 0


def _column() -> Any:
    return msgspec.field(default_factory=list)


class PassTable(msgspec.Struct, gc=False):
    """The figures of passes, one column each, all of the same length; and notes.

    Attributes:
        end_s: when its step was done, or the next pass began, whichever was first; `start_s` without a request.
        live_until_s: when the last request had ended, or the next pass began, whichever was first; so long its numbers
            of requests and pages hold.
        step_ids, modes: of the plan; 0 and IDLE without one.
        prefill_tokens: computed of prompts in the step.
        step_s: seconds the runner needed; 0 if not in the log.
        kv_before, kv_after: tokens of KV memory that could be reserved, before and after admission; -1 if not tried.
        step_before, step_after: prompt tokens that the step could compute, before and after; -1 likewise.
        rest_reasons, num_rest: the reason shared by the requests that were not looked at, and their number.
        notes: pass -> what else was decided.
    """

    start_s: list[float] = _column()
    end_s: list[float] = _column()
    live_until_s: list[float] = _column()
    step_ids: list[int] = _column()
    modes: list[ForwardMode] = _column()
    num_waiting: list[int] = _column()
    num_running: list[int] = _column()
    num_decodes: list[int] = _column()
    prefill_tokens: list[int] = _column()
    step_s: list[float] = _column()
    evicted_pages: list[int] = _column()
    free_pages: list[int] = _column()
    evictable_pages: list[int] = _column()
    locked_pages: list[int] = _column()
    held_pages: list[int] = _column()
    kv_before: list[int] = _column()
    kv_after: list[int] = _column()
    step_before: list[int] = _column()
    step_after: list[int] = _column()
    rest_reasons: list[Reason | None] = _column()
    num_rest: list[int] = _column()
    policies: list[str] = _column()
    notes: dict[int, list[str]] = msgspec.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start_s)

    def part(self, start: int, stop: int) -> PassTable:
        """The passes `start` to `stop` - 1, numbered from 0."""
        columns = {
            name: getattr(self, name)[start:stop] for name in self.__struct_fields__ if name != "notes"
        }
        notes = {idx - start: notes for idx, notes in self.notes.items() if start <= idx < stop}
        return PassTable(**columns, notes=notes)

    def reason_of(self, span: Span) -> Reason | None:
        """The reason of a span, or the one that its last pass gave to all requests it did not look at."""
        return span.reason if span.reason is not None else self.rest_reasons[span.last]

    def next_start_s(self, idx: int) -> float:
        """When the next pass began; of the last one, its end."""
        return self.start_s[idx + 1] if idx + 1 < len(self) else self.end_s[idx]

    def span_s(self, span: Span) -> tuple[float, float]:
        """Begin and end of a span: a wait lasts until the next pass, other spans as long as their last step."""
        end_s = self.next_start_s(span.last) if span.kind is SpanKind.WAIT else self.end_s[span.last]
        return self.start_s[span.first], end_s


class Timeline(NamedTuple):
    """A run of the scheduler, or a part of it.

    Attributes:
        passes: at least one.
        requests: in order of arrival.
        origin_s: second 0 of the axis, on the clock of the log.
        resolution: waits of fewer passes were merged; 1 if none were.
        left_out: in words, what was left out because of limits; "" if nothing.
    """

    passes: PassTable
    requests: list[TracedRequest]
    origin_s: float
    resolution: int = 1
    left_out: str = ""

    def window(self, from_s: float | None = None, to_s: float | None = None) -> Timeline:
        """The passes that begin in this part of the axis, and the requests of that time."""
        begins = self.passes.start_s
        start = 0 if from_s is None else bisect.bisect_left(begins, self.origin_s + from_s)
        stop = len(begins) if to_s is None else bisect.bisect_right(begins, self.origin_s + to_s)
        return self.part(start, stop)

    def part(self, start: int, stop: int) -> Timeline:
        """The passes `start` to `stop` - 1, numbered from 0, and the requests of that time."""
        if (start, stop) == (0, len(self.passes)):
            return self
        requests = [part for story in self.requests if (part := _clip(story, start, stop - 1)) is not None]
        return self._replace(passes=self.passes.part(start, stop), requests=requests)

    def only(self, rids: Collection[str]) -> Timeline:
        """The same passes with these requests alone."""
        return self._replace(requests=[story for story in self.requests if story.rid in rids])

    @property
    def extent_s(self) -> tuple[float, float]:
        """When the first and the last pass were made, on the clock of the log."""
        return self.passes.start_s[0], self.passes.start_s[-1]

    def coarsened(self, max_spans: int) -> Timeline:
        """The same with at most about so many spans: short neighbors are merged until the number is reached."""
        resolution, requests = self.resolution, self.requests
        while sum(len(story.spans) for story in requests) > max_spans and resolution < len(self.passes):
            resolution *= 2
            requests = [
                msgspec.structs.replace(story, spans=coarsen(story.spans, resolution)) for story in requests
            ]
        return self._replace(resolution=resolution, requests=requests)


def coarsen(spans: Iterable[Span], resolution: int) -> list[Span]:
    """Merge short neighbors: waits of fewer than `resolution` passes, and chunks at most so many passes apart.

    The longest of several waits gives the reason and its arithmetic.
    """
    result: list[Span] = []
    longest = 0  # of the waits that make up the last span
    for span in spans:
        last = result[-1] if result else None
        near = last is not None and span.kind is last.kind and span.first - last.last <= resolution
        if last is None or not near or span.kind is SpanKind.DECODE or span.on_host != last.on_host:
            result.append(span)
            longest = span.num_passes
        elif span.kind is SpanKind.PREFILL:
            result[-1] = msgspec.structs.replace(
                span,
                first=last.first,
                num_verdicts=last.num_verdicts + span.num_verdicts,
                prefix_len=last.prefix_len,
                extend_len=last.extend_len + span.extend_len,
                first_have=last.first_have,
            )
        elif min(longest, span.num_passes) < resolution:
            kept = span if span.num_passes > longest else last
            result[-1] = msgspec.structs.replace(
                kept,
                first=last.first,
                last=span.last,
                # if the reason is the one that passes share, the few verdicts between add nothing
                num_verdicts=last.num_verdicts + span.num_verdicts if kept.num_verdicts else 0,
                num_reasons=last.num_reasons + span.num_reasons,
            )
            longest = max(longest, span.num_passes)
        else:
            result.append(span)
            longest = span.num_passes
    return result


def _clip(story: TracedRequest, first: int, last: int) -> TracedRequest | None:
    """The story of a request in these passes, numbered from `first`; None if it was not live then."""
    spans = [
        msgspec.structs.replace(span, first=max(span.first, first) - first, last=min(span.last, last) - first)
        for span in story.spans
        if span.first <= last and span.last >= first
    ]
    if not spans:
        return None
    marks = [
        mark._replace(pass_idx=mark.pass_idx - first)
        for mark in story.marks
        if first <= mark.pass_idx <= last
    ]
    return msgspec.structs.replace(story, spans=spans, marks=marks)
