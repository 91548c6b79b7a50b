"""The tables in Markdown: all figures by side, ratios and their targets, shares of the machine's limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.peers.limits import LIMIT_TARGETS
from benchmarks.peers.results import MEMORY, START, Results
from benchmarks.peers.workloads import TARGETS, Figure, Target, Workload


def all_tables(
    results: Results, workloads: Sequence[Workload], limits: Mapping[tuple[str, str], float]
) -> str:
    """The text that is printed at the end.

    Args:
        limits: limits of the machine, by workload and side, in the unit of the workload's first figure.
    """
    measured = {start.side for start in results.starts} | {resident.side for resident in results.residents}
    measured |= {measurement.side for measurement in results.measurements}
    sides = [name for name in results.sides if name in measured]
    parts = [
        figures_table(results, workloads, sides),
        targets_table(results, TARGETS),
        limits_table(results, workloads, limits),
        notes(results),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def figures_table(results: Results, workloads: Sequence[Workload], sides: Sequence[str]) -> list[str]:
    """Medians over the rounds; in brackets the number of rounds, if it is below the largest number."""
    rows = [(w.name, f"{w.name}: {w.what}", figure) for w in workloads for figure in w.figures]
    rows.append((START, "command to first completion", Figure("first completion", "", "s")))
    rows.append((MEMORY, f"memory with {_kv_tokens(results):,} tokens of KV", Figure("resident", "", "GB")))
    lines = _head(["workload", "figure", *sides])
    for workload, what, figure in rows:
        by_side = [results.values(side, workload, figure.name) for side in sides]
        most = max((len(values) for values in by_side), default=0)
        if most:
            cells = [_median_cell(values, figure, most) for values in by_side]
            lines.append(_row([what, f"{figure.name}, {figure.unit}", *cells]))
    return lines


def targets_table(results: Results, targets: Iterable[Target]) -> list[str]:
    """One line for every target with both sides measured; the ratio is the median of the ratios by round."""
    lines = _head(["workload", "figure", "engine", "peer", "ratio", "target", ""])
    for target in targets:
        ratios = ratios_of(results, target)
        if ratios:
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
        return (
            [statistics.median(engine.values()) / statistics.median(peer.values())] if engine and peer else []
        )
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
    others = [measurement.share.others for measurement in results.measurements]
    if others:
        stolen = max(measurement.share.stolen for measurement in results.measurements)
        lines.append(
            f"Other processes used {statistics.median(others):.2f} of a core while measuring (median; at most "
            f"{max(others):.2f}); the host took {stolen:.2f} at most."
        )
    best: dict[tuple[str, int, int], float] = {}
    for ceiling in results.ceilings:
        key = (ceiling.what, ceiling.size, ceiling.num_threads)
        best[key] = max(best.get(key, 0.0), ceiling.rate)
    units = {
        "read": "GB/s at {} MB",
        "bf16": "GFLOP/s bf16 at M={}",
        "fp32": "GFLOP/s fp32 at M={}",
        "int8": "GOP/s int8 at M={}",
    }
    threads = max((num_threads for _, _, num_threads in best), default=0)
    shown = [
        f"{_number(rate)} {units[what].format(size)}"
        for (what, size, num_threads), rate in best.items()
        if num_threads == threads
    ]
    if shown:
        disturbed = min(results.ceilings_disturbed, default=0.0)
        lines.append(
            f"Ceilings with {threads} threads, with {disturbed:.2f} cores of other load: {', '.join(shown)}."
        )
    lines += [
        f"Failed: {failure.what} of {failure.side}: {failure.reason.splitlines()[0]}"
        for failure in results.failures
    ]
    return lines


def _median_cell(values: Mapping[int, float], figure: Figure, most: int) -> str:
    if not values:
        return "-"
    value = statistics.median(values.values())
    if figure.unit == "GB":
        value /= 1e9
    return _number(value) + (f" ({len(values)})" if len(values) < most else "")


def _number(value: float) -> str:
    """Three digits at least."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.2 else f"{ratio:.3f}"


def _kv_tokens(results: Results) -> int:
    return int(results.settings.get("kv_tokens", 0))


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
