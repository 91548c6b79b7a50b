"""Figures computed by hand against those of `summarize`."""

import pytest

from engine import ConfigError
from engine.cli.bench.load import RequestRecord
from engine.cli.bench.summary import parse_goodput, summarize


def test_latencies_of_one_request(make_record, make_load_run):
    summary = summarize(make_load_run([make_record(sent=1.0, ttft=0.2, itl=0.05, tokens=5)]), {})

    assert summary.ttft_ms.mean == pytest.approx(200)
    assert summary.tpot_ms.mean == pytest.approx(50)
    assert summary.itl_ms.p99 == pytest.approx(50)
    assert summary.e2e_ms.max == pytest.approx(400)


def test_throughput_counts_all_tokens_over_the_whole_time(make_record, make_load_run):
    records = [make_record(sent=0.0, tokens=10), make_record(sent=0.0, ttft=0.1, itl=0.1, tokens=20)]
    summary = summarize(make_load_run(records), {})

    assert summary.duration_s == pytest.approx(2.0)
    assert summary.output_tok_s == pytest.approx(15.0)
    assert summary.total_tok_s == pytest.approx(25.0)
    assert summary.peak_concurrency == 2


def test_a_piece_of_several_tokens_counts_as_several_gaps():
    record = RequestRecord(sent_s=0.0, due_s=0.0, arrivals=[(1.0, 1), (1.3, 3), (1.4, 1)], output_tokens=5)

    assert record.itls_s() == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert record.tpot_s == pytest.approx(0.1)


def test_failures_are_counted_by_reason_and_kept_out_of_latencies(make_record, make_load_run):
    records = [
        make_record(ttft=0.1),
        make_record(ttft=9.0, error="HTTP 500: no"),
        make_record(error="HTTP 500: no"),
    ]
    summary = summarize(make_load_run(records), {})

    assert (summary.completed, summary.failed) == (1, 2)
    assert summary.failures == {"HTTP 500: no": 2}
    assert summary.ttft_ms.max == pytest.approx(100)


def test_goodput_counts_requests_that_meet_every_limit(make_record, make_load_run):
    records = [
        make_record(ttft=0.1, itl=0.01),
        make_record(ttft=0.6, itl=0.01),
        make_record(ttft=0.1, itl=0.2),
    ]
    load = make_load_run(records)
    summary = summarize(load, parse_goodput("ttft:500 tpot:50"))

    assert summary.goodput_rate == pytest.approx(1 / (load.end_s - load.start_s))
    assert summary.attainment == {"ttft": pytest.approx(2 / 3), "tpot": pytest.approx(2 / 3)}


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:-1", "speed:5", "ttft:nan"])
def test_a_bad_goodput_is_refused(text):
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput(text)


def test_steady_window_leaves_out_ramp_up_and_tail(make_record, make_load_run):
    # 10 requests start 1 s apart, each emits 10 tok/s for 30 s: all ten are in flight from 9.1 s to about 30 s.
    records = [make_record(sent=float(i), ttft=0.1, itl=0.1, tokens=300) for i in range(10)]
    summary = summarize(make_load_run(records), {})

    assert summary.steady is not None
    assert summary.steady.start_s == pytest.approx(8.0, abs=1.01)
    assert summary.steady.end_s == pytest.approx(31.0, abs=1.01)
    assert summary.steady.output_tok_s == pytest.approx(98.0, rel=0.04)
    assert summary.steady.output_tok_s > summary.output_tok_s


def test_a_slow_client_is_named(make_record, make_load_run):
    import dataclasses

    load = dataclasses.replace(
        make_load_run([make_record(itl=0.01)]), client_lag_p99_s=0.02, client_cpu_share=0.9
    )
    warnings = summarize(load, {}).warnings

    assert any("event loop" in warning for warning in warnings)
    assert any("0.90 cores" in warning for warning in warnings)
