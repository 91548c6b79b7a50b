"""What swapping beside the computation could gain at most, by `engine simulate`.

    python benchmarks/swap_bound.py

Llama-3.1-8B on an H100 with long answers and more requests than fit: once with the bandwidth of PCIe 5.0, and once with
a thousand times as much, which is better than any overlap can be. The clock is virtual: equal figures on every machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.cli.main import run
from engine.simulator.device_facts import DEVICES

LOAD: Final = (
    *("simulate", "llama-3.1-8b", "--device", "h100", "--preemption-mode", "swap", "--max-num-seqs", "512"),
    *("--prompt-lens", "1000,300,2000", "--output-lens", "1500,500,3000", "--rate", "60"),
)
BANDWIDTHS: Final = {"PCIe 5.0": 1, "a thousand times as much": 1000}


def main(num_requests: int = 1500) -> None:
    """Print the table: `ratio` is the default estimator, `none` thrashes."""
    print("| estimator | bandwidth to the host | retractions | output tokens per second |\n|---|---|---|---|")
    for estimator in ("ratio", "none"):
        for name, factor in BANDWIDTHS.items():
            report = simulate(estimator, factor, num_requests)
            figures = report["retractions"], f"{report['output_tok_s']:,.0f}"
            print("|", " | ".join(map(str, (estimator, name, *figures))), "|")


def simulate(estimator: str, factor: int, num_requests: int) -> dict[str, Any]:
    """A report with so many times the bandwidth."""
    usual = DEVICES["h100"]
    DEVICES["h100"] = replace(usual, host_bandwidth=factor * usual.host_bandwidth)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.json"
            options = ("--admission-estimator", estimator, "--num-requests", str(num_requests))
            with contextlib.redirect_stdout(None):
                run([*LOAD, *options, "--json", str(path)])
            (report,) = msgspec.json.decode(path.read_bytes())
    finally:
        DEVICES["h100"] = usual
    assert isinstance(report, dict)
    return report


if __name__ == "__main__":
    main()
