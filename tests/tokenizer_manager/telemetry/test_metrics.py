"""The page of `/metrics`, as Prometheus' own parser reads it."""

from __future__ import annotations

from array import array

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.runtime.messages import Finish, FinishKind, TextOutput, Usage
from engine.runtime.scheduler_report import (
    RESIDENCY_BUCKETS_S,
    HistogramCounts,
    SchedulerReport,
    SchedulerTotals,
)
from engine.runtime.transport.kv_tiers import TierFigures
from engine.runtime.transport.kv_transfer import TransferFigures
from engine.tokenizer_manager.engine_state import combined
from engine.tokenizer_manager.generation import Choice, Generation
from engine.tokenizer_manager.telemetry.metrics import Metrics

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
    "sessions": "gauge",
    "session_turns_total": "counter",
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
    "request_time_per_output_token_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "finished_reqs_total": "counter",
    "http_responses_total": "counter",
    "resumed_reqs_total": "counter",
    "restarts_total": "counter",
    "steps_total": "counter",
    "step_seconds_total": "counter",
    "encoder_seconds_total": "counter",
    "grammar_build_seconds_total": "counter",
    "grammar_mask_seconds_total": "counter",
    "healthy": "gauge",
    "build_info": "gauge",
}
WITHOUT_MODEL = {"build_info", "http_responses_total"}
"""Metrics that are not about the model."""
UNITS = {"s": "seconds", "ms": "seconds", "mib": "bytes", "kb": "bytes"}
"""Words that Prometheus' naming conventions replace: base units, spelled out."""


def parsed(page: str) -> dict[str, Metric]:
    """Each metric by its name on the page, without `engine:`; the parser leaves out a counter's _total."""
    families = list(text_string_to_metric_families(page))
    assert all(family.name.startswith("engine:") for family in families)
    assert len({family.name for family in families}) == len(families)
    return {
        family.name.removeprefix("engine:") + ("_total" if family.type == "counter" else ""): family
        for family in families
    }


def value(page: str, name: str, **labels: str) -> float:
    [found] = [
        each.value
        for family in parsed(page).values()
        for each in family.samples
        if each.name == f"engine:{name}" and labels.items() <= each.labels.items()
    ]
    return found


def full_page() -> str:
    """A page on which every metric has a sample."""
    metrics = Metrics("org/model", {"version": "1.2", "commit": ""})
    metrics.http_responses.add("200")
    metrics.finished_reqs.add("stop")
    report = SchedulerReport(
        sent_s=1.0,
        new_token_ratio=1e-7,
        policy="lpm",
        waiting_by_reason={"NO_KV": 3},
        stalled="x",
        session_turns={"hit": 2},
        drafts={"suffix 1": 5},
        accepted_drafts={"suffix 1": 3},
    )
    return metrics.render(report)


def test_the_fixed_names_are_there_with_their_types_before_any_report():
    page = Metrics("m").render(None)

    for name, kind in FIXED_NAMES.items():
        assert f"# TYPE engine:{name} {kind}\n" in page


def test_the_page_is_valid_and_no_sample_comes_twice():
    samples = [
        (each.name, *sorted(each.labels.items()))
        for family in parsed(full_page()).values()
        for each in family.samples
    ]
    assert len(set(samples)) == len(samples) > len(FIXED_NAMES)


def test_every_metric_has_a_help_text_and_a_conventional_name():
    for name, family in parsed(full_page()).items():
        words = name.split("_")
        assert family.documentation.endswith("."), name
        assert not UNITS.keys() & set(words), name
        if family.type == "histogram":
            assert words[-1] in ("seconds", "tokens"), name
        if family.type == "gauge":
            assert words[-1] not in ("total", "count", "sum", "bucket"), name


def test_the_served_name_is_a_label_of_what_is_about_the_model():
    for name, family in parsed(full_page()).items():
        expected = {None} if name in WITHOUT_MODEL else {"org/model"}
        assert {each.labels.get("model_name") for each in family.samples} == expected, name


def test_the_build_is_a_metric_with_the_value_1():
    assert value(full_page(), "build_info", version="1.2") == 1


def test_the_schedulers_numbers_are_shown_as_reported():
    report = SchedulerReport.from_flat(
        {
            "sent_s": 1.0,
            "num_running_reqs": 3,
            "prompt_tokens_total": 200,
            "cached_tokens_total": 50,
            "num_swapped_reqs": 2,
            "timed_out_reqs_total": 5,
            "grammar_build_s_total": 0.5,
            "num_steps_total": 10,
            "step_s_total": 2.5,
            "encoder_used_rows": 64,
            "encoder_cached_rows": 128,
            "encoder_tiles_total": 8,
            "encoder_hits_total": 3,
            "encoder_s_total": 0.5,
        }
    )
    page = Metrics("m").render(report)

    expected = {
        "num_running_reqs": 3,
        "prompt_tokens_total": 200,
        "cache_hit_rate": 0.25,
        "num_swapped_reqs": 2,
        "timed_out_reqs_total": 5,
        "grammar_build_seconds_total": 0.5,
        "steps_total": 10,
        "step_seconds_total": 2.5,
        "encoder_used_rows": 64,
        "encoder_cached_rows": 128,
        "encoder_tiles_total": 8,
        "encoder_hits_total": 3,
        "encoder_seconds_total": 0.5,
    }
    assert {name: value(page, name) for name in expected} == expected


def test_reasons_policy_health_and_stall_are_shown_with_their_labels():
    reasons = {"NO_KV": 3, "BEHIND": 1, 'a "b"\\\n': 1}
    report = SchedulerReport(sent_s=1.0, policy="lpm", waiting_by_reason=reasons, stalled="x")
    page = Metrics("m").render(report, healthy=False)

    family = parsed(page)["num_queue_reqs_by_reason"]
    assert {each.labels["reason"]: each.value for each in family.samples} == reasons
    assert value(page, "schedule_policy_info", policy="lpm") == 1
    assert (value(page, "stalled"), value(page, "healthy")) == (1, 0)
    page = Metrics("m").render(None)
    assert (value(page, "stalled"), value(page, "healthy")) == (0, 1)


def test_transfers_are_shown_by_a_disaggregated_engine_alone():
    figures = TransferFigures(
        waiting=1,
        open=2,
        held_pages=30,
        sent_pages=4,
        received_pages=5,
        transfer_s=0.5,
        transfers=6,
        failures={"timeout": 7},
        page_bytes=1000,
    )
    page = Metrics("m").render(SchedulerReport(sent_s=1.0, transfer=figures))
    expected = {
        "transfer_held_pages": 30,
        "transfers_total": 6,
        "transfer_sent_bytes_total": 4000,
        "transfer_received_bytes_total": 5000,
        "transfer_seconds_total": 0.5,
    }
    assert {name: value(page, name) for name in expected} == expected
    assert value(page, "transfer_failures_total", reason="timeout") == 7
    assert [value(page, "transfer_rooms", state=state) for state in ("waiting", "open")] == [1, 2]
    assert "engine:transfer" not in Metrics("m").render(SchedulerReport(sent_s=1.0))


def test_a_disk_tier_is_shown_by_an_engine_that_has_one_alone():
    figures = TierFigures(
        loading_pages=1,
        leased_pages=2,
        lookups=3,
        loaded_tokens=64,
        load_s=0.5,
        timeouts=4,
        stored_bytes=5000,
        used_bytes=7000,
    )
    page = Metrics("m").render(SchedulerReport(sent_s=1.0, tiers={"disk": figures}))
    expected = {
        "kv_tier_loading_pages": 1,
        "kv_tier_leased_pages": 2,
        "kv_tier_used_bytes": 7000,
        "kv_tier_lookups_total": 3,
        "kv_tier_hit_tokens_total": 64,
    }
    assert {name: value(page, name, tier="disk") for name in expected} == expected
    assert value(page, "kv_tier_bytes_total", tier="disk", direction="store") == 5000
    assert value(page, "kv_tier_seconds_total", tier="disk", direction="load") == 0.5
    assert value(page, "kv_tier_failures_total", tier="disk", kind="timeout") == 4
    assert "kv_tier" not in Metrics("m").render(SchedulerReport(sent_s=1.0))
    both = combined([SchedulerReport(sent_s=1.0, tiers={"disk": figures})] * 2, 2.0).tiers["disk"]
    assert (both.lookups, both.loaded_tokens, both.load_s) == (6, 128, 1.0)
    assert both.used_bytes == 7000, "the replicas share the folder"
    host = combined([SchedulerReport(sent_s=1.0, tiers={"host": figures})] * 2, 2.0).tiers["host"]
    assert host.used_bytes == 14000, "each replica has host memory of its own"
    store = SchedulerReport(sent_s=1.0, tiers={"store": TierFigures(lookups=1)})
    page = Metrics("m").render(combined([store, store], 2.0))
    assert "kv_tier_used_bytes" not in page, "only the server knows it"
    assert value(page, "kv_tier_lookups_total", tier="store") == 2


def test_drafts_of_replicas_are_added():
    report = SchedulerReport(
        sent_s=1.0, drafts={"ngram 1": 3, "suffix 1": 5}, accepted_drafts={"suffix 1": 4}
    )
    page = Metrics("m").render(combined([report, report], 2.0))
    assert value(page, "draft_tokens_total", method="ngram", position="1") == 6
    assert value(page, "accepted_draft_tokens_total", method="suffix", position="1") == 8


def test_a_pair_has_the_rooms_of_its_decode_replica():
    prefill = TransferFigures(open=1, held_pages=3, sent_pages=4, transfers=2)
    decode = TransferFigures(
        open=1, waiting=2, held_pages=5, received_pages=4, transfers=2, failures={"lost": 1}
    )
    both = combined([SchedulerReport(sent_s=1.0, transfer=each) for each in (prefill, decode)], 2.0).transfer
    assert both is not None
    assert (both.open, both.waiting, both.transfers, both.failures) == (1, 2, 2, {"lost": 1})
    assert (both.sent_pages, both.received_pages, both.held_pages) == (4, 4, 8)
    assert combined([SchedulerReport(sent_s=1.0)] * 2, 2.0).transfer is None


class Answer:
    """One request that the metrics measure."""

    def __init__(self, prompt_len: int) -> None:
        self.metrics = Metrics("m")
        self.choice = Choice("gen-0", 0, array("i", range(prompt_len)), seed=1)
        self.generation = Generation("gen", [self.choice], 1, 100.0, lambda generation: None)
        self.num_tokens = 0

    def row(self, now_s: float, num_tokens: int, finish: FinishKind | None = None) -> None:
        """So many tokens arrive at a time."""
        self.num_tokens += num_tokens
        usage = Usage(len(self.choice.prompt_ids), self.num_tokens, queue_s=0.25)
        finished = None if finish is None else Finish(finish)
        output = TextOutput("gen-0", "", bytes(4 * num_tokens), usage, finished)
        self.metrics.row_arrived(self.generation, self.choice, output, now_s)

    def sums(self, *names: str) -> dict[str, tuple[float, float]]:
        """Count and sum of histograms."""
        page = self.metrics.render(None)
        return {name: (value(page, f"{name}_count"), value(page, f"{name}_sum")) for name in names}


def test_an_answer_is_measured_by_lengths_and_by_time_per_token_after_the_first():
    answer = Answer(prompt_len=30)
    answer.row(101.0, 1)
    answer.row(101.5, 1)
    answer.row(103.0, 3, FinishKind.LENGTH)

    assert answer.sums(
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
    ) == {
        "request_prompt_tokens": (1, 30),
        "request_generation_tokens": (1, 5),
        "request_time_per_output_token_seconds": (1, 0.5),
        "inter_token_latency_seconds": (4, 2.0),
        "time_to_first_token_seconds": (1, 1.0),
        "e2e_request_latency_seconds": (1, 3.0),
    }
    page = answer.metrics.render(None)
    assert value(page, "request_prompt_tokens_bucket", le="20") == 0
    assert value(page, "request_prompt_tokens_bucket", le="50") == 1


@pytest.mark.parametrize(
    ("finish", "counted"),
    [(FinishKind.STOP, 1), (FinishKind.LENGTH, 1), (FinishKind.ABORT, 0), (FinishKind.ERROR, 0)],
)
def test_only_complete_answers_count_for_lengths(finish, counted):
    answer = Answer(prompt_len=3)
    answer.row(101.0, 1)
    answer.row(102.0, 1, finish)

    names = ("request_prompt_tokens", "request_generation_tokens", "request_time_per_output_token_seconds")
    assert {count for count, _ in answer.sums(*names).values()} == {counted}
    assert value(answer.metrics.render(None), "finished_reqs_total", reason=finish.value) == 1


def test_an_answer_of_one_token_has_no_time_per_token():
    answer = Answer(prompt_len=3)
    answer.row(101.0, 1, FinishKind.STOP)

    assert answer.sums("request_generation_tokens", "request_time_per_output_token_seconds") == {
        "request_generation_tokens": (1, 1),
        "request_time_per_output_token_seconds": (0, 0.0),
    }


def test_the_sources_of_prompts_sum_up_to_their_tokens():
    totals = SchedulerTotals(
        prompt_tokens=100,
        cached_tokens=60,
        prompt_host_tokens=10,
        prompt_tier_tokens=20,
        prompt_received_tokens=5,
    )
    page = Metrics("m").render(SchedulerReport(sent_s=1.0, totals=totals))
    expected = {
        "local_compute": 35,
        "local_cache_hit": 30,
        "host_cache_hit": 10,
        "tier_cache_hit": 20,
        "external_kv_transfer": 5,
    }
    assert {
        source: value(page, "prompt_tokens_by_source_total", source=source) for source in expected
    } == expected
    assert sum(expected.values()) == totals.prompt_tokens


def test_the_residency_of_replicas_is_one_histogram():
    counts = [0] * (len(RESIDENCY_BUCKETS_S) + 1)
    counts[-1] = 2
    one = SchedulerReport(sent_s=1.0, residency={"lifetime": HistogramCounts(tuple(counts), 4000.0)})
    page = Metrics("m").render(combined([one, one, SchedulerReport(sent_s=1.0)], 2.0))
    assert value(page, "kv_block_lifetime_seconds_count") == 4
    assert value(page, "kv_block_lifetime_seconds_sum") == 8000
    assert value(page, "kv_block_lifetime_seconds_bucket", le="1800") == 0
    assert value(page, "kv_block_lifetime_seconds_bucket", le="+Inf") == 4
    assert value(page, "kv_block_reuse_gap_seconds_count") == 0
