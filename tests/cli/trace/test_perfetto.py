"""The JSON that Perfetto reads."""

from __future__ import annotations

import io
import itertools
import json

import pytest

from engine.cli.trace.perfetto import REQUESTS_PID, write_trace_events
from engine.cli.trace.timeline import read_timeline


@pytest.fixture
def timeline(sample_engine):
    return read_timeline(sample_engine(num_requests=40, num_pages=160).records())


@pytest.fixture
def events(timeline):
    file = io.BytesIO()
    count = write_trace_events(timeline, file)
    trace = json.loads(file.getvalue())
    assert len(trace["traceEvents"]) == count
    return trace["traceEvents"]


def test_every_event_has_what_the_format_demands(events):
    phases = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "M": {"args"}}
    assert {event["ph"] for event in events} == set(phases)
    for event in events:
        assert phases[event["ph"]] | {"name", "pid"} <= set(event)
        assert event.get("dur", 0) >= 0
        assert event["ph"] == "M" or event["ts"] >= 0


def test_there_is_a_named_track_for_each_request_and_its_slices_do_not_overlap(events, timeline):
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == REQUESTS_PID
    }
    assert list(names.values()) == [story.rid for story in timeline.requests]
    for tid in names:
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == REQUESTS_PID and e["tid"] == tid]
        assert slices
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01


def test_counters_tell_the_pool_the_queue_and_the_running(events, timeline):
    pools = [event["args"] for event in events if event["name"] == "KV pool (pages)"]
    assert len(pools) == len(timeline.passes)
    assert all(sum(pool.values()) == 160 for pool in pools)
    assert [e["args"]["waiting"] for e in events if e["name"] == "queue"] == timeline.passes.num_waiting
    assert [e["args"]["running"] for e in events if e["name"] == "running"] == timeline.passes.num_running


def test_slices_say_why(events):
    (why, *_) = [
        event["args"] for event in events if event["name"] == "wait: no_kv" and "need" in event["args"]
    ]
    assert why["why"] == "KV memory is short"
    assert why["need"] >= why["have"]
    assert {"retracted", "swapped_out", "swapped_in", "finished: abort"} <= {
        event["name"] for event in events if event["ph"] == "i"
    }
