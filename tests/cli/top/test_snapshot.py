"""Answers of a server, read and compared."""

from __future__ import annotations

import json

import pytest

from engine.cli.top.snapshot import Rates, Snapshot, printable
from engine.runtime.errors import EngineError

from .conftest import RUNS, URL, answers


def at(**report):
    return Snapshot.from_answers(URL, *answers(**report))


def test_an_answer_is_read(snapshot):
    assert (snapshot.model, snapshot.total, snapshot.max_running_requests) == ("tiny", 3, 64)
    assert snapshot.free_tokens == 250
    assert [request.waits for request in snapshot.requests] == [False, True, True]
    assert snapshot.report.waiting_by_reason == {"no_kv": 2}


def test_it_is_json_for_scripts(snapshot):
    found = json.loads(json.dumps(snapshot.as_dict(None)))
    assert found["scheduler"]["num_queue_reqs"] == 2
    assert found["requests"][0] == RUNS
    assert (found["num_requests"], found["rates"], found["kv_free_tokens"]) == (3, None, 250)
    assert found["last_pass"]["rem_total_tokens_after"] == 3904


def test_another_versions_fields_do_no_harm():
    info, listed = answers([RUNS | {"new": 1}])
    info["scheduler"]["new"] = 1
    del info["scheduler"]["policy"], info["scheduler"]["waiting_by_reason"]
    snapshot = Snapshot.from_answers(URL, info | {"new": 1}, listed | {"new": 1})
    assert (snapshot.report.policy, snapshot.report.waiting_by_reason) == ("", {})
    assert snapshot.requests[0].id == RUNS["id"]


def test_a_scheduler_that_has_not_reported_yet_is_no_error():
    info, listed = answers([])
    assert Snapshot.from_answers(URL, info | {"scheduler": None}, listed).report.kv.total_tokens == 0


@pytest.mark.parametrize(
    ("info", "listed"),
    [
        ({"model": None, "capacity": 3}, {}),
        ({"scheduler": []}, {}),
        ({"scheduler": {"sent_s": "soon"}}, {}),
        ({}, {"data": 7}),
        ({}, {"data": [{"id": 1}]}),
        ({}, {"data": [RUNS | {"age_s": "long"}]}),
        ({}, {"total": None}),
        ({}, {"last_pass": {"x": "y"}}),
    ],
)
def test_what_is_not_an_engines_answer_is_said(info, listed):
    good_info, good_listed = answers()
    with pytest.raises(EngineError, match="not an engine's of this version .*; check the URL"):
        Snapshot.from_answers(URL, good_info | info, good_listed | listed)


def test_rates_are_what_happened_between():
    before = at(generation_tokens_total=100, prompt_tokens_total=1000, cached_tokens_total=0)
    after = at(
        sent_s=102.0,
        generation_tokens_total=300,
        prompt_tokens_total=1400,
        cached_tokens_total=100,
        num_steps_total=40,
        step_s_total=1.0,
        evicted_tokens_total=64,
        retracted_reqs_total=3,
    )
    assert Rates.between(before, after) == Rates(
        seconds=2.0,
        output_tokens=100.0,
        prompt_tokens=200.0,
        cached=0.25,
        steps=20.0,
        busy=0.5,
        evicted_tokens=32.0,
        retractions=3,
    )


def test_without_time_or_over_a_restart_there_are_no_rates():
    assert Rates.between(at(), at()) is None
    assert Rates.between(at(num_steps_total=9), at(sent_s=101.0, num_steps_total=2)) is None


def test_nothing_that_a_terminal_would_obey_is_shown():
    info, listed = answers([RUNS | {"id": "a\x1b[2Jb", "why": "x\ny"}], policy="\x9b31m", stalled="\r")
    snapshot = Snapshot.from_answers(URL, info | {"model": "\x1b]0;title\x07"}, listed)
    shown = repr(snapshot)
    assert "\\x1b" not in shown and "\\x07" not in shown and "\\x9b" not in shown
    assert snapshot.requests[0].id == "a?[2Jb"
    assert printable("größe 東京 🙂") == "größe 東京 🙂"
