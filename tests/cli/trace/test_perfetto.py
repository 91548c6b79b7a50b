"""The JSON that Perfetto reads."""

from __future__ import annotations

import io
import itertools
import json

import msgspec
import pytest

from engine.cli.trace.perfetto import REQUESTS_PID, write_trace_events
from engine.cli.trace.timeline import read_timeline
from engine.runtime.messages import FinishKind
from engine.scheduler.records.decision_log import Arrived, DecisionRecord, Finished, PassRecord, Settled


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


def counters(events, name):
    return [(event["ts"], event["args"]) for event in events if event["name"] == name]


def test_counters_tell_the_pool_the_queue_and_the_running(events, timeline):
    passes = timeline.passes
    begins = [round((start_s - timeline.origin_s) * 1e6, 3) for start_s in passes.start_s]
    for name, column, values in (
        ("queue", "waiting", passes.num_waiting),
        ("running", "running", passes.num_running),
    ):
        told = dict(counters(events, name))  # the last of one moment counts
        assert [told[begin][column] for begin in begins] == values
    pools = dict(counters(events, "KV pool (pages)"))
    assert all(sum(pools[begin].values()) == 160 for begin in begins)


def test_counters_are_zero_while_no_request_is_there(sample_engine):
    first = list(sample_engine(num_requests=8, seed=1).records())
    second = [
        msgspec.structs.replace(each, now_s=each.now_s + 60)
        for each in sample_engine(num_requests=8, seed=2).records()
    ]
    timeline = read_timeline([*first, *second])
    passes, file = timeline.passes, io.BytesIO()
    write_trace_events(timeline, file)
    events = json.loads(file.getvalue())["traceEvents"]
    gaps = [idx for idx in range(len(passes) - 1) if passes.start_s[idx + 1] - passes.live_until_s[idx] > 1]
    assert len(gaps) == 1
    for idx in (*gaps, len(passes) - 1):
        end = round((passes.live_until_s[idx] - timeline.origin_s) * 1e6, 3)
        for name in ("KV pool (pages)", "queue", "running"):
            assert set(dict(counters(events, name))[end].values()) == {0}


PASSES = [
    PassRecord(1.0, 1, num_running=1),
    PassRecord(2.0, 2, num_running=1),
    PassRecord(9.0, 3, num_running=1),
]
LEFT = [Finished("a", FinishKind.STOP, 2)]


@pytest.mark.parametrize(
    ("between", "end_s", "live_until_s"),
    [
        ([Settled(2.5, 2)], 2.5, 9.0),  # it still runs: the next step is late
        ([Settled(2.5, 2, left=LEFT)], 2.5, 2.5),
        ([Settled(2.5, 2), Settled(3.0, 0, left=LEFT)], 2.5, 3.0),  # an abort between steps
        ([Settled(2.5, 2, left=LEFT), Arrived(8.0, "b", 4, 4)], 2.5, 2.5),
        ([Settled(2.5, 2, left=LEFT), PassRecord(2.6, 0)], 2.5, 2.5),
        ([], 9.0, 9.0),
    ],
)
def test_a_pass_holds_until_the_next_one_or_until_no_request_is_there(between, end_s, live_until_s):
    records: list[DecisionRecord] = [Arrived(0.9, "a", 4, 4), *PASSES[:2], *between, PASSES[2]]
    passes = read_timeline(records).passes
    assert (passes.end_s[1], passes.live_until_s[1]) == (end_s, live_until_s)


def test_a_pass_that_found_no_request_has_no_length():
    records: list[DecisionRecord] = [PassRecord(1.6, 0), PassRecord(9.0, 2, num_running=1)]
    passes = read_timeline(records).passes
    assert (passes.end_s[0], passes.live_until_s[0]) == (1.6, 1.6)


def test_a_pass_that_leaves_requests_waiting_lasts_until_the_next_one():
    records: list[DecisionRecord] = [PassRecord(1.0, 0, num_waiting=2), PassRecord(9.0, 2, num_running=1)]
    passes = read_timeline(records).passes
    assert (passes.end_s[0], passes.live_until_s[0]) == (9.0, 9.0)


def test_the_processes_have_the_model_s_name(timeline):
    file = io.BytesIO()
    write_trace_events(timeline, file, model="SmolLM2-135M-Instruct")
    events = json.loads(file.getvalue())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["scheduler of SmolLM2-135M-Instruct", "requests of SmolLM2-135M-Instruct"]


def test_slices_say_why(events):
    (why, *_) = [
        event["args"] for event in events if event["name"] == "wait: no_kv" and "need" in event["args"]
    ]
    assert why["why"] == "KV memory is short"
    assert why["need"] >= why["have"]
    assert {"retracted", "swapped_out", "swapped_in", "finished: abort"} <= {
        event["name"] for event in events if event["ph"] == "i"
    }
