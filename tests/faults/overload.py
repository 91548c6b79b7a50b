"""Overload: a real server that is asked for three times as much as it can answer, for as long as one likes.

Its rate is measured first, then `Visitors` come more often. Whoever is let in must be answered soon, everybody
else must be told when to come back, and the memory of every process must come to a stand.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TextIO

from tests.e2e.serving import EngineServe

from .census import Held, Watch, reports_nothing_lost, settled_census
from .visitors import MAX_QUEUED, MAX_RUNNING, SERVER, Visitors

Mode = Literal["refuse", "queue"]

FACTOR: Final = 3.5
"""Times the measured rate: three times what is answered in the end, as answers to one prompt share its computation."""
_MEASURE_S: Final = 20.0
_SAMPLE_S: Final = 10.0
_WARM_UP_SHARE: Final = 0.25
"""Of the time, at most `_MAX_WARM_UP_S`: until the bounded memories of the processes are full (decisions, free lists of
allocators, tokens' texts) memory grows; what it does then is a leak or none."""
_MAX_WARM_UP_S: Final = 900.0
_MAX_SLOPE_KIB: Final = 30.0
"""Per minute: with 30 answers asked for in a second that is 17 bytes for each of them."""
_MAX_GROWTH_KIB: Final = 4096
"""Whatever the slope: a few minutes are too short to tell a slope from the steps in which allocators take memory."""


def run_overload(
    model: Path,
    mode: Mode,
    seconds: float,
    seed: int = 1,
    samples: TextIO | None = None,
    *,
    timed: bool = True,
) -> list[str]:
    """Serve, measure, flood; what went wrong, in words.

    Args:
        model: small; steps are slow on purpose.
        mode: what the server does with those for whom there is no room.
        seconds: of the flood.
        seed: of the visits.
        samples: for what the processes hold, a line per look.
        timed: whether times and slopes are judged: not in a few seconds of a machine that may be busy.
    """
    flags = ("--overload", mode, *(("--queue-timeout", "10") if mode == "queue" else ()))
    with EngineServe(str(model), *SERVER, *flags) as engine:
        engine.wait_until_ready()
        rate = asyncio.run(Visitors(engine.url, random.Random(seed)).fill(min(_MEASURE_S, seconds)))
        visitors = Visitors(engine.url, random.Random(seed + 1))
        before, problems = settled_census(engine)
        say(f"answers {rate:.1f} choices/s; now {FACTOR * rate:.1f}/s come for {seconds:.0f} s")
        with Watch(engine, min(_SAMPLE_S, seconds / 20), samples) as watch:
            asyncio.run(visitors.flood(FACTOR * rate, seconds))
        problems += settled_census(engine, before)[1]
        tally = visitors.tally
        problems += tally.problems[:20]
        say(tally.text())
        say(
            f"asked for {tally.num_offered / seconds:.1f} choices/s, answered {tally.num_choices / seconds:.1f}: "
            f"{tally.num_offered / tally.num_choices:.2f} times too many"
        )
        growing = _judge_memory(watch, seconds)
        if timed:
            problems += growing
            longest_s = 2 * (MAX_QUEUED + MAX_RUNNING) / rate + (10 if mode == "queue" else 0)
            if (worst_s := sorted(tally.ttft_s)[int(0.99 * (len(tally.ttft_s) - 1))]) > longest_s:
                problems.append(
                    f"99 % of first tokens within {worst_s:.1f} s, the limit is {longest_s:.1f} s"
                )
        problems += reports_nothing_lost(engine.log)
        if (code := engine.stop()) != 0:
            problems.append(f"exit code {code}")
        return problems + engine.leftovers()


def _judge_memory(watch: Watch, seconds: float) -> list[str]:
    """Say what each process did, and whose memory grows."""
    warm_s = min(_WARM_UP_SHARE * seconds, _MAX_WARM_UP_S)
    minutes = (watch.samples[-1][0] - warm_s) / 60
    problems = []
    for role, slope in watch.slopes_kib(warm_s).items():
        all_held = [held[role] for _, held in watch.samples]
        warm = [held[role] for at_s, held in watch.samples if at_s >= warm_s]
        say(f"{role}: {slope:+.1f} KiB/min after {warm_s:.0f} s; {_course(all_held, warm)}")
        if slope > _MAX_SLOPE_KIB and slope * minutes > _MAX_GROWTH_KIB:
            problems.append(f"{role}: memory grows by {slope:.1f} KiB/min")
    return problems


def _course(all_held: list[Held], warm: list[Held]) -> str:
    return (
        f"{all_held[0].memory_kib} KiB at the start, {warm[0].memory_kib} then, {warm[-1].memory_kib} at the end, "
        f"{max(held.memory_kib for held in all_held)} at most; {max(held.fds for held in all_held)} files at most, "
        f"{max(held.threads for held in all_held)} threads"
    )


def memory_text(processes: Mapping[str, Held]) -> str:
    """For people."""
    return ", ".join(f"{role} {held.memory_kib} KiB" for role, held in processes.items())


def say(text: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
