"""`write_trace_events`: a `Timeline` in the JSON trace format that Perfetto and `chrome://tracing` open.

Process 1 holds the steps and the counters of the scheduler, process 2 one track per request. Events are written one by
one, so that a long log needs no second copy in memory. Times are microseconds, as the format requires.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import msgspec

from ...runtime.step_plan import ForwardMode
from .story import PassTable, Span, SpanKind, Timeline, TracedRequest

SCHEDULER_PID: Final = 1
REQUESTS_PID: Final = 2
Event = dict[str, Any]


def write_trace_events(timeline: Timeline, file: BinaryIO, *, model: str = "") -> int:
    """Write the trace; returns the number of its events. `model` is part of the process names."""
    encode = msgspec.json.Encoder().encode
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    num_events = 0
    for event in trace_events(timeline, model):
        file.write((b",\n" if num_events else b"") + encode(event))
        num_events += 1
    file.write(b"\n]}\n")
    return num_events


def trace_events(timeline: Timeline, model: str = "") -> Iterator[Event]:
    """The events, metadata first."""
    of_model = f" of {model}" if model else ""
    yield _event("M", "process_name", SCHEDULER_PID, 0, args={"name": f"scheduler{of_model}"})
    yield _event("M", "thread_name", SCHEDULER_PID, 1, args={"name": "steps"})
    yield _event("M", "process_name", REQUESTS_PID, 0, args={"name": f"requests{of_model}"})
    yield from _pass_events(timeline)
    for tid, story in enumerate(timeline.requests, start=1):
        yield _event("M", "thread_name", REQUESTS_PID, tid, args={"name": story.rid})
        yield _event("M", "thread_sort_index", REQUESTS_PID, tid, args={"sort_index": tid})
        yield from _request_events(story, tid, timeline)


def _event(phase: str, name: str, pid: int, tid: int, **more: object) -> Event:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, **more}


def _micros(timeline: Timeline, time_s: float) -> float:
    """A time of the log in microseconds of the trace."""
    return round((time_s - timeline.origin_s) * 1e6, 3)


def _pass_events(timeline: Timeline) -> Iterator[Event]:
    passes = timeline.passes
    for idx in range(len(passes)):
        begin = _micros(timeline, passes.start_s[idx])
        if passes.modes[idx] is not ForwardMode.IDLE:
            arguments = {
                "step": passes.step_ids[idx],
                "prefill_tokens": passes.prefill_tokens[idx],
                "decodes": passes.num_decodes[idx],
                "step_ms": round(passes.step_s[idx] * 1e3, 3),
                "policy": passes.policies[idx],
                "evicted_pages": passes.evicted_pages[idx],
            }
            name, end = passes.modes[idx].name.lower(), _micros(timeline, passes.end_s[idx])
            yield _slice(SCHEDULER_PID, 1, name, "step", begin, end, arguments)
        for note in passes.notes.get(idx, ()):
            yield _event("i", note, SCHEDULER_PID, 1, s="p", cat="note", ts=begin)
        pages = {
            "held": passes.held_pages[idx],
            "locked": passes.locked_pages[idx],
            "evictable": passes.evictable_pages[idx],
            "free": passes.free_pages[idx],
        }
        yield from _counters(begin, pages, passes.num_waiting[idx], passes.num_running[idx])
        live_until = _micros(timeline, passes.live_until_s[idx])
        if live_until < _micros(timeline, passes.next_start_s(idx)) or idx + 1 == len(passes):
            yield from _counters(live_until, dict.fromkeys(pages, 0), 0, 0)  # no request is there


def _counters(ts: float, pages: dict[str, int], waiting: int, running: int) -> Iterator[Event]:
    """The figures from a moment on."""
    yield _event("C", "KV pool (pages)", SCHEDULER_PID, 0, ts=ts, args=pages)
    yield _event("C", "queue", SCHEDULER_PID, 0, ts=ts, args={"waiting": waiting})
    yield _event("C", "running", SCHEDULER_PID, 0, ts=ts, args={"running": running})


def _request_events(story: TracedRequest, tid: int, timeline: Timeline) -> Iterator[Event]:
    passes = timeline.passes
    if story.arrived_s is not None and story.spans:
        begin_s = passes.start_s[story.spans[0].first]
        if story.arrived_s < begin_s:
            begin, end = (_micros(timeline, time_s) for time_s in (story.arrived_s, begin_s))
            yield _slice(REQUESTS_PID, tid, "wait: arrived", "wait", begin, end, {})
    for span in story.spans:
        begin, end = (_micros(timeline, time_s) for time_s in passes.span_s(span))
        arguments = _arguments(span, passes)
        yield _slice(REQUESTS_PID, tid, _title(span, passes), span.kind.name.lower(), begin, end, arguments)
    for mark in story.marks:
        ts = _micros(timeline, passes.start_s[mark.pass_idx])
        yield _event("i", mark.kind.name.lower(), REQUESTS_PID, tid, s="t", ts=ts, args={"text": mark.text})
    if story.finish is not None and story.finished_s is not None:
        ended: Event = {
            "prompt_tokens": story.prompt_len,
            "cached_tokens": story.cached_len,
            "output_tokens": story.output_len,
        }
        if story.message:
            ended["message"] = story.message
        ts = _micros(timeline, story.finished_s)
        yield _event("i", f"finished: {story.finish.value}", REQUESTS_PID, tid, s="t", ts=ts, args=ended)


def _title(span: Span, passes: PassTable) -> str:
    if span.kind is SpanKind.DECODE:
        return "decode"
    if span.kind is SpanKind.PREFILL:
        return f"prefill {span.extend_len}"
    reason, place = passes.reason_of(span), "swapped" if span.on_host else "wait"
    return place if reason is None else f"{place}: {reason.value}"


def _arguments(span: Span, passes: PassTable) -> Event:
    arguments: Event = {"passes": f"{span.first}-{span.last}"}
    reason = passes.reason_of(span)
    if span.kind is not SpanKind.DECODE and reason is not None:
        arguments["why"] = reason.text
    if span.num_verdicts:
        arguments |= {"need": span.need, "have": span.have, "cached": span.prefix_len}
        arguments |= {"compute": span.extend_len, "output": span.output_len}
    return arguments


def _slice(pid: int, tid: int, name: str, category: str, ts: float, end: float, arguments: Event) -> Event:
    return _event("X", name, pid, tid, cat=category, ts=ts, dur=max(round(end - ts, 3), 0), args=arguments)
