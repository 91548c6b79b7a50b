"""Replicas, prefix affinity and disaggregation in numbers that nobody has on a desk, by `engine simulate`.

    python benchmarks/simulated_fleet.py [--jobs 1] [--folder build/simulated-fleet] [--long]

Llama-3.1-8B on H100s by the roofline of its data sheet, with the serving scheduler, the dispatch policies of `--dp`,
and a virtual clock: equal commands give equal figures on every machine. The rate per replica is the same in all rows of
a workload, so a replica of many may do more than a single one.

`rag`: 2,000 documents of about 3,000 tokens, some far more popular than others. `chat`: conversations of several turns,
which send their history again. `unique`: prompts of 1,000 to 6,000 tokens that nobody has sent before.

A row takes up to ten minutes of one core; each is kept in the folder and not computed again. `--long` adds the rows of
`chat`, the last of a million requests: another hour.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

ROOT: Final = Path(__file__).resolve().parent.parent
UNIQUE: Final = ("--prompt-lens", "3000,1000,6000,2000", "--output-lens", "200,100,300")
GOODPUT: Final = "ttft:1000 tpot:25"


class Row(NamedTuple):
    """A simulation.

    Attributes:
        rate: requests per second and replica.
        num_prefill: of the replicas; 0: no disaggregation.
        per_replica: requests of the run.
    """

    workload: str
    rate: float
    per_replica: int
    num_replicas: int
    policy: str
    num_prefill: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.workload}-{self.num_replicas}-{self.num_prefill}-{self.policy}-{self.per_replica}"

    @property
    def options(self) -> list[str]:
        """Of `engine simulate`."""
        requests = ("--workload", self.workload) if self.workload != "unique" else UNIQUE
        return [
            *("llama-3.1-8b", "--device", "h100", *requests, "--goodput", GOODPUT),
            *("--rate", str(self.rate * self.num_replicas), "--dp", str(self.num_replicas)),
            *("--num-requests", str(self.per_replica * self.num_replicas), "--dispatch-policy", self.policy),
            *("--prefill-replicas", str(self.num_prefill)),
        ]


ROWS: Final = [
    Row("rag", 10.0, 1000, 1, "round-robin"),
    *(
        Row("rag", 10.0, 1000, count, policy)
        for count in (8, 64)
        for policy in ("round-robin", "shortest-queue", "prefix-affinity")
    ),
    Row("rag", 10.0, 1000, 8, "prefix-affinity", num_prefill=3),
    Row("rag", 10.0, 1000, 64, "prefix-affinity", num_prefill=24),
    Row("unique", 5.0, 250, 1, "round-robin"),
    Row("unique", 5.0, 250, 8, "shortest-queue"),
    Row("unique", 5.0, 250, 8, "shortest-queue", num_prefill=4),
    Row("unique", 5.0, 250, 64, "shortest-queue"),
    Row("unique", 5.0, 250, 64, "shortest-queue", num_prefill=32),
]
LONG_ROWS: Final = [
    Row("chat", 28.0, 15_625, 1, "round-robin"),
    Row("chat", 28.0, 15_625, 8, "round-robin"),
    Row("chat", 28.0, 15_625, 8, "prefix-affinity"),
    Row("chat", 28.0, 15_625, 64, "prefix-affinity"),
]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time, one core each")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "simulated-fleet")
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    rows = [*ROWS, *LONG_ROWS] if options.long else ROWS
    options.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        reports = list(pool.map(lambda row: report_of(row, options.folder), rows))
    print(table(list(zip(rows, reports, strict=True))))


def report_of(row: Row, folder: Path) -> dict[str, Any]:
    """The report of a row, from its file or from a new simulation."""
    path = folder / f"{row.name}.json"
    if not path.exists():
        unfinished = path.with_suffix(".new")
        command = [sys.executable, "-P", "-m", "engine", "simulate", *row.options, "--json", str(unfinished)]
        print(" ".join(["engine", *command[4:-2]]), file=sys.stderr, flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        unfinished.replace(path)
    (report,) = msgspec.json.decode(path.read_bytes())
    assert isinstance(report, dict)
    return report


def table(results: Sequence[tuple[Row, dict[str, Any]]]) -> str:
    """One line per simulation; efficiency is goodput per replica, that of the workload's single replica being 1."""
    lines = [
        "| workload | replicas | policy | cached | in time | efficiency | TTFT P50, P99 ms | ITL P99 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    single = {row.workload: report["goodput"] for row, report in results if row.num_replicas == 1}
    for row, report in results:
        count = row.num_replicas
        machines = f"{row.num_prefill} + {count - row.num_prefill}" if row.num_prefill else str(count)
        efficiency = report["goodput"] / count / max(single[row.workload], 1e-9)
        ttft, itl = report["ttft_ms"], report["itl_ms"]
        lines.append(
            f"| {row.workload}, {row.rate:g}/s | {machines} | {row.policy if count > 1 else '-'} "
            f"| {report['cache_hit_share']:.2f} | {report['slo_share']:.3f} | {efficiency:.2f} "
            f"| {ttft['p50']:.0f}, {ttft['p99']:.0f} | {itl['p99']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
