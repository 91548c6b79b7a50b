"""Decoding with `--speculative ngram` compared with plain decoding: the same prompts, in turn, in one process.

    python benchmarks/speculative.py --model FOLDER [--threads 2] [--rounds 3] [--batch 1 8] [--what edit]

Three workloads: `edit` (repeat a paragraph with a word replaced), `summarise` (in few sentences), both with paragraphs
of this repository's documentation and the model's own chat template, and `random`, with prompts of random tokens and
answers sampled at temperature 1: no draft can be right there, so it shows the cost of speculation.

The engines run in turn, request by request, so that other load affects both; the figures are the medians of the rounds'
tokens per second, and their ratios. The number of equal answers is shown, too: on the CPU all should be equal, on other
devices near ties may differ in bfloat16.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine import LLM, SamplingParams

DOCS = Path(__file__).parent.parent / "docs"
EDIT = "Repeat the following text exactly, but replace the word 'request' by 'job':\n\n{}"
SUMMARISE = "Summarise the following text in a few sentences:\n\n{}"
NUM_PARAGRAPHS = 6
WORKLOADS = ("edit", "summarise", "random")


class Task(NamedTuple):
    """A batch of prompts as token ids, with their sampling parameters."""

    prompts: list[list[int]]
    params: list[SamplingParams]


class Answers(NamedTuple):
    """The result of a task."""

    token_ids: list[list[int]]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """The rate of all answers."""
        return sum(map(len, self.token_ids))


def paragraphs() -> list[str]:
    """Paragraphs of the documentation, 300 to 900 characters each."""
    blocks = [
        block
        for path in (DOCS / "scheduling.md", DOCS / "architecture.md")
        for block in path.read_text().split("\n\n")
    ]
    return [" ".join(block.split()) for block in blocks if 300 < len(block) < 900 and block[0].isalpha()]


def tasks(llm: LLM, batch: int, max_tokens: int) -> Iterator[tuple[str, list[Task]]]:
    """Every workload, in batches."""
    texts = paragraphs()[: NUM_PARAGRAPHS * batch]
    greedy = SamplingParams(temperature=0, max_new_tokens=max_tokens)
    for name, template in (("edit", EDIT), ("summarise", SUMMARISE)):
        prompts = [llm.render_chat([{"role": "user", "content": template.format(text)}]) for text in texts]
        yield name, [_task(prompts[at : at + batch], greedy) for at in range(0, len(prompts), batch)]
    source = random.Random(0)
    drawn = SamplingParams(temperature=1, max_new_tokens=max_tokens, min_new_tokens=max_tokens)
    prompts = [[source.randrange(1000, 40_000) for _ in range(128)] for _ in range(3 * batch)]
    yield "random", [_task(prompts[at : at + batch], drawn) for at in range(0, len(prompts), batch)]


def _task(prompts: list[list[int]], params: SamplingParams) -> Task:
    seeded = [
        SamplingParams(
            temperature=params.temperature,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            seed=1 + number,
        )
        for number in range(len(prompts))
    ]
    return Task(prompts, seeded)


def answer(llm: LLM, task: Task) -> Answers:
    """Generate with an empty prefix cache."""
    llm.flush_cache()
    start_s = time.perf_counter()
    outputs = llm.generate(task.prompts, task.params)
    return Answers([list(output.token_ids) for output in outputs], time.perf_counter() - start_s)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--what", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    args = parser.parse_args()

    common = {
        "num_threads": args.threads,
        "dtype": args.dtype,
        "max_total_tokens": 32_768,
        "max_model_len": 2048,
    }
    with LLM(args.model, **common) as plain, LLM(args.model, speculative="ngram", **common) as ngram:
        print(
            f"{'workload':<12}{'batch':>6}{'plain tok/s':>13}{'ngram tok/s':>13}{'ratio':>8}{'equal answers':>16}"
        )
        for batch in args.batch:
            for name, each in tasks(plain, batch, args.max_tokens):
                if name not in args.what:
                    continue
                speeds: dict[str, list[float]] = {"plain": [], "ngram": []}
                ratios, num_equal, num_answers = [], 0, 0
                for number in range(args.rounds + 1):
                    pairs = [(answer(plain, task), answer(ngram, task)) for task in each]
                    if not number:
                        continue  # the first round warms up: it touches memory for the first time
                    for label, side in (("plain", 0), ("ngram", 1)):
                        num_tokens = sum(pair[side].num_tokens for pair in pairs)
                        speeds[label].append(num_tokens / sum(pair[side].seconds for pair in pairs))
                    ratios.append(speeds["ngram"][-1] / speeds["plain"][-1])
                    for first, second in pairs:
                        num_equal += sum(
                            a == b for a, b in zip(first.token_ids, second.token_ids, strict=True)
                        )
                        num_answers += len(first.token_ids)
                middle = {label: statistics.median(values) for label, values in speeds.items()}
                print(
                    f"{name:<12}{batch:>6}{middle['plain']:>13.1f}{middle['ngram']:>13.1f}"
                    f"{statistics.median(ratios):>8.2f}{f'{num_equal} of {num_answers}':>16}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
