"""`WORKLOADS` and `TARGETS`: the requests for every server, the figures, and the target ratios.

Figures are taken from the summary of `engine bench serve`, the one client of all servers. Two figures belong to no
workload: the time of a server from its command to the first completion, and its memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.peers.server import MODEL_NAME, RIVALS
from engine.cli.bench.load import BenchRequest
from engine.cli.bench.result_file import RequestRow, read_results
from engine.cli.bench.workloads.workload import DatasetName, WorkloadSettings, WorkloadTokenizer

START, MEMORY = "start", "memory"
"""Names of the figures that belong to no workload, in the place of a workload's name."""


class RunError(Exception):
    """One measurement failed; the others can continue."""


def run_client(
    url: str, options: Sequence[str], limit_s: float
) -> tuple[dict[str, Any], Sequence[RequestRow]]:
    """The summary and the requests of one run of `engine bench serve`.

    Raises:
        RunError: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        # -P: without the current folder, which would allow `import runtime`.
        command = [sys.executable, "-P", "-m", "engine", "bench", "serve", "--url", url, *options]
        command += ["--output-file", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RunError(f"not done after {limit_s:.0f} s") from None
        if done.returncode != 0:
            raise RunError(f"{(done.stdout + done.stderr).strip()[-1000:]}")
        result = read_results(out).runs[0]
    return msgspec.to_builtins(result.summary), result.requests


def check_counts(requests: Sequence[BenchRequest], rows: Sequence[RequestRow]) -> None:
    """Check that every request had exactly its tokens.

    Raises:
        RunError: a request had other counts.
    """
    if len(requests) != len(rows):
        raise RunError(f"{len(rows)} answers to {len(requests)} requests")
    for idx, (request, row) in enumerate(zip(requests, rows, strict=True)):
        wanted = (request.prompt_len, request.output_len)
        if (row.prompt_tokens, row.output_tokens) != wanted:
            raise RunError(
                f"request {idx} was {wanted[0]} tokens in, {wanted[1]} out, but the server counted "
                f"{row.prompt_tokens} in, {row.output_tokens} out"
            )


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a measurement.

    Attributes:
        path: of the number in the summary, with dots.
        per_ms: it is 1000 divided by that number: tokens per second from milliseconds per token.
    """

    name: str
    path: str
    unit: str
    per_ms: bool = False

    def of(self, summary: Mapping[str, Any]) -> float:
        """Read the figure.

        Raises:
            ValueError: the run has no such figure.
        """
        value: Any = summary
        for key in self.path.split("."):
            value = value[key]
        if value is None:
            raise ValueError(f"the run has no {self.path}")
        return 1000.0 / value if self.per_ms else float(value)


@dataclass(frozen=True, slots=True)
class Workload:
    """One line of the table.

    Attributes:
        settings: fields of `WorkloadSettings`, which are also the flags of `engine bench serve`.
        figures: the first is compared.
    """

    name: str
    what: str
    settings: Mapping[str, Any]
    figures: tuple[Figure, ...]

    def flags(self) -> list[str]:
        """The flags of `engine bench serve`."""
        return [
            text
            for name, value in self.settings.items()
            for text in ("--" + name.replace("_", "-"), str(value))
        ]

    def requests(self, tokenizer: WorkloadTokenizer, seed: int) -> list[BenchRequest]:
        """The requests that the client sends with these flags and this seed."""
        return WorkloadSettings(**self.settings, seed=seed).requests(tokenizer)

    def run(self, url: str, tokenizer: Path, seed: int, limit_s: float) -> dict[str, float]:
        """The figures of one run of the client.

        Raises:
            RunError: it failed, took too long, or a request had another number of tokens than asked for.
        """
        options = ("--model", MODEL_NAME, "--tokenizer", str(tokenizer), "--seed", str(seed), *self.flags())
        summary, rows = run_client(url, options, limit_s)
        check_counts(self.requests(WorkloadTokenizer.load(str(tokenizer)), seed), rows)
        try:
            return {figure.name: figure.of(summary) for figure in self.figures}
        except ValueError as error:
            raise RunError(str(error)) from error


WORKLOADS: Final = (
    Workload(
        "W1",
        "one stream, 128 in / 256 out",
        {"num_prompts": 3, "random_input_len": "128", "random_output_len": "256", "max_concurrency": 1},
        (
            Figure("decode", "tpot_ms.mean", "tok/s", per_ms=True),
            Figure("TTFT", "ttft_ms.median", "ms"),
        ),
    ),
    Workload(
        "W2",
        "fresh prompts of 1,900 tokens, one at a time",
        {"num_prompts": 4, "random_input_len": "1900", "random_output_len": "1", "max_concurrency": 1},
        (Figure("prefill", "input_tok_s", "tok/s"),),
    ),
    Workload(
        "W3",
        "64 requests at once, 64-512 in / 64-256 out",
        {"num_prompts": 64, "random_input_len": "64:512", "random_output_len": "64:256"},
        (Figure("output", "output_tok_s", "tok/s"), Figure("P99 ITL", "itl_ms.p99", "ms")),
    ),
    Workload(
        "W4",
        "64 requests sharing 1,024 tokens + 32 own, 32 out",
        {
            "dataset_name": DatasetName.SHARED_PREFIX,
            "gsp_num_groups": 1,
            "gsp_prompts_per_group": 64,
            "gsp_system_prompt_len": 1024,
            "gsp_question_len": 32,
            "gsp_output_len": 32,
        },
        (Figure("wall", "duration_s", "s"),),
    ),
    Workload(
        "W5",
        "Poisson 2.2 req/s, 64-512 in / 64-128 out",
        {
            "num_prompts": 60,
            "random_input_len": "64:512",
            "random_output_len": "64:128",
            "request_rate": 2.2,
        },
        (Figure("P99 ITL", "itl_ms.p99", "ms"), Figure("P99 TTFT", "ttft_ms.p99", "ms")),
    ),
)

_QUICK: Final[Mapping[str, Mapping[str, Any]]] = {
    "W1": {"num_prompts": 1, "random_output_len": "64"},
    "W2": {"num_prompts": 1},
    "W3": {"num_prompts": 8},
    "W4": {"gsp_prompts_per_group": 8},
    "W5": {"num_prompts": 8},
}


def quick(workload: Workload) -> Workload:
    """A small version that checks that all of it runs; its figures are no measurement."""
    return replace(workload, settings={**workload.settings, **_QUICK[workload.name]})


@dataclass(frozen=True, slots=True)
class Target:
    """A target ratio: engine / peer, at least or at most.

    Attributes:
        workload: name of one, or "start" or "memory".
        figure: its name.
    """

    workload: str
    figure: str
    engine: str
    peer: str
    ratio: float
    at_least: bool

    def met(self, ratio: float) -> bool:
        """Whether a measured ratio meets the target."""
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio


TARGETS: Final = (
    Target("W1", "decode", "engine-bf16", "vllm", 2.0, at_least=True),
    Target("W1", "decode", "engine-bf16", "llama-bf16", 1.5, at_least=True),
    Target("W1", "decode", "engine-4bit", "llama-4bit", 1.6, at_least=True),
    Target("W2", "prefill", "engine-bf16", "vllm", 1.6, at_least=True),
    Target("W3", "output", "engine-bf16", "vllm", 1.6, at_least=True),
    Target("W3", "output", "engine-int8", "vllm", 2.2, at_least=True),
    Target("W4", "wall", "engine-bf16", "vllm", 1 / 2.5, at_least=False),
    Target("W5", "P99 ITL", "engine-bf16", "vllm", 1 / 2, at_least=False),
    Target("W5", "P99 TTFT", "engine-bf16", "vllm", 1 / 2, at_least=False),
    Target("memory", "resident", "engine-bf16", "vllm", 1 / 2, at_least=False),
    Target("start", "first completion", "engine-bf16", "vllm", 1 / 12, at_least=False),
    *(
        Target(workload, figure, "engine-4bit", rival, 1.0, at_least)
        for workload, figure, at_least in (
            ("W1", "decode", True),
            ("W2", "prefill", True),
            ("W3", "output", True),
            ("W4", "wall", False),
            ("W5", "P99 ITL", False),
            ("W5", "P99 TTFT", False),
            ("memory", "resident", False),
            ("start", "first completion", False),
        )
        for rival in RIVALS
    ),
)
"""Against the libraries: ahead in each figure."""


def is_compared(side: str, workload: str) -> bool:
    """Whether a target needs this pair; other pairs are measured once, for the table."""
    return any(target.workload == workload and side in (target.engine, target.peer) for target in TARGETS)
