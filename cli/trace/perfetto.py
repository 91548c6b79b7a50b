"""`write_trace_events`: a `Timeline` in the JSON trace format that Perfetto and `chrome://tracing` open.

Process 1 holds the steps and the counters of the scheduler, process 2 one track per request. Events are written one by
one, so that a long log needs no second copy in memory. Times are microseconds, as the format requires.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

import msgspec

from ...runtime.step_plan import ForwardMode
from .story import PassTable, Span, SpanKind, Timeline, TracedRequest

SCHEDULER_PID: Final = 1
REQUESTS_PID: Final = 2
Event = dict[str, Any]


class Sink(Protocol):
    """Receives the bytes."""

    def write(self, data: bytes, /) -> object:
        """Take them."""
        ...


def write_trace_events(timeline: Timeline, sink: Sink, *, model: str = "") -> int:
    """Write the trace; returns the number of its events. `model` is part of the process names."""
    encode = msgspec.json.Encoder().encode
    sink.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    num_events = 0
    for event in trace_events(timeline, model):
        sink.write((b",\n" if num_events else b"") + encode(event))
        num_events += 1
    sink.write(b"\n]}\n")
    return num_events


def trace_events(timeline: Timeline, model: str = "") -> Iterator[Event]:
    """The events, metadata first."""
    clock = _Clock(timeline)
    of_model = f" of {model}" if model else ""
    yield _name("process_name", SCHEDULER_PID, 0, f"scheduler{of_model}")
    yield _name("thread_name", SCHEDULER_PID, 1, "steps")
    yield _name("process_name", REQUESTS_PID, 0, f"requests{of_model}")
    yield from _pass_events(timeline.passes, clock)
    for tid, story in enumerate(timeline.requests, start=1):
        yield _name("thread_name", REQUESTS_PID, tid, story.rid)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": REQUESTS_PID,
            "tid": tid,
            "args": {"sort_index": tid},
        }
        yield from _request_events(story, tid, timeline.passes, clock)


class _Clock:
    """Passes and seconds to microseconds of the trace."""

    def __init__(self, timeline: Timeline) -> None:
        self._passes = timeline.passes
        self._origin_s = timeline.origin_s

    def at(self, time_s: float) -> float:
        return round((time_s - self._origin_s) * 1e6, 3)

    def begin(self, idx: int) -> float:
        return self.at(self._passes.start_s[idx])

    def end(self, idx: int) -> float:
        return self.at(self._passes.end_s[idx])

    def next_begin(self, idx: int) -> float:
        return self.begin(idx + 1) if idx + 1 < len(self._passes) else self.end(idx)


def _pass_events(passes: PassTable, clock: _Clock) -> Iterator[Event]:
    for idx in range(len(passes)):
        begin = clock.begin(idx)
        if passes.modes[idx] is not ForwardMode.IDLE:
            yield {
                "ph": "X",
                "name": passes.modes[idx].name.lower(),
                "cat": "step",
                "pid": SCHEDULER_PID,
                "tid": 1,
                "ts": begin,
                "dur": round(clock.end(idx) - begin, 3),
                "args": {
                    "step": passes.step_ids[idx],
                    "prefill_tokens": passes.prefill_tokens[idx],
                    "decodes": passes.num_decodes[idx],
                    "step_ms": round(passes.step_s[idx] * 1e3, 3),
                    "policy": passes.policies[idx],
                    "evicted_pages": passes.evicted_pages[idx],
                },
            }
        for note in passes.notes.get(idx, ()):
            yield {
                "ph": "i",
                "s": "p",
                "name": note,
                "cat": "note",
                "pid": SCHEDULER_PID,
                "tid": 1,
                "ts": begin,
            }
        yield from _counters(
            begin,
            held=passes.held_pages[idx],
            locked=passes.locked_pages[idx],
            evictable=passes.evictable_pages[idx],
            free=passes.free_pages[idx],
            waiting=passes.num_waiting[idx],
            running=passes.num_running[idx],
        )
        live_until = clock.at(passes.live_until_s[idx])
        if live_until < clock.next_begin(idx) or idx + 1 == len(passes):
            yield from _counters(live_until)


def _counters(
    ts: float,
    *,
    held: int = 0,
    locked: int = 0,
    evictable: int = 0,
    free: int = 0,
    waiting: int = 0,
    running: int = 0,
) -> Iterator[Event]:
    """The figures from a moment on; without a request all are 0."""
    yield _counter("KV pool (pages)", ts, held=held, locked=locked, evictable=evictable, free=free)
    yield _counter("queue", ts, waiting=waiting)
    yield _counter("running", ts, running=running)


def _request_events(story: TracedRequest, tid: int, passes: PassTable, clock: _Clock) -> Iterator[Event]:
    first = story.spans[0] if story.spans else None
    if story.arrived_s is not None and first is not None and story.arrived_s < passes.start_s[first.first]:
        ts = clock.at(story.arrived_s)
        yield _slice(tid, "wait: arrived", "wait", ts, clock.begin(first.first), {})
    for span in story.spans:
        end = clock.next_begin(span.last) if span.kind is SpanKind.WAIT else clock.end(span.last)
        yield _slice(
            tid,
            _title(span, passes),
            span.kind.name.lower(),
            clock.begin(span.first),
            end,
            _arguments(span, passes),
        )
    for mark in story.marks:
        yield _instant(tid, mark.kind.name.lower(), clock.begin(mark.pass_idx), {"text": mark.text})
    if story.finish is not None and story.finished_s is not None:
        arguments: dict[str, Any] = {
            "prompt_tokens": story.prompt_len,
            "cached_tokens": story.cached_len,
            "output_tokens": story.output_len,
        }
        if story.message:
            arguments["message"] = story.message
        yield _instant(tid, f"finished: {story.finish.value}", clock.at(story.finished_s), arguments)


def _title(span: Span, passes: PassTable) -> str:
    if span.kind is SpanKind.DECODE:
        return "decode"
    if span.kind is SpanKind.PREFILL:
        return f"prefill {span.extend_len}"
    reason = span.reason if span.reason is not None else passes.rest_reasons[span.last]
    place = "swapped" if span.on_host else "wait"
    return place if reason is None else f"{place}: {reason.value}"


def _arguments(span: Span, passes: PassTable) -> dict[str, Any]:
    arguments: dict[str, Any] = {"passes": f"{span.first}-{span.last}"}
    reason = span.reason if span.reason is not None else passes.rest_reasons[span.last]
    if span.kind is not SpanKind.DECODE and reason is not None:
        arguments["why"] = reason.text
    if span.num_verdicts:
        arguments |= {
            "need": span.need,
            "have": span.have,
            "cached": span.prefix_len,
            "compute": span.extend_len,
            "output": span.output_len,
        }
    return arguments


def _slice(tid: int, name: str, category: str, ts: float, end: float, arguments: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": REQUESTS_PID,
        "tid": tid,
        "ts": ts,
        "dur": max(round(end - ts, 3), 0),
        "args": arguments,
    }


def _instant(tid: int, name: str, ts: float, arguments: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "t", "name": name, "pid": REQUESTS_PID, "tid": tid, "ts": ts, "args": arguments}


def _counter(name: str, ts: float, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": SCHEDULER_PID, "tid": 0, "ts": ts, "args": values}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
