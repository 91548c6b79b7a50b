from __future__ import annotations

import re

from engine.runtime.messages import SchedulerReport
from engine.tokenizer_manager.metrics import Histogram, Metrics

SAMPLE = re.compile(r'^[a-z_:0-9]+(\{[a-z]+="[^"]*"\})? -?[0-9.e+-]+$')
FIXED_NAMES = {
    "num_running_reqs": "gauge",
    "num_queue_reqs": "gauge",
    "kv_used_tokens": "gauge",
    "kv_cached_tokens": "gauge",
    "kv_total_tokens": "gauge",
    "cache_hit_rate": "gauge",
    "new_token_ratio": "gauge",
    "retracted_reqs_total": "counter",
    "prompt_tokens_total": "counter",
    "generation_tokens_total": "counter",
    "cached_tokens_total": "counter",
    "num_swapped_reqs": "gauge",
    "num_grammar_reqs": "gauge",
    "num_queue_reqs_by_reason": "gauge",
    "host_used_tokens": "gauge",
    "host_total_tokens": "gauge",
    "pinned_tokens": "gauge",
    "detokenizer_reqs": "gauge",
    "stalled": "gauge",
    "schedule_policy_info": "gauge",
    "preempted_reqs_total": "counter",
    "swapped_out_tokens_total": "counter",
    "swapped_in_tokens_total": "counter",
    "timed_out_reqs_total": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "queue_time_seconds": "histogram",
}


def test_the_fixed_names_are_there_with_their_types_before_any_report():
    page = Metrics().render(None)

    for name, kind in FIXED_NAMES.items():
        assert f"# TYPE engine:{name} {kind}\n" in page


def test_every_line_is_a_comment_or_a_sample_and_none_comes_twice():
    metrics = Metrics()
    metrics.http_responses.add("200")
    metrics.queue_time.observe(0.3)
    lines = metrics.render(SchedulerReport(sent_s=1.0, new_token_ratio=1e-7)).splitlines()

    samples = [line for line in lines if not line.startswith("# ")]
    assert all(SAMPLE.match(line) for line in samples)
    assert len({line.split(" ")[0] for line in samples}) == len(samples)


def test_the_schedulers_numbers_are_shown_as_reported():
    report = SchedulerReport(sent_s=1.0, num_running_reqs=3, prompt_tokens_total=200, cached_tokens_total=50)
    page = Metrics().render(report)

    assert "engine:num_running_reqs 3\n" in page
    assert "engine:prompt_tokens_total 200\n" in page
    assert "engine:cache_hit_rate 0.25\n" in page


def test_reasons_policy_and_stall_are_shown_with_their_labels():
    report = SchedulerReport(
        sent_s=1.0,
        num_swapped_reqs=2,
        timed_out_reqs_total=5,
        policy="lpm",
        waiting_by_reason={"NO_KV": 3, "BEHIND": 1, 'a "b"\\\n': 1},
        stalled="x",
    )
    page = Metrics().render(report)

    assert (
        'engine:num_queue_reqs_by_reason{reason="BEHIND"} 1\n'
        'engine:num_queue_reqs_by_reason{reason="NO_KV"} 3\n'
        'engine:num_queue_reqs_by_reason{reason="a \\"b\\"\\\\\\n"} 1\n'
    ) in page
    assert 'engine:schedule_policy_info{policy="lpm"} 1\n' in page
    assert "engine:stalled 1\n" in page
    assert "engine:num_swapped_reqs 2\n" in page
    assert "engine:timed_out_reqs_total 5\n" in page
    assert "engine:stalled 0\n" in Metrics().render(None)


def test_histogram_buckets_are_cumulative_and_include_their_bound():
    histogram = Histogram("x", "X.", (0.1, 1.0))
    histogram.observe(0.1)
    histogram.observe(0.5, 2)
    histogram.observe(7.0)

    assert list(histogram.lines())[2:] == [
        'engine:x_bucket{le="0.1"} 1',
        'engine:x_bucket{le="1"} 3',
        'engine:x_bucket{le="+Inf"} 4',
        "engine:x_sum 8.1",
        "engine:x_count 4",
    ]
