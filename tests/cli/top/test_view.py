"""The screen, at the sizes that people have."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from engine.cli.top.snapshot import Rates, Snapshot
from engine.cli.top.view import render, seconds_text, short_id

from .conftest import RUNS, URL, WAITS, answers

RATES = Rates(
    seconds=1.0,
    output_tokens=1234.4,
    prompt_tokens=200.0,
    cached=0.25,
    steps=20.0,
    busy=0.5,
    evicted_tokens=32.0,
    retractions=0,
)


def screen(snapshot, rates=RATES, width=80, height=24, note=""):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(render(snapshot, rates, width=width, height=height, note=note))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_at_80_by_24(snapshot):
    assert screen(snapshot) == [
        "engine  tiny at http://127.0.0.1:30000 · 0.1.0 · fcfs",
        "reqs    1 of 64 running · 2 waiting · 0 swapped · 0 retracted, 0 timed out so",
        "        far",
        "KV      ############::::::...... requests 50% · tree 25% · free 25% of 1,000",
        "rates   1,234 tok/s out · 200 tok/s prompts, 25% cached · 20.0 steps/s · busy",
        "        50% · evicted 32/s",
        "why     no_kv 2",
        "budget  memory reserved 4,000 -> 3,904",
        "",
        "ID              PHASE        AGE   TTFT  PROMPT         OUT WHY",
        "chatcmpl-…7c1-0 decode     2.44s   59ms     812      83/400",
        "cmpl-b          waiting    61.0s      -     812       0/400 no_kv (need 4,176, …",
        "cmpl-c          retracted  61.0s      -     812       0/400 retracted 2x; no_kv",
    ]


def test_each_of_several_replicas_has_a_line():
    info, listed = answers()
    report = info["scheduler"]
    used = report | {"num_queue_reqs": 0, "prompt_tokens_total": 40, "cached_tokens_total": 10, "replica": 1}
    info["dp_size"] = 2
    info["replicas"] = [
        {"replica": 0, "reason": "scheduler of replica 0 was killed by SIGKILL", "scheduler": report},
        {"replica": 1, "reason": None, "scheduler": used},
    ]
    snapshot = Snapshot.from_answers(URL, info, listed)

    lines = screen(snapshot, width=100)
    assert lines[1].startswith("reqs    1 of 128 running")
    assert lines[4:6] == [
        "dp 0    scheduler of replica 0 was killed by SIGKILL",
        "dp 1    1 running · 0 waiting · requests 50% · tree 25% · 25% of all prompts cached",
    ]
    assert [each["reason"] for each in snapshot.as_dict(None)["replicas"]] == [
        "scheduler of replica 0 was killed by SIGKILL",
        None,
    ]


def test_grammars_have_a_line_once_one_was_used():
    figures: dict[str, Any] = {
        "grammar_builds_total": 4,
        "grammar_build_s_total": 0.01,
        "grammar_masks_total": 2000,
        "grammar_mask_s_total": 0.05,
        "step_s_total": 2.0,
        "overruled_tokens_total": 120,
        "num_grammar_reqs": 3,
    }
    before = Snapshot.from_answers(URL, *answers(sent_s=98.0))
    after = Snapshot.from_answers(URL, *answers(**figures))
    lines = screen(after, Rates.between(before, after), width=200)
    assert [line for line in lines if line.startswith("guided")] == [
        "guided  1,000 masks/s · 60.0 overruled tok/s · 120 overruled so far · 2.5% of the time of all steps · 4 "
        "compiled, 2.5 ms each · 3 waiting"
    ]
    first = screen(after, None, width=200)
    assert any(line.startswith("guided  120 overruled so far") for line in first)
    assert not any(line.startswith("guided") for line in screen(before, width=200))


def test_at_200_by_50_ids_and_reasons_are_whole(snapshot):
    lines = screen(snapshot, width=200, height=50)
    assert lines[8].startswith(f"{RUNS['id']} decode ")
    assert lines[9].endswith("KV memory is short (need 4,176, have 3,904)")
    assert lines[10].endswith("retracted 2x; KV memory is short")
    assert " CACHED " in lines[7]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 12), (20, 5), (1, 1)])
def test_it_never_outgrows_its_screen(width, height):
    many = [RUNS | {"id": f"cmpl-{i:032x}-0"} for i in range(300)]
    crowded = Snapshot.from_answers(URL, *answers(many, stalled="2 requests wait, NO_KV need 9 have 4"))
    lines = screen(crowded, width=width, height=height, note="the connection broke")
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


def test_requests_without_a_line_are_counted():
    many = [RUNS | {"id": f"cmpl-{i}"} for i in range(30)]
    info, listed = answers(many)
    lines = screen(Snapshot.from_answers(URL, info, listed | {"total": 5000}))
    assert len(lines) == 24
    assert lines[-1] == "and 4,987 more"
    assert lines[-2].startswith("cmpl-12 ")


def test_an_idle_server_has_a_screen_too():
    figures = {"num_running_reqs": 0, "num_queue_reqs": 0, "kv_used_tokens": 0, "kv_cached_tokens": 0}
    idle = Snapshot.from_answers(URL, *answers([], **figures, waiting_by_reason={}))
    lines = screen(idle, rates=None)
    assert lines[-1] == "no requests"
    assert "rates   ..." in lines
    assert not any(line.startswith("why") for line in lines)


def test_what_is_there_shows_however_little():
    little = Snapshot.from_answers(
        URL, *answers([WAITS], kv_used_tokens=1, kv_cached_tokens=1, kv_total_tokens=10**6)
    )
    assert any(line.startswith("KV      #:......") for line in screen(little))


def test_trouble_is_on_the_screen(snapshot):
    stalled = Snapshot.from_answers(URL, *answers(stalled="2 requests wait"))
    assert "STALLED 2 requests wait" in screen(stalled)
    assert "no server answers" in screen(snapshot, note="no server answers")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-"), (0.0, "0ms"), (0.0412, "41ms"), (2.314, "2.31s"), (61.26, "61.3s"), (245, "4m05s")),
        *((7380, "2h03m"), (359_999, "99h59m"), (10**6, "11d")),
    ],
)
def test_times_take_at_most_six_columns(seconds, text):
    assert seconds_text(seconds) == text
    assert len(text) <= 6


def test_both_ends_of_an_id_say_something():
    assert short_id("cmpl-1", 15) == "cmpl-1"
    assert short_id("chatcmpl-3f2a90bb-12", 15) == "chatcmpl-…bb-12"
    assert len(short_id("x" * 100, 15)) == 15


def test_a_server_of_vectors_shows_no_output_tokens():
    info, listed = answers(
        [RUNS | {"phase": "prefill", "completion_tokens": 0, "max_tokens": 1, "why": "it is new"}]
    )
    info["model_spec"] = {"pooling": {"task": "embed"}}
    lines = screen(Snapshot.from_answers(URL, info, listed), width=120)
    (rates,) = (line for line in lines if line.startswith("rates"))
    assert rates.startswith("rates   200 tok/s of texts, 25% cached · 20.0 steps/s")
    (head,) = (line for line in lines if line.startswith("ID"))
    assert "OUT" not in head
    (row,) = (line for line in lines if line.startswith("chatcmpl"))
    assert "0/1" not in row and row.rstrip().endswith("it is new")
    assert head.index("WHY") == row.index("it is new")
