"""The parts of a step's time: matmuls, attention, small kernels, sampling, and the work around them.

    python benchmarks/step_breakdown.py [--threads 2] [--model FOLDER]

In process, with random weights in the shapes of SmolLM2-135M: every call of a function of the native library is timed,
and the sampler as a whole; the rest of the step is the runner's host work, including torch's operations. These steps
run one operation at a time (`--enforce-eager`), because the parts of a recorded step are not visible from outside; the
same step as served, recorded if possible, is printed next to it. The scheduler is timed alone, as in
`scheduler_cost.py`. With `--model` that model is also served to one stream and to 64: the time between two
tokens over HTTP, and the CPU time of each server process per token.

Medians.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.machine import cpu_seconds, process_name, tree
from benchmarks.peers.server import MODEL_NAME, engine_side, running
from benchmarks.peers.workloads import run_client
from engine.launch.child.process_resources import shorten_spinning

if TYPE_CHECKING:
    from benchmarks.player import Player

LINEARS, ATTENTION, SMALL, SAMPLING, OTHER, HOST_WORK = (
    "linears",
    "attention",
    "norms, rotary, activation",
    "sampling",
    "other kernels",
    "runner's host work",
)
PARTS: Final = (LINEARS, ATTENTION, SMALL, SAMPLING, OTHER, HOST_WORK)
STEP, SERVED = "step, operation by operation", "step as served"
SCHEDULER, BETWEEN, TOKEN = "scheduler", "IPC, detokenizer, HTTP, client", "between tokens over HTTP"

_PART_OF: Final[Sequence[tuple[tuple[str, ...], str]]] = (
    (("attend", "attention", "plan_attention"), ATTENTION),
    (("norm", "silu", "gelu", "rotate"), SMALL),
    (("choose", "logprob", "sampl"), SAMPLING),
    (("linear", "block"), LINEARS),
)
"""Parts of the names of the library's functions; the first match counts."""


class Case(NamedTuple):
    """A step: the number of requests, their length, and the number of new tokens."""

    name: str
    num_requests: int
    length: int
    new: int = 1
    served: bool = False  # also over HTTP


CASES: Final = (
    Case("1 x 256", 1, 256, served=True),
    Case("64 x 512", 64, 512, served=True),
    Case("prompt of 1,900", 1, 1900, new=1900),
)
SERVED_OUTPUT_LEN: Final = 128
CLIENT_LIMIT_S: Final = 600.0


Parts = dict[str, float]
"""Microseconds by part."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=100, help="steps of each decode case; of prompts a tenth"
    )
    parser.add_argument("--model", help="also serve this model, bf16 like the steps in process")
    parser.add_argument("--serve-args", default="", help="more flags for `engine serve`, as one string")
    parser.add_argument("--port", type=int, default=18_090)
    arguments = parser.parse_args()
    shorten_spinning()
    cases: dict[str, Parts] = {}
    for case, parts in in_process(arguments.threads, arguments.steps):
        cases[case.name] = parts
        if case.new == 1:
            parts[SCHEDULER] = scheduler_us(case.num_requests)
    if arguments.model:
        for case, parts in served(arguments.model, arguments.port, shlex.split(arguments.serve_args)):
            cases[case.name] |= parts
    for name, parts in cases.items():
        if TOKEN in parts:
            parts[BETWEEN] = parts[TOKEN] - parts[SERVED] - parts[SCHEDULER]
        print(f"\n**{name}**, {arguments.threads} threads\n")
        print("\n".join(table(parts)))


def part_of(function: str) -> str:
    """The part of a step to which a function of the native library belongs."""
    return next((part for names, part in _PART_OF if any(name in function for name in names)), OTHER)


class Timers:
    """Time by part. All time inside of `whole` belongs to its part."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._inside = False

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its time counted."""

        def call(*arguments: Any) -> Any:
            if self._inside:
                return function(*arguments)
            started_s = self._clock()
            result = function(*arguments)
            self.spent_s[part] += self._clock() - started_s
            return result

        return call

    def whole(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its time counted, including its calls."""

        def call(*arguments: Any) -> Any:
            self._inside = True
            try:
                started_s = self._clock()
                return function(*arguments)
            finally:
                self.spent_s[part] += self._clock() - started_s
                self._inside = False

        return call


class TimedLibrary:
    """The native library, with each function's time counted for its part; other attributes are unchanged."""

    def __init__(self, library: Any, functions: Collection[str], timers: Timers) -> None:
        self._library = library
        self._functions = functions
        self._timers = timers

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._library, name)
        if name in self._functions:
            value = self._timers.timed(part_of(name), value)
            setattr(self, name, value)  # the next access finds it as a normal attribute
        return value


@contextmanager
def timed_library(timers: Timers) -> Iterator[None]:
    """Runners loaded inside this context call a library that counts."""
    from engine.model_runner.kernels.cpu import library

    timed = TimedLibrary(library.load_library(), library._SIGNATURES.keys(), timers)
    with (
        patch.object(library, "_load_best", lambda isa: timed),
        patch.object(library, "_load", lambda isa: timed),
    ):
        yield


# ---------------------------------------------------------------- in process


def in_process(num_threads: int, num_steps: int) -> Iterator[tuple[Case, Parts]]:
    """Each case, in microseconds: the parts, their step, and the step as served."""
    import torch

    from benchmarks.player import make_player
    from engine.model_runner.kernels.cpu.library import reasons_against_library

    if reasons := reasons_against_library():
        sys.exit(f"there are no native kernels to measure: {'; '.join(reasons)}")
    torch.set_num_threads(num_threads)
    as_served = make_player(num_threads)
    timers = Timers()
    with timed_library(timers):
        eager = make_player(num_threads, recorded=False)
    sampler: Any = eager.runner.sampler
    with patch.object(sampler, "sample", timers.whole(SAMPLING, sampler.sample)):
        for case in CASES:
            steps = num_steps if case.new == 1 else max(3, num_steps // 10)
            yield case, _time_case(case, eager, as_served, timers, steps)


def _time_case(case: Case, eager: Player, as_served: Player, timers: Timers, num_steps: int) -> Parts:
    samples: dict[str, list[float]] = defaultdict(list)
    players = {STEP: eager, SERVED: as_served}
    for turn, plans in enumerate(_plans(case, list(players.values()), num_steps)):
        for (name, player), plan in zip(players.items(), plans, strict=True):
            timers.spent_s.clear()
            started_s = time.perf_counter()
            player.runner.launch(plan).wait()
            taken_s = time.perf_counter() - started_s
            if turn == 0:
                continue  # it adds the requests, or warms up caches
            samples[name].append(taken_s)
            if player is eager:
                for part in PARTS:
                    samples[part].append(timers.spent_s.get(part, 0.0))
                samples[HOST_WORK][-1] = taken_s - sum(timers.spent_s.values())
    for player in players.values():
        player.finished = list(range(case.num_requests))
    return {name: statistics.median(values) * 1e6 for name, values in samples.items()}


def _plans(case: Case, players: Sequence[Player], num_steps: int) -> Iterator[list[Any]]:
    """One plan for each player in turn: the next decode, or a new prompt."""
    from benchmarks.player import VOCAB

    source = random.Random(0)
    for turn in range(num_steps + 1):
        tokens = None
        if turn == 0 or case.new > 1:
            tokens = [[source.randrange(VOCAB) for _ in range(case.length)] for _ in range(case.num_requests)]
        grown = turn if case.new == 1 else 0
        yield [player.plan([case.length + grown] * case.num_requests, case.new, tokens) for player in players]
        if case.new > 1:
            for player in players:
                player.finished = list(range(case.num_requests))


def scheduler_us(num_running: int, rounds: int = 200) -> float:
    """Planning and settling one decode step, CPU time of the thread."""
    from benchmarks.scheduler_cost import decode_step

    return statistics.median(decode_step(num_running, rounds)[2]) * 1e6


# ---------------------------------------------------------------- over HTTP


def served(model: str, port: int, serve_args: Sequence[str]) -> Iterator[tuple[Case, Parts]]:
    """The time between two tokens, and each process's CPU time for one token, in microseconds."""
    # Without multi-step decode: the parts of a step and the time between two steps must add up to the time of a token.
    side = engine_side("engine", port, model, "--multi-step-ms", "0", *serve_args)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running(side, log) as server:
            for case in CASES:
                if case.served:
                    yield case, _ask(server.side.url, server.pid, case, model)


def _ask(url: str, pid: int, case: Case, model: str) -> Parts:
    """A run with the mean request length of the case."""
    options = ["--model", MODEL_NAME, "--tokenizer", model, "--num-prompts", str(case.num_requests)]
    options += ["--random-input-len", str(case.length - SERVED_OUTPUT_LEN // 2)]
    options += ["--random-output-len", str(SERVED_OUTPUT_LEN), "--seed", str(case.num_requests)]
    before_s = {process: cpu_seconds(process) for process in tree(pid)}
    summary, _ = run_client(url, options, CLIENT_LIMIT_S)
    parts = {TOKEN: summary["itl_ms"]["median"] * 1e3}
    for process, at_start_s in before_s.items():
        name = f"CPU a token: {'engine: supervisor' if process == pid else process_name(process)}"
        spent_us = (cpu_seconds(process) - at_start_s) / summary["output_tokens"] * 1e6
        parts[name] = parts.get(name, 0.0) + spent_us
    return parts


def table(parts: Parts) -> list[str]:
    """Microseconds, and the share of the step or, further down, of a token's time."""
    lines = ["| | us | share |", "|---|---|---|"]
    known = [*PARTS, STEP, SERVED, SCHEDULER, BETWEEN, TOKEN]
    for name in [name for name in known if name in parts] + sorted(parts.keys() - set(known)):
        whole = parts.get(STEP if name in PARTS else TOKEN if name in (SERVED, SCHEDULER, BETWEEN) else "")
        share = f"{parts[name] / whole:.0%}" if whole else ""
        value = f"{parts[name]:,.0f}" if abs(parts[name]) >= 100 else f"{parts[name]:.1f}"
        lines.append(f"| {name} | {value} | {share} |")
    return lines


if __name__ == "__main__":
    main()
