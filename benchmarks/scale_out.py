"""Several replicas, stages, or a pair of a prefill and a decode engine, beside one process of all cores.

    python benchmarks/scale_out.py [rate] [pp] [affinity] [pd] [--rounds 3] [--requests 64] [--replicas 2]
        [--stages 2] [--pool 4608]

`rate`: the requests of W3 (see `cpu_vs_peers.py`) all at once, with token ids and exact output lengths, to one replica
with all cores and to `--replicas` that share them; in interleaved rounds, both servers up. Replicas win nothing here by
their number: it shows what the division of cores costs.

`pp`: the same for `--stages` pipeline stages that share the cores, in the place of replicas: what it costs that stages
hand on their results, and that they have to wait for each other.

`affinity`: families of prompts with equal beginnings, four requests at a time, and KV pools that hold the beginnings of
their share of the families but not of all. The share of prompt tokens that came from a prefix cache, with the default
policy and with `round-robin`.

`pd`: streams that generate, and long prompts that arrive one by one meanwhile, at fixed times. The time between two
tokens of a stream, in one engine with all cores and in a pair (`--disaggregation-mode both`) that shares them.

The machine must be idle otherwise for all but `affinity`, which counts tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import httpx

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.server import MODEL_NAME, Server, Side, engine_side, start

KV_TOKENS: Final = 65_536
INPUT_LENS: Final = (64, 512)
OUTPUT_LENS: Final = (64, 256)
NUM_STREAMS: Final = 4
STREAM_TOKENS: Final = 1_500
LONG_PROMPT: Final = 1_500
NUM_LONG: Final = 4
LONG_EVERY_S: Final = 9.0
"""A little more than a core needs for a long prompt of the default model."""
NUM_FAMILIES: Final = 8
BEGINNING: Final = 1_024
OWN: Final = 48
AT_A_TIME: Final = 4
FAMILY_POOL: Final = 4_608
"""KV slots of a replica: half of the beginnings, and room for the requests that run. The larger, the less is won."""
_FIRST_ID: Final = 20
_START_S: Final = 600.0
_ANSWER_S: Final = 3600.0


class Gaps(NamedTuple):
    """Seconds: percentiles of the times between tokens, and the median answer to a long prompt."""

    p50: float
    p99: float
    longest: float
    long_prompt: float

    def __str__(self) -> str:
        return (
            f"P50 {1000 * self.p50:.0f} ms, P99 {1000 * self.p99:.0f} ms, longest {1000 * self.longest:.0f} ms, "
            f"long prompt {self.long_prompt:.1f} s"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="rate, pp, affinity, pd (default: rate and affinity)",
        default=["rate", "affinity"],
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--model", help="of rate and pp (default: that of `engine serve`)")
    parser.add_argument("--pool", type=int, default=FAMILY_POOL, help="KV slots of a replica in affinity")
    parser.add_argument("--port", type=int, default=18_400, help="the first of two")
    options = parser.parse_args()
    if unknown := set(options.parts) - {"rate", "pp", "affinity", "pd"}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are rate, pp, affinity and pd")
    pool = KV_TOKENS // options.replicas
    replicas = ("--dp", str(options.replicas), "--max-total-tokens", str(pool))
    stages = ("--pp", str(options.stages), "--max-total-tokens", str(KV_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        if "rate" in options.parts:
            print(rate_table("replicas", measure_rates(options, Path(folder), replicas)))
        if "pp" in options.parts:
            print(rate_table("stages", measure_rates(options, Path(folder), stages)))
        if "affinity" in options.parts:
            print(affinity_table(measure_affinity(options, Path(folder))))
        if "pd" in options.parts:
            print(gap_table(measure_gaps(options, Path(folder))))


def measure_rates(
    options: argparse.Namespace, folder: Path, several: Sequence[str]
) -> dict[str, list[float]]:
    """Output tokens per second of one process, and with the options `several`, in each round."""
    sides = [
        engine_side("one", options.port, options.model, "--max-total-tokens", str(KV_TOKENS)),
        engine_side("several", options.port + 1, options.model, *several),
    ]
    rates: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as running:
        servers = []
        for side in sides:
            servers.append(start(side, folder / f"{side.name}.log", _START_S))
            running.callback(servers[-1].stop)
        for number in range(options.rounds + 1):  # the first ones warm up
            requests = requests_of(number, options.requests if number else 8)
            for server in servers:
                rate = rate_of(server.side, requests)
                if number:
                    rates[server.side.name].append(rate)
                    print(f"round {number}: {server.side.name} {rate:.1f} tok/s", flush=True)
    return rates


class Request(NamedTuple):
    """A prompt of token ids, and the length of its answer."""

    prompt: list[int]
    output_len: int


def requests_of(number: int, count: int) -> list[Request]:
    """The requests of a round."""
    source = random.Random(number)
    return [
        Request(_ids(source, source.randint(*INPUT_LENS)), source.randint(*OUTPUT_LENS)) for _ in range(count)
    ]


def rate_of(side: Side, requests: Sequence[Request]) -> float:
    """Send all at once; output tokens per second until the last answer.

    Raises:
        SystemExit: an answer is an error or has another length.
    """
    with httpx.Client(timeout=_ANSWER_S, limits=httpx.Limits(max_connections=None)) as client:

        def ask(request: Request) -> int:
            body = {"model": MODEL_NAME, "prompt": request.prompt, "max_tokens": request.output_len}
            body |= {"temperature": 0, "ignore_eos": True}
            answer = client.post(f"{side.url}/v1/completions", json=body)
            if answer.status_code != 200:
                raise SystemExit(f"{side.name}: HTTP {answer.status_code}: {answer.text[:300]}")
            num_tokens = int(answer.json()["usage"]["completion_tokens"])
            if num_tokens != request.output_len:
                raise SystemExit(f"{side.name}: {num_tokens} tokens instead of {request.output_len}")
            return num_tokens

        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as clients:
            total = sum(clients.map(ask, requests))
        return total / (time.perf_counter() - started_s)


def rate_table(name: str, rates: Mapping[str, Sequence[float]]) -> str:
    """Medians, and the median of the rounds' ratios."""
    ratios = [several / one for one, several in zip(rates["one"], rates["several"], strict=True)]
    return (
        f"one process {statistics.median(rates['one']):.1f} tok/s, {name} "
        f"{statistics.median(rates['several']):.1f} tok/s, ratio {statistics.median(ratios):.2f}"
    )


def measure_gaps(options: argparse.Namespace, folder: Path) -> dict[str, list[Gaps]]:
    """The times between tokens of one engine and of a pair, in each round; each server is up alone."""
    sides = {
        "one": ("--max-total-tokens", str(KV_TOKENS)),
        "pair": ("--disaggregation-mode", "both", "--max-total-tokens", str(KV_TOKENS // 2)),
    }
    gaps: dict[str, list[Gaps]] = defaultdict(list)
    for number in range(options.rounds):
        for index, (name, flags) in enumerate(sides.items()):
            server = start(
                engine_side(name, options.port + index, None, *flags), folder / f"{name}.log", _START_S
            )
            try:
                found = gaps_beside_prompts(server.side.url, number)
            finally:
                server.stop()
            gaps[name].append(found)
            print(f"round {number + 1}: {name} {found}", flush=True)
    return gaps


def gaps_beside_prompts(url: str, seed: int) -> Gaps:
    """Percentiles of the times between the tokens of some streams while long prompts arrive."""
    source = random.Random(seed)
    ended = threading.Event()

    def stream(prompt: list[int]) -> list[float]:
        body = {"prompt": prompt, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        completions = f"{url}/v1/completions"
        with (
            httpx.Client(timeout=_ANSWER_S) as client,
            client.stream("POST", completions, json=body) as answer,
        ):
            times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
        return [after - before for before, after in pairwise(times)]

    def ask(prompt: list[int]) -> float:
        started_s = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=_ANSWER_S).raise_for_status()
        return time.perf_counter() - started_s

    ask(_ids(source, 64))
    with ThreadPoolExecutor(NUM_STREAMS + NUM_LONG) as pool:
        streams = [pool.submit(stream, _ids(source, 32)) for _ in range(NUM_STREAMS)]
        asked = []
        for _ in range(NUM_LONG):
            ended.wait(LONG_EVERY_S)  # fixed times of arrival, whatever the server does
            asked.append(pool.submit(ask, _ids(source, LONG_PROMPT)))
        gaps = sorted(gap for each in streams for gap in each.result())
        first_s = statistics.median(each.result() for each in asked)
    return Gaps(gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)], gaps[-1], first_s)


def gap_table(gaps: Mapping[str, Sequence[Gaps]]) -> str:
    """Medians over the rounds, and the ratio of the 99th percentiles."""
    rows = ["", "| | P50, ms | P99, ms | longest, ms | long prompt, s |", "|---|---|---|---|---|"]
    for name, each in gaps.items():
        middle = [statistics.median(values) for values in zip(*each, strict=True)]
        rows.append(
            f"| {name} | {' | '.join(f'{1000 * value:.0f}' for value in middle[:3])} | {middle[3]:.1f} |"
        )
    ratio = statistics.median(pair.p99 / one.p99 for one, pair in zip(gaps["one"], gaps["pair"], strict=True))
    return "\n".join([*rows, f"P99 of the pair to that of one engine: {ratio:.2f} (target 0.5 or less)"])


def family_prompts(seed: int, count: int) -> list[list[int]]:
    """Token ids of `count` prompts: a family by chance, its beginning, and tokens of its own."""
    source = random.Random(seed)
    beginnings = [_ids(source, BEGINNING) for _ in range(NUM_FAMILIES)]
    return [source.choice(beginnings) + _ids(source, OWN) for _ in range(count)]


def _ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(_FIRST_ID, 40_000) for _ in range(count)]


def measure_affinity(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Share of prompt tokens from a prefix cache, by policy; each server gets the same prompts in the same order."""
    prompts = family_prompts(7, 2 * options.requests)
    shares = {}
    for policy in ("round-robin", "prefix-affinity"):
        side = engine_side(
            policy,
            options.port,
            None,
            *("--dp", str(options.replicas), "--dispatch-policy", policy),
            *("--max-total-tokens", str(options.pool), "--max-model-len", "2048"),
        )
        server = start(side, folder / f"{policy}.log", _START_S)
        try:
            shares[policy] = cached_share(server, prompts)
        finally:
            server.stop()
        print(f"{policy}: {shares[policy]:.3f} of the prompt tokens were cached", flush=True)
    return shares


def cached_share(server: Server, prompts: Sequence[list[int]]) -> float:
    """Ask for a token behind each prompt.

    Raises:
        SystemExit: an answer is an error.
    """
    with httpx.Client(timeout=_ANSWER_S) as client:

        def ask(prompt: list[int]) -> tuple[int, int]:
            body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            answer = client.post(f"{server.side.url}/v1/completions", json=body)
            if answer.status_code != 200:
                raise SystemExit(f"{server.side.name}: HTTP {answer.status_code}: {answer.text[:300]}")
            usage = answer.json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

        with ThreadPoolExecutor(AT_A_TIME) as clients:
            counts = list(clients.map(ask, prompts))
    return sum(cached for cached, _ in counts) / sum(total for _, total in counts)


def affinity_table(shares: Mapping[str, float]) -> str:
    """Both shares and their ratio."""
    ratio = shares["prefix-affinity"] / max(shares["round-robin"], 1e-9)
    return (
        f"cached share of the prompt tokens: round-robin {shares['round-robin']:.2f}, prefix-affinity "
        f"{shares['prefix-affinity']:.2f}, ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
