"""`Metrics`: the page `/metrics`, in Prometheus' text format.

The scheduler's numbers arrive as totals in its reports and are shown unchanged. Latencies as clients see them, lengths
and refusals are counted here. Names follow SGLang and vLLM where they have the metric. `model_name` is the served name,
never one that a request states. `BuildInfo` is the version that runs, for `engine:build_info` and `/version`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from ...runtime.installation import __version__, source_commit
from ...runtime.messages import FinishKind, TextOutput
from ...runtime.scheduler_report import (
    RESIDENCY_BUCKETS_S,
    HistogramCounts,
    SchedulerReport,
    SchedulerTotals,
)
from ...runtime.transport.kv_tiers import TierFigures
from ...runtime.transport.kv_transfer import TransferFigures
from ..generation import Choice, Generation
from .instruments import NO_LABELS, Histogram, LabeledCounter, buckets, head, sample

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
_TPOT_BUCKETS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.025,
    0.04,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1.0,
    2.5,
)
_LENGTH_BUCKETS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_QUEUE_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_GAUGES: Final = (
    ("num_running_reqs", "Requests that run."),
    ("num_queue_reqs", "Requests that wait."),
    ("kv_used_tokens", "KV slots held by requests."),
    ("kv_cached_tokens", "KV slots in the prefix cache, in use or not."),
    ("kv_total_tokens", "KV slots of the pool."),
    ("new_token_ratio", "Share of its max_tokens that a request is expected to generate."),
    ("num_swapped_reqs", "Requests that wait with their KV on the host."),
    ("num_background_queue_reqs", "Requests of the batch class that wait."),
    ("num_background_running_reqs", "Requests of the batch class that run."),
    ("num_grammar_reqs", "Requests that wait for a grammar."),
    ("host_used_tokens", "Slots of the host's KV pool that requests hold."),
    ("host_total_tokens", "Slots of the host's KV pool."),
    ("pinned_tokens", "KV slots of pinned prefixes."),
    ("num_sessions", "Sessions whose turns the prefix cache counts."),
    ("encoder_used_rows", "Rows of images that running requests need."),
    ("encoder_cached_rows", "Rows of images that are kept for further requests."),
    ("encoder_total_rows", "Rows of the encoder's buffer."),
    ("num_adapters", "LoRA adapters in host memory."),
    ("num_adapter_slots_used", "Adapter slots of the device that running requests use."),
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
    ("num_steps_total", "Steps of the model; each round of a multi-step decode is one."),
    ("step_s_total", "Seconds that steps took."),
    ("grammar_builds_total", "Grammars that the scheduler's process compiled, or could not compile."),
    ("grammar_build_s_total", "Seconds for that, on a thread of its own."),
    ("grammar_masks_total", "Token masks that grammars filled."),
    ("grammar_mask_s_total", "Seconds for that."),
    ("overruled_tokens_total", "Tokens that replace one that a grammar refused."),
    ("encoder_tiles_total", "Tiles of images that were encoded."),
    ("encoder_hits_total", "Tiles of images that a request found encoded."),
    ("encoder_s_total", "Seconds for encoding tiles."),
    ("kv_events_total", "Events of the prefix cache that were published (--kv-events)."),
    ("kv_event_replays_total", "Times a subscriber asked for KV events that it had missed."),
)
"""Figures of `SchedulerReport` that only grow while the scheduler's process lives."""

_OF_REPLICA: Final[Mapping[str, tuple[str, str, Callable[[SchedulerReport, bool], float]]]] = {
    "replica_healthy": ("1 if the replica runs.", "gauge", lambda report, healthy: int(healthy)),
    "replica_num_running_reqs": (
        "Requests that run on the replica.",
        "gauge",
        lambda report, healthy: report.num_running_reqs,
    ),
    "replica_num_queue_reqs": (
        "Requests that wait for the replica.",
        "gauge",
        lambda report, healthy: report.num_queue_reqs,
    ),
    "replica_kv_used_tokens": (
        "KV slots of the replica that requests hold.",
        "gauge",
        lambda report, healthy: report.kv.used_tokens,
    ),
    "replica_prompt_tokens_total": (
        "Prompt tokens of the replica's requests, cached or computed.",
        "counter",
        lambda report, healthy: report.totals.prompt_tokens,
    ),
    "replica_cached_tokens_total": (
        "Of these, tokens taken from its prefix cache.",
        "counter",
        lambda report, healthy: report.totals.cached_tokens,
    ),
    "replica_generation_tokens_total": (
        "Tokens generated by the replica.",
        "counter",
        lambda report, healthy: report.totals.generation_tokens,
    ),
}
"""Figures of each replica, with `--dp`."""

_OF_BLOCKS: Final = {
    "lifetime": "Entry of a sampled page into the prefix cache to its eviction.",
    "idle_before_evict": "Last use of a sampled page, or its entry, to its eviction.",
    "reuse_gap": "Time between two uses of a sampled page of the prefix cache.",
}
"""Histograms of `SchedulerReport.residency`."""

_SHOWN_AS: Final = {
    "encoder_s_total": "encoder_seconds_total",
    "grammar_build_s_total": "grammar_build_seconds_total",
    "grammar_mask_s_total": "grammar_mask_seconds_total",
    "num_sessions": "sessions",
    "num_steps_total": "steps_total",
    "step_s_total": "step_seconds_total",
}
"""Names of metrics that differ from those of `SchedulerReport`: Prometheus spells units out."""


class ImageFigures(Protocol):
    """The figures of an `ImageStore`."""

    num_taken: int
    num_refused: Counter[str]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        ...

    @property
    def num_files(self) -> int:
        """Images that have one."""
        ...


class Metrics:
    """All metrics of the process.

    Attributes:
        time_to_first_token, inter_token_latency, e2e_request_latency, queue_time: in seconds, per request, as this
            process sees them; a row with several tokens counts its time evenly for each.
        time_per_output_token: in seconds, the mean of a request after its first token.
        prompt_lengths, output_lengths: in tokens, of requests that ended with their answer complete.
        finished_reqs: by finish reason.
        http_responses: by status.
        num_resumed_reqs: submitted again because a process was lost.
        num_restarts: of scheduler and detokenizer after a loss.
        images: those of prompts; None: the model sees none.
    """

    def __init__(self, model_name: str = "", build: Mapping[str, str] = NO_LABELS) -> None:
        """Start at 0.

        Args:
            model_name: the served name; a label of every metric that is about requests to it.
            build: the labels of `engine:build_info`.
        """
        self._labels = {"model_name": model_name}
        self._build = build
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "Arrival of a request to its first token.", _TTFT_BUCKETS_S
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "Time between tokens of a request.", _ITL_BUCKETS_S
        )
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of a request after its first token.",
            _TPOT_BUCKETS_S,
        )
        self.e2e_request_latency = Histogram(
            "e2e_request_latency_seconds", "Arrival of a request to its end.", _E2E_BUCKETS_S
        )
        self.queue_time = Histogram(
            "queue_time_seconds", "Arrival at the scheduler to first admission.", _QUEUE_BUCKETS_S
        )
        self.prompt_lengths = Histogram(
            "request_prompt_tokens", "Prompt tokens of a request, cached or computed.", _LENGTH_BUCKETS
        )
        self.output_lengths = Histogram(
            "request_generation_tokens", "Tokens generated for a request.", _LENGTH_BUCKETS
        )
        self.finished_reqs = LabeledCounter(
            "finished_reqs_total", "Requests that ended, by reason.", "reason"
        )
        self.num_resumed_reqs = 0
        self.num_restarts = 0
        self.images: ImageFigures | None = None
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
        if output.vector:
            self.queue_time.observe(output.usage.queue_s)
        if output.finish is not None:
            self.finished_reqs.add(output.finish.kind.value)
            if output.finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
                self._answered(generation, choice, output, now_s)

    def _answered(self, generation: Generation, choice: Choice, output: TextOutput, now_s: float) -> None:
        """Measure a request with a complete answer."""
        usage = output.usage
        self.e2e_request_latency.observe(now_s - generation.arrival_s)
        self.prompt_lengths.observe(usage.prompt_tokens)
        self.output_lengths.observe(usage.completion_tokens)
        first_s, last_s = choice.first_token_s, choice.last_token_s
        if first_s is not None and last_s is not None and usage.completion_tokens > 1:
            self.time_per_output_token.observe((last_s - first_s) / (usage.completion_tokens - 1))

    def render(
        self,
        report: SchedulerReport | None,
        *,
        healthy: bool = True,
        replicas: Sequence[tuple[SchedulerReport | None, bool]] = (),
    ) -> str:
        """The page, from the latest report and the counts of this process.

        Args:
            report: the latest of all schedulers as one; None before the first.
            healthy: what `/health` says.
            replicas: the latest report of each scheduler, and whether the replica is healthy.
        """
        lines = [
            *head("build_info", "The version that runs, and what it computes with.", "gauge"),
            sample("build_info", self._build, 1),
            *self._of_scheduler(report if report is not None else SchedulerReport(sent_s=0.0)),
            *self._value("healthy", "1 if /health is 200.", "gauge", int(healthy)),
            *self._value(
                "resumed_reqs_total",
                "Requests submitted again after a process was lost.",
                "counter",
                self.num_resumed_reqs,
            ),
            *self._value(
                "restarts_total", "Restarts of processes after one was lost.", "counter", self.num_restarts
            ),
        ]
        if self.images is not None:
            lines += self._of_images(self.images)
        if len(replicas) > 1:
            lines += self._of_replicas(replicas)
        own = (
            self.time_to_first_token,
            self.inter_token_latency,
            self.time_per_output_token,
            self.e2e_request_latency,
            self.queue_time,
            self.prompt_lengths,
            self.output_lengths,
            self.finished_reqs,
        )
        for metric in own:
            lines += metric.lines(self._labels)
        lines += self.http_responses.lines()
        return "\n".join(lines) + "\n"

    def _of_images(self, images: ImageFigures) -> Iterator[str]:
        yield from self._value("images_total", "Images that requests got.", "counter", images.num_taken)
        yield from self._value(
            "image_cache_bytes", "Size of the files with tiles.", "gauge", images.num_bytes
        )
        yield from self._value("cached_images", "Images with such a file.", "gauge", images.num_files)
        yield from head("refused_images_total", "Images that were refused, by code of the error.", "counter")
        for code, count in sorted(images.num_refused.items()):
            yield sample("refused_images_total", {**self._labels, "code": code}, count)

    def _of_scheduler(self, report: SchedulerReport) -> Iterator[str]:
        """The lines of the scheduler's numbers."""
        figures = report.flat()
        for kind, metrics in (("gauge", _GAUGES), ("counter", _TOTALS)):
            for name, text in metrics:
                yield from self._value(_SHOWN_AS.get(name, name), text, kind, figures[name])
        hit_rate = report.totals.cached_tokens / max(report.totals.prompt_tokens, 1)
        text = "Share of all prompt tokens so far that the prefix cache had."
        yield from self._value("cache_hit_rate", text, "gauge", hit_rate)
        yield from head("num_queue_reqs_by_reason", "Requests that wait, by what they wait for.", "gauge")
        for reason, count in sorted(report.waiting_by_reason.items()):
            yield sample("num_queue_reqs_by_reason", {**self._labels, "reason": reason}, count)
        text = "Later turns of sessions: all of an earlier turn was cached, or it was evicted or rewritten."
        yield from head("session_turns_total", text, "counter")
        for outcome, count in sorted(report.session_turns.items()):
            yield sample("session_turns_total", {**self._labels, "outcome": outcome}, count)
        yield from self._of_prompts(report.totals)
        for block_name, text in _OF_BLOCKS.items():
            name, found = (
                f"kv_block_{block_name}_seconds",
                report.residency.get(block_name, HistogramCounts()),
            )
            yield from head(name, text, "histogram")
            counts_of_buckets = found.counts or (0,) * (len(RESIDENCY_BUCKETS_S) + 1)
            yield from buckets(name, RESIDENCY_BUCKETS_S, counts_of_buckets, found.sum_s, self._labels)
        for name, text, counts in (
            ("draft_tokens_total", "Draft tokens that steps have checked.", report.drafts),
            (
                "accepted_draft_tokens_total",
                "Draft tokens that were right: each saved its request a step.",
                report.accepted_drafts,
            ),
        ):
            yield from head(name, f"{text} The last position stands for all further ones.", "counter")
            for source, count in sorted(counts.items()):
                method, position = source.split()
                yield sample(name, {**self._labels, "method": method, "position": position}, count)
        yield from self._value(
            "stalled", "1 if requests wait and nothing moves.", "gauge", int(bool(report.stalled))
        )
        yield from head("schedule_policy_info", "The policy that orders the queue now.", "gauge")
        if report.policy:
            yield sample("schedule_policy_info", {**self._labels, "policy": report.policy}, 1)
        if report.transfer is not None:
            yield from self._of_transfers(report.transfer)
        for tier, figures_of_tier in report.tiers.items():
            yield from self._of_tier(tier, figures_of_tier)

    def _of_prompts(self, totals: SchedulerTotals) -> Iterator[str]:
        """The prompt tokens by source, with vLLM's names where it has the source."""
        yield from head(
            "prompt_tokens_by_source_total",
            "Prompt tokens of admitted requests, by what has computed or kept them.",
            "counter",
        )
        received, cached = totals.prompt_received_tokens, totals.cached_tokens
        host, tier = totals.prompt_host_tokens, totals.prompt_tier_tokens
        for source, count in (
            ("local_compute", totals.prompt_tokens - received - cached),
            ("local_cache_hit", cached - host - tier),
            ("host_cache_hit", host),
            ("tier_cache_hit", tier),
            ("external_kv_transfer", received),
        ):
            yield sample("prompt_tokens_by_source_total", {**self._labels, "source": source}, count)

    def _of_tier(self, tier: str, figures: TierFigures) -> Iterator[str]:
        """The lines of a tier of the prefix cache; an engine has one."""
        labels = {**self._labels, "tier": tier}
        for name, text, kind, value in (
            ("kv_tier_lookups_total", "Prompts that were looked up.", "counter", figures.lookups),
            ("kv_tier_hit_tokens_total", "Prompt tokens that were loaded.", "counter", figures.loaded_tokens),
            (
                "kv_tier_loading_pages",
                "Pages of the KV pool that are being loaded.",
                "gauge",
                figures.loading_pages,
            ),
            (
                "kv_tier_leased_pages",
                "Pages that are locked while they are stored.",
                "gauge",
                figures.leased_pages,
            ),
            ("kv_tier_used_bytes", "Bytes that the tier holds.", "gauge", figures.used_bytes),
        ):
            if value >= 0:  # else it is not known: a server has it
                yield from head(name, text, kind)
                yield sample(name, labels, value)
        for name, text, values in (
            (
                "kv_tier_bytes_total",
                "Bytes of KV that were loaded and stored.",
                {"load": figures.loaded_bytes, "store": figures.stored_bytes},
            ),
            (
                "kv_tier_seconds_total",
                "Seconds for that.",
                {"load": figures.load_s, "store": figures.store_s},
            ),
        ):
            yield from head(name, text, "counter")
            for direction, number in values.items():
                yield sample(name, {**labels, "direction": direction}, number)
        yield from head(
            "kv_tier_failures_total", "Answers that came too late, and commands that failed.", "counter"
        )
        for kind, count in (
            ("timeout", figures.timeouts),
            ("lookup", figures.lookup_errors),
            ("load", figures.load_errors),
            ("store", figures.store_errors),
        ):
            yield sample("kv_tier_failures_total", {**labels, "kind": kind}, count)

    def _of_transfers(self, figures: TransferFigures) -> Iterator[str]:
        """The lines of a disaggregated engine."""
        yield from head(
            "transfer_rooms", "Prompts that another engine computes or decodes, by state.", "gauge"
        )
        for state, count in (("waiting", figures.waiting), ("open", figures.open)):
            yield sample("transfer_rooms", {**self._labels, "state": state}, count)
        text = "Pages that transfers hold: to be written (decode), or locked for it (prefill)."
        yield from self._value("transfer_held_pages", text, "gauge", figures.held_pages)
        for name, text, value in (
            ("transfers_total", "Prompts that were handed over.", figures.transfers),
            (
                "transfer_sent_bytes_total",
                "Bytes of KV that decode engines were sent.",
                figures.sent_pages * figures.page_bytes,
            ),
            (
                "transfer_received_bytes_total",
                "Bytes of KV that came from prefill engines.",
                figures.received_pages * figures.page_bytes,
            ),
            (
                "transfer_seconds_total",
                "Seconds of writes (prefill), or from the claims of prompts to their arrival (decode).",
                figures.transfer_s,
            ),
        ):
            yield from self._value(name, text, "counter", value)
        yield from head("transfer_failures_total", "Prompts that were not handed over, by reason.", "counter")
        for reason, count in sorted(figures.failures.items()):
            yield sample("transfer_failures_total", {**self._labels, "reason": reason}, count)

    def _of_replicas(self, replicas: Sequence[tuple[SchedulerReport | None, bool]]) -> Iterator[str]:
        """The lines of each replica's own numbers; what is summed above has the name without `replica_`."""
        rows = [(report or SchedulerReport(sent_s=0.0), healthy) for report, healthy in replicas]
        for name, (text, kind, value) in _OF_REPLICA.items():
            yield from head(name, text, kind)
            for number, (report, healthy) in enumerate(rows):
                yield sample(name, {**self._labels, "replica": str(number)}, value(report, healthy))

    def _value(self, name: str, text: str, kind: str, value: float) -> Iterator[str]:
        """The lines of a metric with one value."""
        yield from head(name, text, kind)
        yield sample(name, self._labels, value)


class BuildInfo(msgspec.Struct, frozen=True):
    """The version that runs.

    Attributes:
        version: of the engine.
        commit: of its source; "" if it is not known.
        torch: version of torch, with its local part.
        device: cpu or cuda.
        backend: the attention backend.
        instruction_set: that the kernels are compiled for: avx2, amx, sm_90, ...
    """

    version: str
    commit: str = ""
    torch: str = ""
    device: str = ""
    backend: str = ""
    instruction_set: str = ""

    def labels(self) -> dict[str, str]:
        """Its fields as labels of a metric."""
        return {name: str(value) for name, value in msgspec.structs.asdict(self).items()}


def read_build_info(facts: Mapping[str, str]) -> BuildInfo:
    """The build of this installation.

    Args:
        facts: of the scheduler's process; see `model_runner.build_facts`. Further ones are ignored.
    """
    names = {"torch", "device", "backend", "instruction_set"} & facts.keys()
    return BuildInfo(__version__, source_commit(), **{name: facts[name] for name in names})
