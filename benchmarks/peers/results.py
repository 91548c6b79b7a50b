"""`Results`: everything measured so far, in one JSON file that is written after every measurement; and its tables.

An interrupted run is resumed from it: existing measurements are kept if they were made with the same settings. Failures
are recorded, and measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.ceilings import Ceiling
from benchmarks.peers.limits import LIMIT_TARGETS, ServedModel
from benchmarks.peers.workloads import MEMORY, START, TARGETS, Figure, Target, Workload

SCHEMA: Final = "cpu-vs-peers/2"


class Measurement(msgspec.Struct, frozen=True):
    """One run of one workload against one side, or one start or memory.

    Attributes:
        round: counted from 0; the same round has the same prompts on all sides.
        figures: by their names.
        others: CPU cores that processes outside of this measurement used.
    """

    side: str
    workload: str
    round: int
    figures: dict[str, float]
    others: float


class Failure(msgspec.Struct, frozen=True):
    """A failed measurement, and the reason."""

    side: str
    what: str
    reason: str

    @property
    def short(self) -> str:
        """The reason for a cell of a table: its first line, and the last one, which ends a log."""
        return short_reason(self.reason)


class Results(msgspec.Struct):
    """The content of the file.

    Attributes:
        settings: settings that affect all figures; a file with other settings is refused.
        sides: for each side, the settings that affect its figures.
        model: the model, which the limits need.
    """

    schema: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    sides: dict[str, dict[str, Any]]
    model: ServedModel
    ceilings: list[Ceiling] = []
    measurements: list[Measurement] = []
    failures: list[Failure] = []

    def values(self, side: str, workload: str, figure: str) -> dict[int, float]:
        """A figure by round; of "start" and "memory" in order of measurement."""
        return {
            m.round: m.figures[figure]
            for m in self.measurements
            if m.side == side and m.workload == workload and figure in m.figures
        }

    def count(self, side: str, workload: str) -> int:
        """The number of measurements."""
        return sum(m.side == side and m.workload == workload for m in self.measurements)

    def has(self, side: str, workload: str, round_idx: int) -> bool:
        """Whether this measurement exists."""
        return any((m.side, m.workload, m.round) == (side, workload, round_idx) for m in self.measurements)

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        partial.replace(path)


class MismatchError(Exception):
    """A file has figures that were measured with other settings; the message names them."""


def open_results(path: Path, fresh: Results) -> Results:
    """The results in this file, or `fresh`, which has none yet. New sides are added.

    Raises:
        MismatchError: the file was measured with other settings than those of `fresh`.
    """
    fresh = msgspec.json.decode(msgspec.json.encode(fresh), type=Results)  # compared as in the file
    if not path.exists():
        return fresh
    results = read_results(path)
    pairs = [("settings", results.settings, fresh.settings), ("model", results.model, fresh.model)]
    pairs += [(f"side {n}", results.sides[n], fresh.sides[n]) for n in fresh.sides if n in results.sides]
    changed = [f"{what}: {old!r}, now {new!r}" for what, old, new in pairs if old != new]
    if changed:
        raise MismatchError(
            f"{path} was measured with other settings; give another --output, or remove it:\n  "
            + "\n  ".join(changed)
        )
    results.sides |= fresh.sides
    results.failures = []
    return results


def read_results(path: Path) -> Results:
    """Read a file.

    Raises:
        MismatchError: it is not a result file.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise MismatchError(f"{path} is not a result file of cpu_vs_peers ({error})") from None
    if results.schema != SCHEMA:
        raise MismatchError(f"{path} has schema {results.schema!r}, this version reads {SCHEMA!r}")
    return results


# ---------------------------------------------------------------- tables


def all_tables(
    results: Results, workloads: Sequence[Workload], limits: Mapping[tuple[str, str], float]
) -> str:
    """The text that is printed at the end, in Markdown.

    Args:
        limits: limits of the machine, by workload and side, in the unit of the workload's first figure.
    """
    parts = [
        figures_table(results, workloads),
        targets_table(results, TARGETS),
        limits_table(results, workloads, limits),
        notes(results),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def figures_table(results: Results, workloads: Sequence[Workload]) -> list[str]:
    """Medians over the rounds, or why there are none; in brackets the number of rounds, if it is below the largest."""
    failed = {failure.side: failure for failure in results.failures}
    sides = [n for n in results.sides if n in failed or any(m.side == n for m in results.measurements)]
    rows = [(w.name, f"{w.name}: {w.what}", figure) for w in workloads for figure in w.figures]
    rows.append((START, "command to first completion", Figure("first completion", "", "s")))
    memory = f"memory with {int(results.settings.get('kv_tokens', 0)):,} tokens of KV"
    rows.append((MEMORY, memory, Figure("resident", "", "GB")))
    lines = _head(["workload", "figure", *sides])
    for workload, what, figure in rows:
        by_side = [results.values(side, workload, figure.name) for side in sides]
        if most := max((len(values) for values in by_side), default=0):
            cells = [
                _median_cell(values, figure, most, failed.get(side))
                for side, values in zip(sides, by_side, strict=True)
            ]
            lines.append(_row([what, f"{figure.name}, {figure.unit}", *cells]))
    return lines


def targets_table(results: Results, targets: Iterable[Target]) -> list[str]:
    """One line for every target with both sides measured; the ratio is the median of the ratios by round."""
    lines = _head(["workload", "figure", "engine", "peer", "ratio", "target", ""])
    for target in targets:
        if ratios := ratios_of(results, target):
            ratio = statistics.median(ratios)
            wanted = f"{'≥' if target.at_least else '≤'} {_short(target.ratio)}"
            verdict = "met" if target.met(ratio) else "missed"
            spread = f" ({_short(min(ratios))}-{_short(max(ratios))})" if len(ratios) > 1 else ""
            cells = [target.workload, target.figure, target.engine, target.peer]
            lines.append(_row([*cells, f"{_short(ratio)}{spread}", wanted, verdict]))
    return lines if len(lines) > 2 else []


def ratios_of(results: Results, target: Target) -> list[float]:
    """Engine / peer, round by round; for starts and memory, which have no rounds, the ratio of the medians."""
    engine, peer = (
        results.values(side, target.workload, target.figure) for side in (target.engine, target.peer)
    )
    if target.workload in (START, MEMORY):
        medians = [statistics.median(values.values()) for values in (engine, peer) if values]
        return [medians[0] / medians[1]] if len(medians) == 2 else []
    return [engine[idx] / peer[idx] for idx in sorted(engine.keys() & peer.keys()) if peer[idx]]


def limits_table(
    results: Results, workloads: Sequence[Workload], limits: Mapping[tuple[str, str], float]
) -> list[str]:
    """The share of the machine's limit that each side reaches, if there is a limit."""
    wanted = {(target.workload, target.side): target.share for target in LIMIT_TARGETS}
    lines = _head(["workload", "side", "measured", "machine's limit", "share", "target", ""])
    for workload in workloads:
        figure = workload.figures[0]
        for (name, side), limit in limits.items():
            values = results.values(side, name, figure.name)
            if name != workload.name or not values:
                continue
            measured = statistics.median(values.values())
            share, target = measured / limit, wanted.get((name, side))
            cells = [name, side, f"{_number(measured)} {figure.unit}", f"{_number(limit)} {figure.unit}"]
            verdict = "" if target is None else "met" if share >= target else "missed"
            lines.append(_row([*cells, f"{share:.0%}", "" if target is None else f"≥ {target:.0%}", verdict]))
    return lines if len(lines) > 2 else []


def notes(results: Results) -> list[str]:
    """The other load of the machine, its ceilings, and failures."""
    lines = []
    if results.settings.get("quick"):
        lines.append("Small workloads, once (--quick): a check that all of it runs, not a measurement.")
    if others := [measurement.others for measurement in results.measurements]:
        median = f"{statistics.median(others):.2f}"
        lines.append(
            f"Other processes used {median} of a core while measuring (median; at most {max(others):.2f})."
        )
    best: dict[tuple[int, str, int], Ceiling] = {}
    for ceiling in sorted(
        results.ceilings, key=lambda ceiling: ceiling.rate
    ):  # the best figure of each counts
        best[ceiling.num_threads, ceiling.what, ceiling.size] = ceiling
    lines += [str(best[key]) for key in sorted(best)]
    lines += [
        f"Failed: {failure.what} of {failure.side}: {failure.reason.splitlines()[0]}"
        for failure in results.failures
    ]
    return lines


def short_reason(reason: str, most: int = 120) -> str:
    """One line of a failure's text: its first one, and the last one, which ends a log."""
    first, *others = [line.strip() for line in reason.splitlines() if line.strip()] or ["unknown"]
    text = " ".join([first, *others[-1:]]).replace("|", "/")
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _median_cell(values: Mapping[int, float], figure: Figure, most: int, failure: Failure | None) -> str:
    if not values:
        return f"failed: {failure.short}" if failure else "-"
    value = statistics.median(values.values()) / (1e9 if figure.unit == "GB" else 1)
    return _number(value) + (f" ({len(values)})" if len(values) < most else "")


def _number(value: float) -> str:
    """Three digits at least."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.2 else f"{ratio:.3f}"


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
