"""`SchedulerReport`: a scheduler's figures: heartbeat, `/metrics`, `/server_info`, `/v1/loads` and `engine top`.

Figures of one subject are a record. `SchedulerReport.flat` gives each the name under which users know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from .transport.kv_tiers import TierFigures
from .transport.kv_transfer import TransferFigures
from .transport.message_base import Message, Record


class KVFigures(Record, frozen=True):
    """Slots of the device's KV pool.

    Attributes:
        used_tokens: held by requests.
        cached_tokens: in the prefix cache, locked or not.
    """

    used_tokens: int = 0
    cached_tokens: int = 0
    total_tokens: int = 0


class HostFigures(Record, frozen=True):
    """Slots of the host's KV pool; `used_tokens`: held by swapped requests."""

    used_tokens: int = 0
    total_tokens: int = 0


class EncoderFigures(Record, frozen=True):
    """Rows of the encoder's buffer, for images.

    Attributes:
        used_rows: of running requests, encoded or promised.
        cached_rows: kept for further requests with the same image.
    """

    used_rows: int = 0
    cached_rows: int = 0
    total_rows: int = 0


class SchedulerTotals(Record, frozen=True):
    """Counts since the start of the scheduler's process.

    Attributes:
        prompt_tokens: of admitted requests, cached or computed.
        cached_tokens: of these, tokens taken from the prefix cache.
        preempted_reqs: of `retracted_reqs`, those preempted for a more urgent request.
        num_steps: each round of a multi-step decode is one.
        draft_tokens: that steps have verified, see --speculative.
        accepted_draft_tokens: of these, the accepted ones.
        overruled_tokens: see `GrammarUsage`.
        encoder_tiles: tiles of images that were encoded.
        encoder_hits: tiles that a request found encoded when it was admitted.
        encoder_s: seconds for tiles; of `step_s`.
        prompt_host_tokens, prompt_tier_tokens: of `cached_tokens`, those that the host had, and those that a disk or a
            store had.
        prompt_received_tokens: of `prompt_tokens`, those that another engine has computed.
        kv_events: published, see --kv-events.
        kv_event_replays: requests of subscribers that had missed some.
    """

    retracted_reqs: int = 0
    preempted_reqs: int = 0
    timed_out_reqs: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    evicted_tokens: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    overruled_tokens: int = 0
    kv_events: int = 0
    kv_event_replays: int = 0
    encoder_tiles: int = 0
    encoder_hits: int = 0
    encoder_s: float = 0.0
    prompt_host_tokens: int = 0
    prompt_tier_tokens: int = 0
    prompt_received_tokens: int = 0


RESIDENCY_BUCKETS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Upper bounds of the histograms of `SchedulerReport.residency`, as in vLLM."""


class HistogramCounts(Record, frozen=True):
    """A histogram over `RESIDENCY_BUCKETS_S`.

    Attributes:
        counts: of each bucket, and of what is above all bounds; empty for none.
        sum_s: of all values.
    """

    counts: tuple[int, ...] = ()
    sum_s: float = 0.0


class GrammarTotals(Record, frozen=True):
    """Work for grammars since the start of the scheduler's process.

    Attributes:
        builds: grammars that were compiled for a request, or refused.
        masks: token masks that were filled, one per row of logits.
    """

    builds: int = 0
    build_s: float = 0.0
    masks: int = 0
    mask_s: float = 0.0


_GROUPS: Final[Mapping[str, tuple[str, str, type[Record]]]] = {
    "kv": ("kv_", "", KVFigures),
    "host": ("host_", "", HostFigures),
    "encoder": ("encoder_", "", EncoderFigures),
    "totals": ("", "_total", SchedulerTotals),
    "grammar": ("grammar_", "_total", GrammarTotals),
}
"""Fields of `SchedulerReport` that are records: what `flat` puts before and after the names of their fields."""


class SchedulerReport(Message, frozen=True):
    """The scheduler's heartbeat and figures; sent at least every `HEARTBEAT_INTERVAL_S`, also while idle.

    Attributes:
        sent_s: CLOCK_MONOTONIC.
        num_swapped_reqs: of `num_queue_reqs`, those with their KV on the host.
        num_grammar_reqs: of `num_queue_reqs`, those that wait for a grammar.
        num_background_queue_reqs, num_background_running_reqs: of the background class, which the other counts include.
        num_queue_tokens: of the waiting requests, those with their KV on the host left out.
        policy: the policy that orders the queue now.
        stalled: why no request makes progress although requests wait; "" if there is no stall.
        paused: the mode of a pause; "" if there is none.
        detokenizer_reqs: requests with a text state in the detokenizer, which sets this when it forwards the report.
        num_adapters: LoRA adapters in host memory, or being read.
        num_adapter_slots_used: by running requests.
        replica: the scheduler's number, with --dp.
        transfer: with --disaggregation-mode.
        tiers: with --kv-disk or --kv-store, by the tier's name.
        num_sessions: that the prefix cache keeps.
        session_turns: see `KVMemory.session_turns`.
        residency: of a sample of the pages of the prefix cache, see `BlockResidency`.
        drafts, accepted_drafts: `totals.draft_tokens` and `totals.accepted_draft_tokens` by method and position; see
            `DraftStats`.
    """

    sent_s: float
    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_swapped_reqs: int = 0
    num_grammar_reqs: int = 0
    num_background_queue_reqs: int = 0
    num_background_running_reqs: int = 0
    num_queue_tokens: int = 0
    new_token_ratio: float = 0.0
    pinned_tokens: int = 0
    policy: str = ""
    waiting_by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    stalled: str = ""
    paused: str = ""
    detokenizer_reqs: int = 0
    num_adapters: int = 0
    num_adapter_slots_used: int = 0
    replica: int = 0
    kv: KVFigures = KVFigures()
    host: HostFigures = HostFigures()
    totals: SchedulerTotals = SchedulerTotals()
    grammar: GrammarTotals = GrammarTotals()
    transfer: TransferFigures | None = None
    tiers: dict[str, TierFigures] = msgspec.field(default_factory=dict)
    num_sessions: int = 0
    session_turns: dict[str, int] = msgspec.field(default_factory=dict)
    drafts: dict[str, int] = msgspec.field(default_factory=dict)
    accepted_drafts: dict[str, int] = msgspec.field(default_factory=dict)
    encoder: EncoderFigures = EncoderFigures()
    residency: dict[str, HistogramCounts] = msgspec.field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """All figures by the names of `/metrics` and `/server_info`: `kv_used_tokens`, `prompt_tokens_total`."""
        figures = msgspec.structs.asdict(self)
        for group in _GROUPS:
            record = figures.pop(group)
            figures |= {name: getattr(record, field) for field, name in _flat_names(group)}
        if self.transfer is not None:
            figures["transfer"] = msgspec.structs.asdict(self.transfer)
        del figures["tiers"], figures["residency"]
        return figures | {tier: msgspec.structs.asdict(each) for tier, each in self.tiers.items()}

    @classmethod
    def from_flat(cls, figures: Mapping[str, Any]) -> SchedulerReport:
        """The report with these figures, by the names of `flat`. Unknown ones are ignored, missing ones have defaults.

        Raises:
            ValidationError: a figure has another type.
            KeyError: `sent_s` is missing.
        """
        report = dict(figures)
        for group, (_, _, record) in _GROUPS.items():
            values = {field: report[name] for field, name in _flat_names(group) if name in report}
            report[group] = _row(record, values)
        return msgspec.convert([cls.__name__, *_row(cls, report)], cls)


def _row(record: type[msgspec.Struct], values: Mapping[str, Any]) -> list[Any]:
    """Values in the order of the fields, as on the wire."""
    row = []
    for field in msgspec.structs.fields(record):
        if field.name in values:
            row.append(values[field.name])
        elif field.default_factory is not msgspec.NODEFAULT:
            row.append(field.default_factory())
        elif field.default is not msgspec.NODEFAULT:
            row.append(field.default)
        else:
            raise KeyError(field.name)
    return row


def _flat_names(group: str) -> Iterator[tuple[str, str]]:
    """Each field of a group, with its name in `flat`."""
    before, after, record = _GROUPS[group]
    for field in record.__struct_fields__:
        yield field, f"{before}{field}{after}"
