"""Two running servers, the same workloads, interleaved: A B A B ..., medians and ratios.

    python benchmarks/side_by_side.py --a engine=http://127.0.0.1:30000 --b vllm=http://127.0.0.1:8101 --output out.json

Both servers stay up, and only one is asked at a time; the machine must be otherwise idle. Each measurement is one
`engine bench serve` in its own process, so both sides see the same client. Prompts are token ids from a seed that
changes with every round: neither side finds last round's prompts in its prefix cache, and both get the same ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    """One line of the table: flags of `engine bench serve`, and the figures that matter for it."""

    name: str
    what: str
    flags: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]  # (path in the summary, unit)


WORKLOADS = (
    Workload(
        "W1",
        "one stream, 128 in / 256 out",
        (
            "--num-prompts",
            "3",
            "--random-input-len",
            "128",
            "--random-output-len",
            "256",
            "--max-concurrency",
            "1",
        ),
        (("tpot_ms.mean", "ms"), ("ttft_ms.median", "ms"), ("output_tok_s", "tok/s")),
    ),
    Workload(
        "W2",
        "fresh prompts of 1,900 tokens, 1 out, one at a time",
        (
            "--num-prompts",
            "4",
            "--random-input-len",
            "1900",
            "--random-output-len",
            "1",
            "--max-concurrency",
            "1",
        ),
        (("input_tok_s", "tok/s"), ("ttft_ms.median", "ms")),
    ),
    Workload(
        "W3",
        "64 requests at once, 64-512 in / 64-256 out",
        ("--num-prompts", "64", "--random-input-len", "64:512", "--random-output-len", "64:256"),
        (("output_tok_s", "tok/s"), ("ttft_ms.median", "ms"), ("itl_ms.p99", "ms")),
    ),
    Workload(
        "W4",
        "64 requests sharing 1,024 tokens + 32 own, 32 out",
        (
            *(
                "--dataset-name",
                "generated-shared-prefix",
                "--gsp-num-groups",
                "1",
                "--gsp-prompts-per-group",
                "64",
            ),
            *("--gsp-system-prompt-len", "1024", "--gsp-question-len", "32", "--gsp-output-len", "32"),
        ),
        (("duration_s", "s"), ("cached_share", "")),
    ),
    Workload(
        "W5",
        "Poisson 2.2 req/s, 64-512 in / 64-128 out",
        (
            *("--num-prompts", "60", "--random-input-len", "64:512", "--random-output-len", "64:128"),
            *("--request-rate", "2.2"),
        ),
        (("itl_ms.p99", "ms"), ("ttft_ms.p99", "ms"), ("output_tok_s", "tok/s")),
    ),
)


def main() -> int:
    """Run every round and print the table; 1 if a measurement failed."""
    arguments = _parse_arguments()
    names = [name for name, _ in arguments.servers]
    chosen = [workload for workload in WORKLOADS if workload.name in arguments.workloads]
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {w.name: {name: [] for name in names} for w in chosen}
    for round_index in range(arguments.rounds):
        for workload in chosen:
            for name, url in arguments.servers:
                summary = _measure(url, workload, seed=1000 * round_index + 7, tokenizer=arguments.tokenizer)
                runs[workload.name][name].append(summary)
                print(
                    f"round {round_index + 1} {workload.name} {name}: {_brief(summary, workload)}", flush=True
                )
    print()
    for line in _table(chosen, names, runs):
        print(line)
    if arguments.output:
        arguments.output.write_text(json.dumps({"servers": dict(arguments.servers), "runs": runs}, indent=1))
    return 0


def _measure(url: str, workload: Workload, seed: int, tokenizer: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "run.json"
        command = [
            sys.executable,
            "-m",
            "engine.cli.main",
            "bench",
            "serve",
            "--url",
            url,
            "--seed",
            str(seed),
        ]
        command += ["--tokenizer", tokenizer, "--output-file", str(result), *workload.flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{workload.name} against {url} failed:\n{done.stdout}{done.stderr}")
        summary: dict[str, Any] = json.loads(result.read_text())["runs"][0]["summary"]
        return summary


def _figure(summary: dict[str, Any], path: str) -> float:
    value: Any = summary
    for key in path.split("."):
        value = value[key]
    return float(value) if value is not None else float("nan")


def _brief(summary: dict[str, Any], workload: Workload) -> str:
    return ", ".join(
        f"{path} {_figure(summary, path):,.2f} {unit}".rstrip() for path, unit in workload.figures
    )


def _table(
    workloads: list[Workload], names: list[str], runs: dict[str, dict[str, list[dict[str, Any]]]]
) -> list[str]:
    """Markdown: medians over the rounds, and the median of the ratios round by round."""
    a, b = names
    lines = [f"| workload | figure | {a} | {b} | {a} / {b} |", "|---|---|---|---|---|"]
    for workload in workloads:
        for path, unit in workload.figures:
            values = {
                name: [_figure(summary, path) for summary in runs[workload.name][name]] for name in names
            }
            medians = {name: statistics.median(values[name]) for name in names}
            ratios = [x / y for x, y in zip(values[a], values[b], strict=True) if y]
            ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
            cells = [f"{medians[name]:,.2f} {unit}".rstrip() for name in names]
            lines.append(f"| {workload.name}: {workload.what} | {path} | {cells[0]} | {cells[1]} | {ratio} |")
    return lines


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--a", required=True, metavar="NAME=URL")
    parser.add_argument("--b", required=True, metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=[w.name for w in WORKLOADS])
    parser.add_argument("--tokenizer", default="default", help="model whose tokenizer makes the prompts")
    parser.add_argument("--output", type=Path, help="write every summary as JSON")
    arguments = parser.parse_args()
    arguments.servers = []
    for flag in (arguments.a, arguments.b):
        name, separator, url = flag.partition("=")
        if not separator or not name:
            parser.error(f"{flag!r} must be NAME=URL")
        arguments.servers.append((name, url))
    if unknown := set(arguments.workloads) - {w.name for w in WORKLOADS}:
        parser.error(f"unknown workloads {sorted(unknown)}; there are {[w.name for w in WORKLOADS]}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
