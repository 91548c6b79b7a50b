"""The engine, vLLM's CPU build and llama.cpp compared: one model, the same requests, interleaved, medians and ratios.

    python benchmarks/cpu_vs_peers.py setup [--peers-dir DIR] [--pip-args "--extra-index-url URL"]
    python benchmarks/cpu_vs_peers.py run --output results.json [--sides engine-bf16 vllm] [--workloads W1 W3] [--quick]
    python benchmarks/cpu_vs_peers.py table results.json

`setup` installs the peers in separate environments, outside the repository, and converts the default model for
them; what exists is kept. `run` measures: first each server alone (from its command to the first
completion, memory with its KV pool full), then all of them up, with requests to one at a time, A B C A B C. The
client is `engine bench serve` in a separate process, with token ids, fixed seeds that change with every round, exact
output lengths, which are checked. The file is written after every measurement, and `run` continues after an
interruption. The machine must be idle otherwise; the CPU share of other processes is part of every measurement.

Transformers' server is not among the peers: it takes prompts as text only, so their lengths cannot be set.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

# As a script, import its parts from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.limits import Machine, ServedModel, batch_limit, decode_limit, prefill_limit
from benchmarks.peers.models import (
    OtherModelError,
    ensure_bf16_folder,
    ensure_bf16_gguf,
    models_in,
    served_model,
)
from benchmarks.peers.plan import Plan
from benchmarks.peers.results import (
    MismatchError,
    Results,
    open_results,
    read_results,
)
from benchmarks.peers.runner import Runner
from benchmarks.peers.setup import LlamaCpp, Vllm
from benchmarks.peers.sides import SIDES, Models, Room, make_side
from benchmarks.peers.tables import all_tables
from benchmarks.peers.workloads import WORKLOADS, Workload, quick
from engine.cli.bench.result_file import git_revision, machine_facts
from engine.cli.bench.workloads.workload import WorkloadTokenizer
from engine.models.hub.built_in.fetch import ensure_model
from engine.runtime.cache_dir import cache_dir
from engine.runtime.errors import ConfigError

KV_TOKENS: Final = 65_536


def main() -> int:
    """Run the subcommand; returns 1 if something could not be measured."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that servers are ended
    match arguments.command:
        case "setup":
            set_up(arguments)
        case "table":
            try:
                results = read_results(arguments.results)
            except (OSError, MismatchError) as error:
                sys.exit(f"cannot read the results: {error}")
            workloads = _workloads_of(results)
            print(all_tables(results, workloads, _limits(results, workloads, _gguf(arguments))))
        case _:
            return run(arguments)
    return 0


def set_up(arguments: argparse.Namespace) -> None:
    """Install missing peers and convert the model if that is missing."""
    vllm, llama, models = _places(arguments)
    for name, peer in (("vllm", vllm), ("llama", llama)):
        if name not in arguments.peers:
            continue
        if missing := peer.missing():
            print(f"{name}: {', '.join(missing)} missing")
            peer.set_up(shlex.split(arguments.pip_args))
            if missing := peer.missing():
                sys.exit(f"{name}: still without {', '.join(missing)}")
        print(f"{name}: ready in {peer.folder}")
    _convert(models, llama)
    print(f"models: {models.gguf}, {models.bf16_folder}, {models.bf16_gguf}")


def _convert(models: Models, llama: LlamaCpp) -> None:
    ensure_bf16_folder(models.gguf, models.bf16_folder)
    if not llama.missing():
        ensure_bf16_gguf(models.gguf, models.bf16_gguf, llama.quantize)


def run(arguments: argparse.Namespace) -> int:
    """Measure what is missing and print the tables."""
    vllm, llama, models = _places(arguments)
    for peer, needed_by in ((vllm, "vllm"), (llama, "llama")):
        if any(side.startswith(needed_by) for side in arguments.sides) and (missing := peer.missing()):
            sys.exit(f"{needed_by}: {', '.join(missing)} not in {peer.folder}; run `setup` first")
    _convert(models, llama)
    try:
        model = served_model(models, arguments.sides)
    except (ConfigError, OtherModelError) as error:
        sys.exit(str(error))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    room = Room(arguments.kv_tokens, model.costs.kv_token_bytes)
    sides = [
        make_side(name, arguments.port + n, models, vllm, llama, cores, room)
        for n, name in enumerate(SIDES)
        if name in arguments.sides
    ]
    workloads = [quick(w) if arguments.quick else w for w in WORKLOADS if w.name in arguments.workloads]
    settings = {
        "cores": list(cores),
        "kv_tokens": arguments.kv_tokens,
        "quick": arguments.quick,
        "git_revision": git_revision(),
    }
    try:
        results = open_results(
            arguments.output, settings, machine_facts(), {side.name: side.settings() for side in sides}, model
        )
    except MismatchError as error:
        sys.exit(str(error))
    results.failures = []
    rounds = 1 if arguments.quick else arguments.rounds
    plan = Plan(sides, workloads, rounds, all_rounds=arguments.all_rounds, quick=arguments.quick)
    runner = Runner(
        arguments.output,
        results,
        plan,
        model,
        models.gguf,
        max_minutes=arguments.max_minutes,
        alone=not arguments.no_alone,
    )
    runner.run()
    print()
    print(all_tables(results, workloads, _limits(results, workloads, models.gguf)))
    return 1 if results.failures else 0


def _limits(results: Results, workloads: Sequence[Workload], gguf: Path) -> dict[tuple[str, str], float]:
    """Limits by workload and side, if the ceilings for them were measured."""
    if results.model is None or not results.ceilings:
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


def _workloads_of(results: Results) -> list[Workload]:
    return [quick(w) if results.settings.get("quick") else w for w in WORKLOADS]


def _places(arguments: argparse.Namespace) -> tuple[Vllm, LlamaCpp, Models]:
    folder: Path = arguments.peers_dir
    made = models_in(folder, _gguf(arguments))
    models = Models(
        gguf=made.gguf,
        bf16_folder=arguments.bf16_folder or made.bf16_folder,
        bf16_gguf=arguments.bf16_gguf or made.bf16_gguf,
    )
    return Vllm(folder / "vllm"), LlamaCpp(folder / "llama"), models


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
    setup.add_argument("--peers", nargs="+", choices=["vllm", "llama"], default=["vllm", "llama"])
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
    measure.add_argument("--port", type=int, default=18_100, help="the first of six (%(default)s)")
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
