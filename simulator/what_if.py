"""`what_if`: the workload of a decision log, simulated with other settings.

Three runs are compared: the recorded one; a simulation of its settings with a cost model fitted to its steps, which
shows the error of the simulation; and a simulation of the changed settings with the same cost model. Changes are
reported between the last two, so that most of the model's error cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ..runtime.config.config_fields import find_setting
from ..runtime.errors import ConfigError
from ..runtime.feasibility import Capacity
from ..runtime.text import counted
from ..scheduler.journal.log_file import Header, log_bytes
from ..scheduler.records.decision_log import PassRecord
from ..scheduler.records.verdict import AddReqResult
from .cluster import Cluster, ClusterSettings
from .fitted import FitQuality, Fitted
from .recorded_run import RecordedRun, read_recorded_run
from .report import Measurements, Report, make_report
from .simulated_engine import ReplicaSettings

if TYPE_CHECKING:
    from rich.console import RenderableType

GIB: Final = 1 << 30
_ALL_RECORDS: Final = 1 << 22
_SIMULATED: Final[dict[str, Any]] = {
    "queue_timeout": None,
    "request_timeout": None,
    "disaggregation_mode": "null",
}
"""Answers end where they ended in the log, perhaps at a deadline; only a deadline among the changes ends more. There is
no other engine: what it has sent, and when, is a part of the workload."""
_NO_EFFECT: Final = frozenset(
    {
        "overlap",
        "multi_step_ms",
        "mem_fraction",
        "kv_cache_dtype",
        "preset",
        "overload",
        "max_queued_tokens",
    }
)
_NO_EFFECT_PREFIXES: Final = (
    "speculative",
    "disaggregation_",
    "kv_disk",
    "kv_store",
    "kv_write",
    "kv_fetch",
    "kv_persist_salted",
)
_SHOWN_RIDS: Final = 4


class Row(NamedTuple):
    """One figure of the three runs.

    Attributes:
        figure: its name and unit.
        recorded, baseline, changed: its values.
        higher_is_better: for colors.
    """

    figure: str
    recorded: float
    baseline: float
    changed: float
    higher_is_better: bool = False

    @property
    def change(self) -> float | None:
        """Relative difference of the changed settings to the baseline; None if the baseline is 0."""
        return self.changed / self.baseline - 1 if self.baseline else None


class PassDifference(NamedTuple):
    """The first pass in which the simulation with the changed settings decides differently from the one before.

    Passes are those of the simulations: their steps do not end at the times of the log, so their number differs.

    Attributes:
        number: simulated passes before it, which are equal.
        num_passes: of the simulation with the log's own settings.
        at_s: virtual time since the first arrival.
        baseline, changed: the decisions of each, in words; "nothing more" if its run was over.
    """

    number: int
    num_passes: int
    at_s: float
    baseline: str
    changed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The result; `rich` prints it as a table.

    Attributes:
        changes: setting -> value.
        recorded, baseline, changed: see the module.
        has_slo: whether there are objectives; without them goodput equals the rate.
        quality: of the cost model.
        difference: None if all simulated passes are equal.
        notes: limitations of the result.
    """

    changes: Mapping[str, object]
    recorded: Report
    baseline: Report
    changed: Report
    has_slo: bool
    quality: FitQuality
    difference: PassDifference | None
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[Row]:
        """The figures, latencies in ms."""
        runs = (self.recorded, self.baseline, self.changed)

        def row(figure: str, values: list[float], *, higher_is_better: bool = False) -> Row:
            return Row(figure, values[0], values[1], values[2], higher_is_better)

        rows = [
            row("requests/s", [run.request_rate for run in runs], higher_is_better=True),
            row("output tok/s", [run.output_tok_s for run in runs], higher_is_better=True),
        ]
        if self.has_slo:
            rows.append(row("goodput, requests/s", [run.goodput for run in runs], higher_is_better=True))
        if any(run.failures for run in runs):
            rows.append(row("not answered", [float(sum(run.failures.values())) for run in runs]))
        for name, latencies in (
            ("queue", [run.queue_ms for run in runs]),
            ("TTFT", [run.ttft_ms for run in runs]),
            ("TPOT", [run.tpot_ms for run in runs]),
            ("E2E", [run.e2e_ms for run in runs]),
        ):
            rows.append(row(f"{name} P50, ms", [each.p50 for each in latencies]))
            rows.append(row(f"{name} P99, ms", [each.p99 for each in latencies]))
        rows.append(row("cache hits, %", [run.cache_hit_share * 100 for run in runs], higher_is_better=True))
        rows.append(row("retractions", [float(run.retractions) for run in runs]))
        rows.append(row("steps", [float(run.num_steps) for run in runs]))
        return rows

    def lines(self) -> list[str]:
        """The lines below the table."""
        error = self.baseline.e2e_ms.p50 / self.recorded.e2e_ms.p50 - 1 if self.recorded.e2e_ms.p50 else 0.0
        lines = [self.quality.warning()] if self.quality.is_useless else []
        lines += [
            f"step times: {self.quality.text()}",
            f"the simulation with the log's own settings is {error:+.1%} off the recorded median E2E",
        ]
        if self.difference is None:
            lines.append("both simulations decide alike in every pass")
        else:
            number, num_passes, at_s, baseline, changed = self.difference
            lines.append(
                f"the simulations decide differently from simulated pass {number + 1:,} of {num_passes:,} on, "
                f"{at_s:.3f} s after the first arrival"
            )
            lines.append(f"  before: {baseline}")
            lines.append(f"  now:    {changed}")
        return lines + [f"note: {note}" for note in self.notes]

    def __rich__(self) -> RenderableType:
        """The table with its notes."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        changes = ", ".join(f"{name}={value}" for name, value in self.changes.items())
        table = Table(title=f"what if {changes}", title_justify="left")
        for column in ("", "recorded", "simulated", "changed", "change"):
            table.add_column(column, justify="right" if column else "left")
        for row in self.rows:
            values = (_figure(value) for value in (row.recorded, row.baseline, row.changed))
            table.add_row(row.figure, *values, Text(_percent(row.change), style=_style(row)))
        lines = [Text(line) for line in self.lines()]
        if self.quality.is_useless:
            lines[0].stylize("bold red")
        return Group(table, *lines)


def what_if(
    path: str | Path,
    overrides: Mapping[str, object],
    *,
    number: int | None = None,
    slo_ms: Mapping[str, float] | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> WhatIf:
    """Run the workload of a decision log with other settings.

    Args:
        overrides: setting -> value or its text, of the groups scheduler and cache; by any name of the setting.
        number: number of the run in the log; None: the last one with results.
        slo_ms: objectives for goodput; without them every answered request counts.
        on_progress: called now and then with what is done, how much of it, and of how much in all.

    Raises:
        LogFileError: the log cannot be read.
        ConfigError: a setting that does not exist or cannot be changed here, or too few steps for a fit.
    """
    changes = _checked(overrides)
    size = log_bytes(path)
    report = on_progress or (lambda what, done, total: None)
    run = read_recorded_run(path, lambda done: report("reading the log", done, size), number=number)
    cost = run.cost_model()
    header = run.header
    before = ReplicaSettings(
        header.scheduler_config(**_SIMULATED),
        header.cache_config(),
        header.capacity,
        frozenset(header.eos_token_ids),
        _ALL_RECORDS,
        adapters=tuple(run.adapters),
    )
    after = before._replace(
        scheduler=header.scheduler_config(**(_of_group(changes, "scheduler") | _fixed(changes))),
        cache=header.cache_config(**_of_group(changes, "cache")),
        capacity=_capacity(header, changes),
    )
    baseline, passes = _simulate(run, before, cost, "simulated", slo_ms, report)
    changed, changed_passes = _simulate(run, after, cost, "changed", slo_ms, report)
    return WhatIf(
        changes=changes,
        recorded=make_report(run.outcome, name="recorded", num_replicas=1, slo_ms=slo_ms),
        baseline=baseline,
        changed=changed,
        has_slo=bool(slo_ms),
        quality=cost.quality,
        difference=_first_difference(passes, changed_passes),
        notes=_notes(run, changes),
    )


def fit_log(path: str | Path, *, number: int | None = None) -> Fitted:
    """The cost model of the machine that wrote a decision log; `number` as in `what_if`.

    Raises:
        LogFileError: the log cannot be read.
        ConfigError: it has too few steps.
    """
    return read_recorded_run(path, number=number).cost_model()


def _simulate(
    run: RecordedRun,
    settings: ReplicaSettings,
    cost: Fitted,
    name: str,
    slo_ms: Mapping[str, float] | None,
    on_progress: Callable[[str, int, int], None],
) -> tuple[Report, list[PassRecord]]:
    measurements = Measurements()
    cluster = Cluster(ClusterSettings(), settings, cost, measurements)
    cluster.run(
        run.workload(),
        run.calls,
        lambda done: on_progress(f"simulating: {name}", done, len(run.requests)),
    )
    report = make_report(measurements, name=name, num_replicas=1, slo_ms=slo_ms)
    return report, cluster.replicas[0].scheduler.decisions.passes


def _checked(overrides: Mapping[str, object]) -> dict[str, object]:
    changes: dict[str, object] = {}
    for key, value in overrides.items():
        setting = find_setting(key)
        if setting.field.group not in ("scheduler", "cache"):
            raise ConfigError(
                f"{setting.name} is a setting of the group {setting.field.group}; with a log only scheduler and "
                f"cache can be changed"
            )
        changes[setting.field.name] = setting.check(value)
    return changes


def _of_group(changes: Mapping[str, object], group: str) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if find_setting(name).field.group == group}


def _capacity(header: Header, changes: Mapping[str, Any]) -> Capacity:
    """The runner's capacity with the changes; the amount of memory stays the same."""
    old = header.capacity
    page_size = changes.get("page_size", old.page_size)
    num_pages = changes.get("max_total_tokens", old.max_total_tokens) // page_size
    if num_pages < 1:
        raise ConfigError(f"{num_pages} pages of {page_size} tokens hold nothing; raise max_total_tokens")
    host_tokens = old.num_host_pages * old.page_size
    changed = [name for name in ("swap_space", "kv_host_size") if name in changes]
    if changed:
        if not old.kv_token_bytes:
            raise ConfigError(
                f"the log does not have the KV size of a token, so {changed[0]} cannot be changed"
            )
        cached_gib = header.cache.get("kv_host_size", 0.0)
        swap_gib = host_tokens * old.kv_token_bytes / GIB - cached_gib
        new_gib = changes.get("swap_space", swap_gib) + changes.get("kv_host_size", cached_gib)
        host_tokens = round(new_gib * GIB) // old.kv_token_bytes
    return msgspec.structs.replace(
        old,
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=changes.get("max_running_requests", old.max_running_requests),
        num_host_pages=host_tokens // page_size,
        num_adapter_slots=changes.get("max_loras_per_batch", old.num_adapter_slots)
        if old.num_adapter_slots
        else 0,
    )


def _fixed(changes: Mapping[str, object]) -> dict[str, Any]:
    """The settings of a simulation; only a deadline can be among the changes."""
    return {name: value for name, value in _SIMULATED.items() if name not in changes or _has_no_effect(name)}


def _has_no_effect(name: str) -> bool:
    return name in _NO_EFFECT or name.startswith(_NO_EFFECT_PREFIXES)


def _notes(run: RecordedRun, changes: Mapping[str, object]) -> tuple[str, ...]:
    notes = []
    if ignored := sorted(filter(_has_no_effect, changes)):
        notes.append(
            f"{', '.join(ignored)} changed nothing: a simulation has no drafts, no time between steps, no disk, no "
            "other engine and the memory of the log, which max_total_tokens changes"
        )
    if run.num_transferred:
        notes.append(
            f"{counted(run.num_transferred, 'prompt', commas=True)} came from another engine; in the simulations each "
            "comes when it came in the log"
        )
    if run.num_left_out:
        notes.append(
            f"left out: {counted(run.num_left_out, 'request', commas=True)} without a result (refused, aborted, late)"
        )
    if run.num_cut_short:
        notes.append(
            f"{counted(run.num_cut_short, 'request', commas=True)} ended early (a stop string, a deadline, an error, "
            "an abort); in all three runs they count as answered with their last token, and deadlines end no request"
        )
    if run.damage:
        notes.append(run.damage)
    return tuple(notes)


# ---------------------------------------------------------------- the first difference

_Decisions = tuple[int, tuple[tuple[str, int], ...], tuple[tuple[str, str], ...]]


def _first_difference(before: list[PassRecord], after: list[PassRecord]) -> PassDifference | None:
    for number, (one, other) in enumerate(zip(before, after, strict=False)):
        if _decisions(one) != _decisions(other):
            return PassDifference(
                number, len(before), one.now_s, _words(_decisions(one)), _words(_decisions(other))
            )
    number = min(len(before), len(after))
    if len(before) == len(after):
        return None
    longer, text = (before, "nothing more") if len(before) > len(after) else (after, "nothing more")
    words = _words(_decisions(longer[number]))
    pair = (words, text) if longer is before else (text, words)
    return PassDifference(number, len(before), longer[number].now_s, *pair)


def _decisions(record: PassRecord) -> _Decisions:
    """A pass's decisions without its arithmetic: decodes, prompt chunks, retractions."""
    chunks = tuple(
        (verdict.rid, verdict.extend_len)
        for verdict in (*record.continued, *record.verdicts)
        if verdict.result is AddReqResult.CONTINUE
    )
    return (
        record.num_decodes,
        chunks,
        tuple((each.rid, each.mode) for each in record.retractions),
    )


def _words(decisions: _Decisions) -> str:
    num_decodes, chunks, retractions = decisions
    parts = [counted(num_decodes, "decode")]
    for rid, length in chunks[:_SHOWN_RIDS]:
        parts.append(f"{rid} computes {counted(length, 'token', commas=True)}")
    if len(chunks) > _SHOWN_RIDS:
        parts.append(f"and {len(chunks) - _SHOWN_RIDS} more prompts")
    for rid, mode in retractions[:_SHOWN_RIDS]:
        parts.append(f"{rid} is retracted ({mode})")
    return ", ".join(parts)


# ---------------------------------------------------------------- cells


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def _percent(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}"


def _style(row: Row) -> str:
    if row.change is None or abs(row.change) < 0.005:
        return ""
    return "green" if (row.change > 0) == row.higher_is_better else "red"
