"""The page as text: what is in it, how large it gets, and that nothing from outside becomes markup."""

from __future__ import annotations

import json
import re

import pytest

from engine.cli.trace import html as page
from engine.cli.trace.html import Origin, encode_json, page_data, render_page, wait_group
from engine.cli.trace.story import SpanKind
from engine.cli.trace.timeline import read_timeline
from engine.scheduler.records.decision_log import Arrived, PassRecord
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict

ORIGIN = Origin("decisions.log", page_size=16)
HOSTILE = [
    "</script><script>document.documentElement.dataset.owned='1'</script>",
    "<!--<script>",
    "{{data}} {{script}} \\u003c",
    "\u2028\u2029'\"`${1}",
    "<img src=x onerror=alert(1)>",
]


def data_of(text):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def log_of(rids):
    yield from (Arrived(1.0, rid, 8, 4, tenant=rid, group=rid) for rid in rids)
    verdicts = [Verdict(rid, AddReqResult.NO_TOKEN, Reason.NO_KV, need=4_176, have=3_904) for rid in rids]
    yield PassRecord(1.1, 1, num_waiting=len(rids), verdicts=verdicts, notes=list(rids), policy=rids[0])


@pytest.fixture
def timeline(sample_engine):
    return read_timeline(sample_engine(num_requests=60, num_pages=160).records())


def decode_spans(data):
    """The other side of `_span_numbers`, as the script reads it."""
    requests, at = data["requests"], 0
    spans = []
    for size in requests["numSpans"]:
        position = 0
        for _ in range(size):
            flags, gap, more = requests["spans"][at : at + 3]
            first, last = position + gap, position + gap + more
            position, at = last + 1, at + 3
            verdict = requests["spans"][at : at + 9] if flags & 8 else None
            at += 9 if verdict else 0
            spans.append((flags & 3, bool(flags & 4), first, last, verdict))
    assert at == len(requests["spans"])
    return spans


def test_the_data_hold_every_span_and_every_figure(timeline):
    data = data_of(render_page(timeline, ORIGIN))

    spans = decode_spans(data)
    expected = [span for story in timeline.requests for span in story.spans]
    assert [each[:4] for each in spans] == [(s.kind, s.on_host, s.first, s.last) for s in expected]
    reasons = list(Reason)
    for (*_, verdict), span in zip(spans, expected, strict=True):
        assert (verdict is None) == (span.num_verdicts == 0)
        if verdict:
            assert reasons[verdict[0]] is span.reason
            assert verdict[3:] == [
                span.prefix_len,
                span.extend_len,
                span.output_len,
                span.need,
                span.have,
                span.first_have,
            ]
    total = 0
    for delta, waiting in zip(data["passes"]["waiting"], timeline.passes.num_waiting, strict=True):
        total += delta
        assert total == waiting
    assert sum(data["passes"]["restReason"][1::2]) == len(timeline.passes)
    assert data["leftOut"] == ""


def test_the_page_needs_nothing_from_outside(timeline):
    text = render_page(timeline, ORIGIN)
    assert not re.search(r'(src|href|action)\s*=\s*["\']', text)
    assert "@import" not in text
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg"
    }  # a name, never fetched
    assert "default-src 'none'" in text
    assert not re.findall(r"\{\{\w+\}\}", text)


def test_nothing_from_a_client_becomes_markup():
    text = render_page(read_timeline(log_of(HOSTILE)), Origin(HOSTILE[0], model=HOSTILE[1]))

    assert text.count("<script") == 2
    assert text.count("</script") == 2
    assert "<img" not in text
    data = data_of(text)
    assert data["requests"]["rid"] == HOSTILE
    assert list(data["requests"]["tenant"].values()) == HOSTILE
    assert data["passes"]["notes"] == [[0, HOSTILE]]
    assert "<title>Scheduler trace · &lt;/script&gt;" in text


def test_json_in_a_script_element_holds_no_markup():
    text = encode_json({"a": ["</script>", "<!--", "\u2028"]})
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text) == {"a": ["</script>", "<!--", "\u2028"]}


def test_long_texts_are_cut():
    data = data_of(render_page(read_timeline(log_of(["x" * 10_000])), ORIGIN))
    assert len(data["requests"]["rid"][0]) == page.MAX_TEXT_LEN


def test_every_reason_has_a_color():
    waits = {reason: wait_group(reason) for reason in Reason}
    assert set(waits.values()) == {"memory", "compute", "shared", "queue"}
    assert waits[Reason.NO_KV] == "memory"
    assert waits[Reason.CHUNK_BUDGET] == "compute"
    assert waits[Reason.GRAMMAR_PENDING] == "shared"
    assert waits[Reason.NO_ROW] == "queue"


def test_budgets_without_a_limit_fit_the_page(timeline):
    timeline.passes.kv_before[0] = 1 << 60
    assert data_of(render_page(timeline, ORIGIN))["passes"]["kvBefore"][0] == 2**31 - 1


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("MAX_PASSES", 100, "Only the last 100 of"),
        ("MAX_REQUESTS", 10, "Only the last 10 of 60 requests"),
        ("MAX_SPANS", 250, "are drawn as one"),
        ("MAX_MARKS", 3, "Only 3 of"),
    ],
)
def test_what_is_too_much_for_a_page_is_left_out_and_said(monkeypatch, timeline, limit, value, words):
    monkeypatch.setattr(page, limit, value)

    data = page_data(timeline, ORIGIN)

    assert words in data["leftOut"]
    assert len(data["passes"]["start"]) <= (100 if limit == "MAX_PASSES" else len(timeline.passes))
    if limit == "MAX_REQUESTS":
        assert data["requests"]["rid"] == [story.rid for story in timeline.requests[-10:]]
    if limit == "MAX_SPANS":
        before = sum(len(story.spans) for story in timeline.requests)
        assert len(decode_spans(data)) < before
        chunks = [
            s.extend_len for story in timeline.requests for s in story.spans if s.kind is SpanKind.PREFILL
        ]
        drawn = [verdict[4] for kind, *_, verdict in decode_spans(data) if kind == SpanKind.PREFILL]
        assert sum(drawn) == sum(chunks)


@pytest.mark.slow
def test_a_page_of_the_largest_log_stays_small(sample_engine):
    engine = sample_engine(num_requests=10_000, num_pages=600, requests_per_s=12)
    text = render_page(read_timeline(engine.records()), ORIGIN)
    assert len(text) < 15e6
