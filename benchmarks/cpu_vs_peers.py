"""The engine and others compared on a CPU: one model, the same requests, interleaved, medians and ratios.

    python benchmarks/cpu_vs_peers.py setup [--peers-dir DIR] [--pip-args "--extra-index-url URL"]
    python benchmarks/cpu_vs_peers.py run --output results.json [--sides engine-bf16 vllm] [--workloads W1 W3] [--quick]
    python benchmarks/cpu_vs_peers.py table results.json

The others are vLLM's CPU build, llama.cpp, and three libraries without a server, which `peers/library_server.py` adds:
ik_llama.cpp, mistral.rs and OpenVINO GenAI. `setup` installs the peers in separate environments, outside the
repository, and converts the default model for them; what exists is kept. `run` measures: first each server alone (from
its command to the first completion, memory with its KV pool full), then all of them up, with requests to one at a
time, A B C A B C. The client is `engine bench serve` in a separate process, with token ids, fixed seeds that change
with every round, exact output lengths, which are checked. The file is written after every measurement, and `run`
continues after an interruption. The machine must be idle otherwise; the CPU share of other processes is part of every
measurement.

Transformers' server is not among the peers: it takes prompts as text only, so their lengths cannot be set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

# As a script, import its parts from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.ceilings import Ceiling
from benchmarks.peers.limits import Machine, ServedModel, batch_limit, decode_limit, prefill_limit
from benchmarks.peers.machine import Snapshot, resident_bytes
from benchmarks.peers.models import (
    OtherModelError,
    ensure_bf16_folder,
    ensure_bf16_gguf,
    models_in,
    served_model,
)
from benchmarks.peers.results import (
    SCHEMA,
    Failure,
    Measurement,
    MismatchError,
    Results,
    all_tables,
    open_results,
    read_results,
)
from benchmarks.peers.server import (
    SIDES,
    START_LIMIT_S,
    Models,
    Room,
    Server,
    ServerError,
    Side,
    make_side,
    running,
    start,
)
from benchmarks.peers.setup import LIBRARIES, LlamaCpp, Peers
from benchmarks.peers.workloads import MEMORY, START, WORKLOADS, RunError, Workload, is_compared, quick
from engine.cli.bench.result_file import git_revision, machine_facts
from engine.cli.bench.workloads.workload import WorkloadTokenizer
from engine.models.hub.built_in.fetch import ensure_model
from engine.runtime.errors import ConfigError
from engine.runtime.installation import cache_dir

KV_TOKENS: Final = 65_536
RUN_LIMIT_S: Final = 900.0
STARTS: Final = 3
LONG_START_S: Final = 30.0
"""A side that needs longer is started once."""
FILL_PROMPT_LEN: Final = 1900


def main() -> int:
    """Run the subcommand; returns 1 if something could not be measured."""
    arguments = parse_arguments()
    match arguments.command:
        case "setup":
            set_up(arguments)
        case "table":
            try:
                results = read_results(arguments.results)
            except MismatchError as error:
                sys.exit(f"cannot read the results: {error}")
            workloads = [quick(w) if results.settings.get("quick") else w for w in WORKLOADS]
            print(all_tables(results, workloads, _limits(results, workloads, _gguf(arguments))))
        case _:
            return run(arguments)
    return 0


def set_up(arguments: argparse.Namespace) -> None:
    """Install missing peers and convert the model if that is missing."""
    peers, models = _places(arguments)
    for name, peer in peers.by_name().items():
        if name not in arguments.peers:
            continue
        if missing := peer.missing():
            print(f"{name}: {', '.join(missing)} missing")
            peer.set_up(shlex.split(arguments.pip_args))
            if missing := peer.missing():
                sys.exit(f"{name}: still without {', '.join(missing)}")
        print(f"{name}: ready in {peer.folder}")
    _convert(models, peers.llama)
    print(f"models: {models.gguf}, {models.bf16_folder}, {models.bf16_gguf}")


def _convert(models: Models, llama: LlamaCpp) -> None:
    ensure_bf16_folder(models.gguf, models.bf16_folder)
    if not llama.missing():
        ensure_bf16_gguf(models.gguf, models.bf16_gguf, llama.quantize)


def run(arguments: argparse.Namespace) -> int:
    """Measure what is missing and print the tables."""
    peers, models = _places(arguments)
    for needed_by, peer in peers.by_name().items():
        if any(side.startswith(needed_by) for side in arguments.sides) and (missing := peer.missing()):
            sys.exit(f"{needed_by}: {', '.join(missing)} not in {peer.folder}; run `setup` first")
    _convert(models, peers.llama)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    try:
        model = served_model(models, arguments.sides)
        room = Room(arguments.kv_tokens, model.costs.kv_token_bytes)
        sides = [
            make_side(name, arguments.port + n, models, peers, cores, room)
            for n, name in enumerate(SIDES)
            if name in arguments.sides
        ]
        settings = {
            "cores": list(cores),
            "kv_tokens": arguments.kv_tokens,
            "quick": arguments.quick,
            "git_revision": git_revision(),
        }
        by_side = {side.name: side.settings() for side in sides}
        results = open_results(arguments.output, Results(SCHEMA, settings, machine_facts(), by_side, model))
    except (ConfigError, OtherModelError, MismatchError) as error:
        sys.exit(str(error))
    workloads = [quick(w) if arguments.quick else w for w in WORKLOADS if w.name in arguments.workloads]
    runner = Runner(arguments, results, models.gguf)
    runner.measure_ceilings(model)
    if not arguments.no_alone:
        for side in sides:
            runner.measure_alone(side)
    jobs = [
        job
        for job in jobs_of(sides, workloads, 1 if arguments.quick else arguments.rounds, arguments.all_rounds)
        if not results.has(job.side.name, job.workload.name, job.round)
    ]
    if jobs:
        runner.measure_rounds(jobs)
        runner.measure_ceilings(model)  # again: the better figure counts
    print()
    print(all_tables(results, workloads, _limits(results, workloads, models.gguf)))
    return 1 if results.failures else 0


class Job(NamedTuple):
    """One measurement of the rounds."""

    side: Side
    workload: Workload
    round: int


def jobs_of(
    sides: Sequence[Side], workloads: Sequence[Workload], rounds: int, all_rounds: bool
) -> Iterator[Job]:
    """All measurements of the rounds, in order; each round begins with another side, so that none is always first.

    Args:
        all_rounds: measure pairs in every round, too, that no target compares; else in the first round only, because
            llama.cpp takes minutes for work that takes the others seconds.
    """
    for round_idx in range(rounds):
        turn = round_idx % len(sides)
        for workload in workloads:
            for side in (*sides[turn:], *sides[:turn]):
                if round_idx == 0 or all_rounds or is_compared(side.name, workload.name):
                    yield Job(side, workload, round_idx)


class Runner:
    """Makes measurements, stores each at once, and continues after a failure."""

    def __init__(self, arguments: argparse.Namespace, results: Results, gguf: Path) -> None:
        self._path: Path = arguments.output
        self._quick: bool = arguments.quick
        self._results = results
        self._gguf = gguf
        self._deadline_s: float = time.monotonic() + arguments.max_minutes * 60
        self._logs: Path = self._path.with_name(self._path.stem + "-logs")
        self._logs.mkdir(parents=True, exist_ok=True)

    def measure_ceilings(self, model: ServedModel) -> None:
        """Measure the limits in a separate process, so that no torch threads remain in this one."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "ceilings.json"
            command = [sys.executable, str(Path(__file__).with_name("ceilings.py")), "--json", str(out)]
            command += ["--threads", str(len(self._results.settings["cores"]))]
            command += ["--megabytes", *map(str, model.footprints)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            except subprocess.SubprocessError as error:
                self._note_failure("machine", "ceilings", str(error))
                return
            self._results.ceilings += msgspec.json.decode(out.read_bytes(), type=list[Ceiling])
        self._results.write(self._path)

    def measure_alone(self, side: Side) -> None:
        """Measure the starts of a side, and its memory at the end of the first one."""
        while not self._is_over():
            spent = list(self._results.values(side.name, START, "first completion").values())
            enough = 1 if self._quick or max(spent, default=0.0) > LONG_START_S else STARTS
            needs_memory = not self._results.count(side.name, MEMORY)
            if len(spent) >= enough and not needs_memory:
                return
            before = Snapshot.take(None)
            try:
                with running(side, self._log_of(side)) as server:
                    others = before.others_until(Snapshot.take(server.pid))
                    self._add(
                        side, START, len(spent), {"first completion": server.first_completion_s}, others
                    )
                    if needs_memory:
                        self._measure_memory(server)
            except (ServerError, RunError) as error:
                self._note_failure(side.name, "start and memory", str(error))
                return

    def _measure_memory(self, server: Server) -> None:
        if server.side.fills_kv:
            count = 1 if self._quick else -(-int(self._results.settings["kv_tokens"]) // FILL_PROMPT_LEN)
            settings = {"num_prompts": count, "random_input_len": str(FILL_PROMPT_LEN)}
            settings |= {"random_output_len": "1", "max_concurrency": 1}
            Workload("fill", "", settings, ()).run(server.side.url, self._gguf, 99, RUN_LIMIT_S)
        self._add(server.side, MEMORY, 0, {"resident": float(resident_bytes(server.pid))}, 0.0)

    def measure_rounds(self, jobs: Sequence[Job]) -> None:
        """Start all sides of the jobs, and run every job; a side that fails is left out from then on."""
        servers: dict[str, Server] = {}
        with contextlib.ExitStack() as stack:
            for side in {job.side.name: job.side for job in jobs}.values():
                try:
                    servers[side.name] = start(side, self._log_of(side), START_LIMIT_S)
                    stack.callback(servers[side.name].stop)
                except ServerError as error:
                    self._note_failure(side.name, "all rounds", str(error))
            for done, (side, workload, round_idx) in enumerate(jobs):
                if self._is_over():
                    self._note_failure("all", f"{len(jobs) - done} measurements", "--max-minutes is over")
                    return
                if side.name not in servers:
                    continue
                before = Snapshot.take(servers[side.name].pid)
                try:
                    figures = workload.run(side.url, self._gguf, 1000 * round_idx + 7, RUN_LIMIT_S)
                except RunError as error:
                    self._note_failure(side.name, f"{workload.name} in round {round_idx + 1}", str(error))
                    servers.pop(side.name).stop()  # its remaining work would disturb the others
                    continue
                others = before.others_until(Snapshot.take(servers[side.name].pid))
                self._add(side, workload.name, round_idx, figures, others)

    def _add(
        self, side: Side, workload: str, round_idx: int, figures: dict[str, float], others: float
    ) -> None:
        self._results.measurements.append(Measurement(side.name, workload, round_idx, figures, others))
        self._results.write(self._path)
        shown = ", ".join(f"{name} {value:,.2f}" for name, value in figures.items())
        print(
            f"round {round_idx + 1} {workload} {side.name}: {shown} (others {others:.2f} cores)", flush=True
        )

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline_s

    def _log_of(self, side: Side) -> Path:
        return self._logs / f"{side.name}.log"

    def _note_failure(self, side: str, what: str, reason: str) -> None:
        print(f"FAILED: {what} of {side}: {reason}", flush=True)
        self._results.failures.append(Failure(side, what, reason))
        self._results.write(self._path)


def _limits(results: Results, workloads: Sequence[Workload], gguf: Path) -> dict[tuple[str, str], float]:
    """Limits by workload and side, if the ceilings for them were measured."""
    if not results.ceilings:
        return {}
    machine = Machine(tuple(results.ceilings), len(results.settings["cores"]))
    by_name = {workload.name: workload for workload in workloads}
    known = _known_limits(machine, results.model, by_name, gguf)
    return {(name, side): limit for name, side, limit in known}


def _known_limits(
    machine: Machine, model: ServedModel, workloads: Mapping[str, Workload], gguf: Path
) -> Iterator[tuple[str, str, float]]:
    costs = model.costs
    bf16, four_bit = ("engine-bf16", "vllm", "llama-bf16"), ("engine-4bit", "llama-4bit")
    if "W1" in workloads:
        for side in bf16:
            yield "W1", side, decode_limit(machine, costs, costs.bf16_megabytes)
        if model.gguf_megabytes is not None:
            for side in four_bit:
                yield "W1", side, decode_limit(machine, costs, model.gguf_megabytes)
    if "W2" in workloads:
        prompt_len = int(workloads["W2"].settings["random_input_len"])
        for side in bf16:
            yield "W2", side, prefill_limit(machine, costs, prompt_len)
    if "W3" in workloads:
        requests = workloads["W3"].requests(WorkloadTokenizer.load(str(gguf)), seed=7)
        lens = [(request.prompt_len, request.output_len) for request in requests]
        for side in bf16:
            yield "W3", side, batch_limit(machine, costs, lens)


def _places(arguments: argparse.Namespace) -> tuple[Peers, Models]:
    folder: Path = arguments.peers_dir
    made = models_in(folder, _gguf(arguments))
    models = Models(
        gguf=made.gguf,
        bf16_folder=arguments.bf16_folder or made.bf16_folder,
        bf16_gguf=arguments.bf16_gguf or made.bf16_gguf,
    )
    return Peers.of(folder), models


def _gguf(arguments: argparse.Namespace) -> Path:
    return arguments.gguf or ensure_model()


def parse_arguments(texts: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    places = argparse.ArgumentParser(add_help=False)
    places.add_argument(
        "--peers-dir", type=_path, default=cache_dir() / "peers", help="of the peers (%(default)s)"
    )
    places.add_argument("--gguf", type=_path, help="the default model's file, if it is not fetched")
    places.add_argument(
        "--bf16-folder",
        type=_path,
        help="the model as bf16 folder, if it exists already, or another one with token ids that "
        "include those of --gguf, for the sides that serve no GGUF file",
    )
    places.add_argument("--bf16-gguf", type=_path, help="the model as BF16 GGUF, if it exists already")

    setup = commands.add_parser("setup", parents=[places], help="install the peers, convert the model")
    names = ["vllm", "llama", *LIBRARIES]
    setup.add_argument("--peers", nargs="+", choices=names, default=names)
    setup.add_argument(
        "--pip-args", default="", help="added to every pip command, such as an index of CPU builds"
    )

    measure = commands.add_parser("run", parents=[places], help="measure")
    measure.add_argument(
        "--output", type=_path, required=True, help="results as JSON; an existing file is resumed"
    )
    measure.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    names = [workload.name for workload in WORKLOADS]
    measure.add_argument("--workloads", nargs="+", choices=names, default=names)
    measure.add_argument("--rounds", type=int, default=3)
    measure.add_argument(
        "--all-rounds", action="store_true", help="measure pairs without a target in every round, too (slow)"
    )
    measure.add_argument("--no-alone", action="store_true", help="no starts, no memory: the rounds only")
    measure.add_argument(
        "--quick", action="store_true", help="one round of small workloads, to check that all of it runs"
    )
    measure.add_argument(
        "--kv-tokens",
        type=int,
        default=KV_TOKENS,
        help="KV capacity of every server, in tokens (%(default)s)",
    )
    measure.add_argument("--port", type=int, default=18_100, help="the first of nine (%(default)s)")
    measure.add_argument(
        "--max-minutes", type=float, default=180.0, help="start no measurement after this time (%(default)s)"
    )

    table = commands.add_parser("table", parents=[places], help="print the tables of a result file")
    table.add_argument("results", type=_path)
    return parser.parse_args(texts)


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


if __name__ == "__main__":
    sys.exit(main())
