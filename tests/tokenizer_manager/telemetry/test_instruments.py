from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from engine.tokenizer_manager.telemetry.instruments import Histogram, LabeledCounter, sample


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


def test_labels_come_before_those_of_the_metric_itself():
    counter = LabeledCounter("x_total", "X.", "reason")
    counter.add("b")
    counter.add("a")
    histogram = Histogram("y", "Y.", (1.0,))

    assert list(counter.lines({"model_name": "m"}))[2:] == [
        'engine:x_total{model_name="m",reason="a"} 1',
        'engine:x_total{model_name="m",reason="b"} 1',
    ]
    assert list(histogram.lines({"model_name": "m"}))[2] == 'engine:y_bucket{model_name="m",le="1"} 0'


def test_any_text_is_a_label():
    for text in ("", "org/model", 'a "b"', "a\\b\\n", "two\nlines", "模型", "a,b={}"):
        [family] = text_string_to_metric_families(sample("x", {"name": text, "other": "y"}, 1) + "\n")

        assert family.samples[0].labels == {"name": text, "other": "y"}
