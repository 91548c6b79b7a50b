"""The servers of several checkouts in turn on the workloads of `cpu_vs_peers.py`: what a change costs or saves.

    python benchmarks/compare_checkouts.py BASE OTHER [OTHER ...] [--rounds 5] [--workloads W1 W2 W3]
                                           [--side engine-bf16]

Each checkout is a folder named `engine`. In every round each checkout's server is started, asked and stopped, in an
order that rotates with the round. All are asked by this checkout's `engine bench serve`, with the same requests. The
table has the median of each workload's first figure and of the time from the command to the first answer per checkout,
and the median of the rounds' ratios to BASE.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Final

# Run as a script: its parts are found from the repository's root. Last, so that nothing there hides a package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.models import ensure_bf16_folder
from benchmarks.peers.server import ENGINE_VARIANTS, Models, Room, Side, make_side, running
from benchmarks.peers.setup import Peers
from benchmarks.peers.workloads import START, WORKLOADS, Workload
from engine.models.hub.built_in.fetch import ensure_model
from engine.runtime.installation import cache_dir

KV_TOKENS: Final = 65_536
RUN_LIMIT_S: Final = 300.0

Figures = dict[tuple[str, str], list[float]]
"""(workload, checkout) -> its figure in each round."""


def main() -> None:
    """Measure all rounds, then print the table."""
    options = parse_arguments()
    models = models_of_the_default()
    checkouts = {str(path): path.resolve() for path in options.checkouts}
    workloads = [workload for workload in WORKLOADS if workload.name in options.workloads]
    figures: Figures = defaultdict(list)
    for number in range(options.rounds):
        names = list(checkouts)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            side = side_of(checkouts[name], options.side, options.port, models)
            with (
                tempfile.TemporaryDirectory() as logs,
                running(side, Path(logs) / "log") as server,
            ):
                figures[START, name].append(server.first_completion_s)
                print(f"round {number + 1}: {START} {name}: {server.first_completion_s:.2f}", flush=True)
                for workload in workloads:
                    figures_of_run = workload.run(server.side.url, models.gguf, number, RUN_LIMIT_S)
                    figure = figures_of_run[workload.figures[0].name]
                    figures[workload.name, name].append(figure)
                    print(f"round {number + 1}: {workload.name} {name}: {figure:.2f}", flush=True)
    print_table(figures, workloads, list(checkouts))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path, nargs="+", help="BASE first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3"])
    parser.add_argument("--side", choices=list(ENGINE_VARIANTS), default="engine-bf16")
    parser.add_argument("--port", type=int, default=31_900)
    options = parser.parse_args()
    for path in options.checkouts:
        if path.resolve().name != "engine" or not (path / "runtime").is_dir():
            sys.exit(f"{path} is no checkout in a folder named `engine`; clone or link it as one")
    return options


def models_of_the_default() -> Models:
    """The default model's file, and its weights as a bf16 folder."""
    gguf = ensure_model()
    folder = cache_dir() / "benchmarks"
    models = Models(gguf, folder / "SmolLM2-135M-Instruct-bf16", folder / "unused.gguf")
    ensure_bf16_folder(models.gguf, models.bf16_folder)
    return models


def side_of(checkout: Path, variant: str, port: int, models: Models) -> Side:
    """The server of a checkout: Python imports `engine` from its parent folder."""
    unused = Path()
    side = make_side(variant, port, models, Peers.of(unused), (), Room(KV_TOKENS, 0))
    return replace(side, environment={"PYTHONPATH": str(checkout.parent)})


def print_table(figures: Figures, workloads: list[Workload], names: list[str]) -> None:
    """One row per workload and checkout."""
    base = names[0]
    print(f"\n{'':5} {'figure':16} {'median':>10} {'ratio':>7} {'lowest':>7} {'highest':>7}  checkout")
    units = {
        workload.name: f"{workload.figures[0].name}, {workload.figures[0].unit}" for workload in workloads
    }
    for what, figure in {**units, START: "command to token"}.items():
        for name in names:
            values = figures[what, name]
            ratios = [value / first for value, first in zip(values, figures[what, base], strict=True)]
            print(
                f"{what:5} {figure:16} {statistics.median(values):10.2f} {statistics.median(ratios):7.3f} "
                f"{min(ratios):7.3f} {max(ratios):7.3f}  {name}"
            )


if __name__ == "__main__":
    main()
