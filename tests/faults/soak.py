"""Soak: long runs of a real server that end with the question what it still holds.

    make soak                                                       # ten minutes of storms, a small model
    python -m tests.faults.soak --minutes 2 --seed 7
    python -m tests.faults.soak --overload refuse --minutes 60 --samples FILE
    python -m tests.faults.soak --overload queue --minutes 10

It prints what was done and what was measured, and exits with 1 if anything leaked, was lost or hung.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.e2e.model import make_model
from tests.e2e.serving import EngineServe

from .census import Census, differences, reports_nothing_lost, settled_census
from .overload import memory_text, run_overload, say
from .storms import SERVER, Storm

WARM_UP_STORMS: Final = 3
"""By then each pool of threads and each buffer is there; the rest of the memory is allowed for below."""
ALLOWED_KIB: Final = {
    "supervisor": 1024,
    "scheduler": 16_384,  # its last 8,192 decisions, with all verdicts and sums, come first
    "detokenizer": 2048,
    "tokenizer_manager": 6144,
}
"""By which memory may grow after the warm-up: what is bounded fills up, and allocators do not return all they got."""
_VISITS: Final = 150  # of a storm
_WATCHED: Final = (
    "retracted_reqs_total",
    "preempted_reqs_total",
    "timed_out_reqs_total",
    "swapped_out_tokens_total",
)


def run_soak(
    model: Path, go_on: Callable[[int], bool], seed: int = 1, num_visits: int = _VISITS
) -> list[str]:
    """Storm after storm, and a look at what is left behind each of them; what went wrong, in words.

    Args:
        model: small.
        go_on: whether there shall be another storm, given how many there were; at least for the warm-up.
        seed: of the visits.
        num_visits: of a storm.
    """
    with EngineServe(str(model), *SERVER) as engine:
        engine.wait_until_ready()
        storm = Storm(engine.url, random.Random(seed))
        problems: list[str] = []
        warm: Census | None = None
        census: Census | None = None
        num_storms = 0
        while go_on(num_storms):
            asyncio.run(storm.blow(num_visits))
            num_storms += 1
            census, left = settled_census(engine, warm)
            problems += left
            if warm is None or num_storms % 5 == 0:
                say(f"after {num_storms} storms: {memory_text(census.processes)}")
            if num_storms == WARM_UP_STORMS:
                warm = census
        assert warm is not None and census is not None
        problems += differences(warm, census, ALLOWED_KIB)
        say(f"after {num_storms} storms: {memory_text(census.processes)}")
        say(f"{sum(storm.outcomes.values())} visits: {dict(sorted(storm.outcomes.items()))}")
        metrics = engine.idle_metrics()
        say(", ".join(f"{name} {metrics[name]:.0f}" for name in _WATCHED))
        problems += [f"{name} is 0: the storm was none" for name in _WATCHED if not metrics[name]]
        problems += storm.problems[:20] + reports_nothing_lost(engine.log)
        if (code := engine.stop()) != 0:
            problems.append(f"exit code {code}")
        return problems + engine.leftovers()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overload", choices=("refuse", "queue"), help="three times too many requests")
    parser.add_argument("--samples", type=Path, help="with --overload: file for what the processes hold")
    args = parser.parse_args()
    seconds = 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, contextlib.ExitStack() as stack:
        model = make_model(Path(folder) / "small-llama")
        if args.overload is None:
            end_s = time.monotonic() + seconds
            problems = run_soak(
                model, lambda num: num <= WARM_UP_STORMS or time.monotonic() < end_s, args.seed
            )
        else:
            samples = stack.enter_context(args.samples.open("w")) if args.samples else None
            problems = run_overload(model, args.overload, seconds, args.seed, samples)
    for problem in problems:
        say(f"problem: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
