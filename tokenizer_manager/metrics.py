"""`Metrics`: the page `/metrics`, in Prometheus' text format.

The scheduler's numbers arrive as totals in its reports and are shown unchanged. Latencies as clients see them and
refusals are counted here.

prometheus_client is not used: it takes 55 ms to import (it has an HTTP server), counts under a lock, and needs to own
the counters, which are the scheduler's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

from ..runtime.messages import FinishKind, SchedulerReport, TextOutput
from .generation import Choice, Generation

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
_ITL_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_E2E_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_QUEUE_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_GAUGES: Final = (
    ("num_running_reqs", "Requests that run."),
    ("num_queue_reqs", "Requests that wait."),
    ("kv_used_tokens", "KV slots held by requests."),
    ("kv_cached_tokens", "KV slots in the prefix cache, in use or not."),
    ("kv_total_tokens", "KV slots of the pool."),
    ("new_token_ratio", "Share of its max_tokens that a request is expected to generate."),
    ("num_swapped_reqs", "Requests that wait with their KV on the host."),
    ("num_grammar_reqs", "Requests that wait for a grammar."),
    ("host_used_tokens", "Slots of the host's KV pool that requests hold."),
    ("host_total_tokens", "Slots of the host's KV pool."),
    ("pinned_tokens", "KV slots of pinned prefixes."),
    ("detokenizer_reqs", "Requests that the detokenizer has a text state of."),
)
_TOTALS: Final = (
    ("retracted_reqs_total", "Times a request lost its KV memory to others and was computed again."),
    ("prompt_tokens_total", "Prompt tokens of admitted requests, cached or computed."),
    ("generation_tokens_total", "Tokens generated."),
    ("cached_tokens_total", "Prompt tokens taken from the prefix cache."),
    ("evicted_tokens_total", "Tokens dropped from the prefix cache to make room."),
    ("preempted_reqs_total", "Times a request lost its KV memory to a more urgent one."),
    ("swapped_out_tokens_total", "Tokens whose KV was copied to the host."),
    ("swapped_in_tokens_total", "Tokens whose KV was copied back from the host."),
    ("timed_out_reqs_total", "Requests that ran into queue_timeout or timeout."),
    ("draft_tokens_total", "Draft tokens that steps have checked (--speculative)."),
    ("accepted_draft_tokens_total", "Draft tokens that were right: each saved its request a step."),
    ("grammar_builds_total", "Grammars that the scheduler's process compiled, or could not compile."),
    ("grammar_build_s_total", "Seconds for that, on a thread of its own."),
    ("grammar_masks_total", "Token masks that grammars filled."),
    ("grammar_mask_s_total", "Seconds for that."),
    ("overruled_tokens_total", "Tokens that replace one that a grammar refused."),
)


class Histogram:
    """Counts observations by bucket."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self) -> Iterator[str]:
        """Its lines of the text format; buckets are cumulative."""
        yield from _head(self._name, self._text, "histogram")
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'engine:{self._name}_bucket{{le="{label}"}} {total}'
        yield f"engine:{self._name}_sum {self._sum!r}"
        yield f"engine:{self._name}_count {total}"


class LabeledCounter:
    """A counter with one label that has few values."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._counts: dict[str, int] = {}

    def add(self, value: str) -> None:
        """Add 1 for this label value."""
        self._counts[value] = self._counts.get(value, 0) + 1

    def lines(self) -> Iterator[str]:
        """Its lines of the text format."""
        yield from _head(self._name, self._text, "counter")
        for value, count in sorted(self._counts.items()):
            yield f'engine:{self._name}{{{self._label}="{value}"}} {count}'


class Metrics:
    """All metrics of the process.

    Attributes:
        time_to_first_token, inter_token_latency, e2e_request_latency, queue_time: in seconds, per request, as this
            process sees them; a row with several tokens counts its time evenly for each.
        finished_reqs: by finish reason.
        http_responses: by status.
        num_resumed_reqs: submitted again because a process was lost.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", _TTFT_BUCKETS_S
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "Time between tokens of a request.", _ITL_BUCKETS_S
        )
        self.e2e_request_latency = Histogram(
            "e2e_request_latency_seconds", "Arrival of a request to its end.", _E2E_BUCKETS_S
        )
        self.queue_time = Histogram(
            "queue_time_seconds", "Arrival at the scheduler to first admission.", _QUEUE_BUCKETS_S
        )
        self.finished_reqs = LabeledCounter(
            "finished_reqs_total", "Requests that ended, by reason.", "reason"
        )
        self.num_resumed_reqs = 0
        self.http_responses = LabeledCounter("http_responses_total", "HTTP responses, by status.", "status")

    def row_arrived(self, generation: Generation, choice: Choice, output: TextOutput, now_s: float) -> None:
        """Measure a row, and set the token times of its choice."""
        num_tokens = len(output.token_ids) // 4
        if num_tokens:
            if choice.last_token_s is None:
                choice.first_token_s = now_s
                self.time_to_first_token.observe(now_s - generation.arrival_s)
                self.queue_time.observe(output.usage.queue_s)
            else:
                gap_s = (now_s - choice.last_token_s) / num_tokens
                self.inter_token_latency.observe(gap_s, num_tokens)
            choice.last_token_s = now_s
        if output.finish is not None:
            self.finished_reqs.add(output.finish.kind.value)
            if output.finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
                self.e2e_request_latency.observe(now_s - generation.arrival_s)

    def render(self, report: SchedulerReport | None) -> str:
        """The page, from the latest report and the counts of this process."""
        shown = report if report is not None else SchedulerReport(sent_s=0.0)
        lines: list[str] = []
        for name, text in _GAUGES:
            lines += (*_head(name, text, "gauge"), f"engine:{name} {getattr(shown, name)!r}")
        for name, text in _TOTALS:
            lines += (*_head(name, text, "counter"), f"engine:{name} {getattr(shown, name)!r}")
        hit_rate = shown.cached_tokens_total / max(shown.prompt_tokens_total, 1)
        lines += _head(
            "cache_hit_rate", "Share of all prompt tokens so far that the prefix cache had.", "gauge"
        )
        lines.append(f"engine:cache_hit_rate {hit_rate!r}")
        lines += _head("num_queue_reqs_by_reason", "Requests that wait, by what they wait for.", "gauge")
        lines += (
            f'engine:num_queue_reqs_by_reason{{reason="{_label(reason)}"}} {count!r}'
            for reason, count in sorted(shown.waiting_by_reason.items())
        )
        lines += _head("resumed_reqs_total", "Requests submitted again after a process was lost.", "counter")
        lines.append(f"engine:resumed_reqs_total {self.num_resumed_reqs}")
        lines += _head("stalled", "1 if requests wait and nothing moves.", "gauge")
        lines.append(f"engine:stalled {int(bool(shown.stalled))}")
        lines += _head("schedule_policy_info", "The policy that orders the queue now.", "gauge")
        if shown.policy:
            lines.append(f'engine:schedule_policy_info{{policy="{_label(shown.policy)}"}} 1')
        own = (
            self.time_to_first_token,
            self.inter_token_latency,
            self.e2e_request_latency,
            self.queue_time,
            self.finished_reqs,
            self.http_responses,
        )
        for metric in own:
            lines += metric.lines()
        return "\n".join(lines) + "\n"


def _label(value: str) -> str:
    """A label's value, escaped for the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, text: str, kind: str) -> tuple[str, str]:
    return f"# HELP engine:{name} {text}", f"# TYPE engine:{name} {kind}"
