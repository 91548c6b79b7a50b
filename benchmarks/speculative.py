"""Gain of drafts: a server for each method, the same requests to each in turn, ratios of their rates.

    python benchmarks/speculative.py [repeat] [agent] [chat] [load] [--methods off ngram suffix] [--rounds 5]
    python benchmarks/speculative.py chat load --methods off draft=FOLDER eagle3=FOLDER
    python benchmarks/speculative.py repeat chat --model M.gguf --peers FOLDER --methods off suffix llama llama=TYPE

A method may name the model or head that drafts after `=`. `llama` is llama.cpp without drafts, in a folder set up by
`python benchmarks/cpu_vs_peers.py setup`; after `=` comes its `--spec-type`. It has one slot, so no `load`.

`repeat`: one agent does the same loop of eight turns with the same tools again. `agent`: each loop is about another
file. `chat`: one stream of unlike questions. `load`: 64 streams at once, of unlike questions. Answers are greedy and
end by themselves or after `--output-len` tokens; a line says how many texts were equal for all methods. Rates are
output tokens per second of requests from beginning to end, prompts included. The first round is not counted.

All servers run from the beginning to the end, and each round asks them in another order, so that only ratios of one
round are compared; the table has the medians and ranges. `to own` compares each with the same server's decoding without
drafts. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

# As a script, import the other benchmarks from the repository's root; last in the path, to hide no package.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.server import Side, engine_side, llama_side, start
from benchmarks.peers.setup import Peers

NUM_STREAMS: Final = 64
_LLAMA: Final = "llama"
_START_S: Final = 600.0
_ANSWER_S: Final = 3600.0
TOOLS: Final = """You are a coding agent. Answer with one tool call as JSON and nothing else. Your tools:
{"name": "read_file", "arguments": {"path": "string", "first_line": "integer", "last_line": "integer"}}
{"name": "edit_file", "arguments": {"path": "string", "old_text": "string", "new_text": "string"}}
{"name": "run_tests", "arguments": {"path": "string", "timeout_seconds": "integer"}}"""
TURNS: Final = (
    "Read the file {file}.",
    "The file has a function `add(a, b)` that returns a - b. Correct it.",
    "The edit was applied. Run the tests of {file}.",
    "1 failed: test_add_negative: expected -3, got 3. Read the file {file} again.",
    "The function is: def add(a, b): return abs(a + b). Correct it.",
    "The edit was applied. Run the tests of {file}.",
    "All tests passed. Read the file {file} a last time.",
    "Summarize what you changed in {file} as a tool call of edit_file with the same old text.",
)
TOPICS: Final = (
    *(
        "rain",
        "bread",
        "tides",
        "bicycles",
        "glass",
        "bees",
        "maps",
        "paper",
        "salt",
        "clocks",
        "bridges",
        "cats",
    ),
    *(
        "steel",
        "music",
        "deserts",
        "trains",
        "soap",
        "stars",
        "rivers",
        "chess",
        "wool",
        "volcanoes",
        "tea",
        "ants",
    ),
)
ASKS: Final = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List facts about {}.",
    "Why do we need {}?",
)


class Round(NamedTuple):
    """The texts of a workload, their tokens, and the seconds that they took."""

    texts: list[str]
    num_tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds


class Client:
    """Asks one server."""

    def __init__(self, url: str, output_len: int) -> None:
        self._url, self._output_len = url, output_len
        self.num_tokens = 0
        self._http = httpx.Client(timeout=_ANSWER_S, limits=httpx.Limits(max_connections=NUM_STREAMS))

    def answer(self, messages: list[dict[str, str]]) -> str:
        """The answer to a conversation."""
        body = {"messages": messages, "max_tokens": self._output_len, "temperature": 0}
        response = self._http.post(f"{self._url}/v1/chat/completions", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        self.num_tokens += answer["usage"]["completion_tokens"]  # by threads, of which one runs at a time
        return str(answer["choices"][0]["message"]["content"])

    def repeat(self, number: int) -> list[str]:
        """The same loop of the agent in each round."""
        return self.agent(0)

    def agent(self, number: int) -> list[str]:
        """A loop of the agent, about another file in each round."""
        messages, texts = [{"role": "system", "content": TOOLS}], []
        for turn in TURNS:
            messages.append({"role": "user", "content": turn.format(file=f"src/part_{number}/sums.py")})
            texts.append(self.answer(messages))
            messages.append({"role": "assistant", "content": texts[-1]})
        return texts

    def chat(self, number: int) -> list[str]:
        """Eight questions, one after the other."""
        return [self.answer(_question(8 * number + idx)) for idx in range(8)]

    def load(self, number: int) -> list[str]:
        """As many questions as streams, all at once."""
        questions = [_question(NUM_STREAMS * number + idx) for idx in range(NUM_STREAMS)]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            return list(pool.map(self.answer, questions))


def _question(number: int) -> list[dict[str, str]]:
    topic, ask = TOPICS[number % len(TOPICS)], ASKS[number // len(TOPICS) % len(ASKS)]
    repeat = number // (len(TOPICS) * len(ASKS))  # later rounds ask something else
    return [
        {
            "role": "user",
            "content": ask.format(topic) + (f" Begin with the letter {repeat}." if repeat else ""),
        }
    ]


def timed(client: Client, part: str, number: int) -> Round:
    """A round of a workload."""
    begin_s, before = time.perf_counter(), client.num_tokens
    texts = getattr(client, part)(number)
    return Round(texts, client.num_tokens - before, time.perf_counter() - begin_s)


def row(part: str, rounds: dict[str, list[Round]], base: str) -> str:
    """The table's row: rates of the methods, and their ratios to one of them, or to the server's own (`own`)."""
    cells = []
    for method, own in rounds.items():
        plain = next(iter(rounds)) if not method.startswith(_LLAMA) else _LLAMA
        compared = rounds[plain if base == "own" else base]
        ratios = [a.rate / b.rate for a, b in zip(own, compared, strict=True)]
        cells.append(
            f"{statistics.median(each.rate for each in own):.1f} tok/s, {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return f"| {part}, to {base} | {' | '.join(cells)} |"


def make_side(method: str, port: int, options: argparse.Namespace) -> Side:
    """The server of a method."""
    speculative, _, drafter = method.partition("=")
    if speculative == _LLAMA:
        more = ["--parallel", "1", "--ctx-size", "4096", "--spec-type", drafter or "none"]
        llama = Peers.of(options.peers).llama
        return llama_side(llama, method, port, options.model, options.threads, *more)
    more = ["--speculative", speculative, "--max-total-tokens", "32768", "--max-running-requests", "64"]
    more += ["--num-threads", str(options.threads)]
    more += ["--speculative-model", drafter] if drafter else []
    return engine_side(method, port, options.model, *more)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", default=["repeat", "agent", "chat", "load"])
    parser.add_argument("--methods", nargs="+", default=["off", "ngram", "suffix"])
    parser.add_argument("--model", help="(default: that of `engine serve`)")
    parser.add_argument(
        "--peers", type=Path, help="the folder of the peers, for the methods llama and llama=TYPE"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of each server (default: one per core)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--port", type=int, default=18_700)
    options = parser.parse_args()
    has_llama = any(method.startswith(_LLAMA) for method in options.methods)
    if has_llama and not (options.peers and options.model and _LLAMA in options.methods):
        parser.error(
            f"methods={options.methods}: give --peers FOLDER, --model FILE.gguf and the method llama"
        )
    if has_llama and "load" in options.parts:
        parser.error(f"parts={options.parts}: llama has one slot; name other parts")
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        clients: dict[str, Client] = {}
        for idx, method in enumerate(options.methods):
            side = make_side(method, options.port + idx, options)
            server = start(side, Path(folder) / f"{idx}.log", _START_S)
            stack.callback(server.stop)
            clients[method] = Client(side.url, options.output_len)
        print(f"| | {' | '.join(options.methods)} |\n|---|{'---|' * len(options.methods)}", flush=True)
        for part in options.parts:
            rounds: dict[str, list[Round]] = {method: [] for method in options.methods}
            for number in range(options.rounds + 1):
                shift = number % len(clients)
                for method in [*options.methods[shift:], *options.methods[:shift]]:
                    rounds[method].append(timed(clients[method], part, number))
            counted = {method: each[1:] for method, each in rounds.items()}
            bases = ["own"] if has_llama else options.methods[:2]
            for base in bases:
                print(row(part, counted, base), flush=True)
            texts = [[text for each in own for text in each.texts] for own in counted.values()]
            equal = sum(len(set(each)) == 1 for each in zip(*texts, strict=True))
            print(f"\n{part}: {equal} of {len(texts[0])} texts are equal\n", flush=True)


if __name__ == "__main__":
    main()
