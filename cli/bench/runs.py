"""Common part of `bench serve` and `bench offline`: warm up, run the load, print and write the figures.

They differ only in their target.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...runtime.errors import ConfigError, EngineError, RequestError
from ..console import output_console
from ..report_page import check_writable
from .load import BenchRequest, LoadRun, RequestRecord, Target, run_load
from .result_file import RequestRow, Run, git_revision, machine_facts, write_results
from .summary import parse_goodput, summarize
from .tables import print_summary
from .workloads.workload import WorkloadSettings


def _sampling(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Sampling")


def _output(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Output")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Choice of tokens."""

    ignore_eos: Annotated[
        bool, _sampling("Ignore the end-of-sequence token and generate the full output length.")
    ] = True
    temperature: Annotated[float, _sampling("0 is greedy.")] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """Outputs for the figures, and the latency limits of goodput."""

    goodput: Annotated[
        str | None, _output("Service level objectives in ms: 'ttft:500 tpot:50 e2el:9000'.")
    ] = None
    output_file: Annotated[Path | None, _output("Write the run to this JSON file.")] = None
    append: Annotated[bool, _output("Add the run to those in --output-file.", "--append")] = False
    details: Annotated[bool, _output("Also write the arrival time of every token.", "--details")] = False
    html: Annotated[Path | None, _output("Write a page with distributions and curves to this file.")] = None

    def check(self) -> None:
        """Fail before the run, not after it.

        Raises:
            ConfigError: a bad goodput, or a folder that does not exist.
        """
        parse_goodput(self.goodput)
        if self.html is not None:
            check_writable(self.html)
        if self.output_file is not None and self.output_file.is_dir():
            raise ConfigError(f"--output-file {self.output_file} is a folder; name a file")
        if self.output_file is not None and not self.output_file.parent.is_dir():
            raise ConfigError(
                f"--output-file {self.output_file}: the folder {self.output_file.parent} does not exist"
            )


async def measure(
    target_context: AbstractAsyncContextManager[Target],
    requests: Sequence[BenchRequest],
    warmup: Sequence[BenchRequest],
    workload: WorkloadSettings,
    before_run: Any = None,
    failure: type[EngineError] = EngineError,
) -> LoadRun:
    """Warm up within the concurrency limit, then run the workload with a progress bar.

    Raises:
        RequestError: a warm-up request is refused; the run would only repeat it many times.
        EngineError: one failed otherwise, as `failure`.
    """
    async with target_context as target:
        warm = await run_load(target, warmup, [0.0] * len(warmup), workload.max_concurrency, lambda _: None)
        for record in warm.records:
            if not record.ok:
                kind = RequestError if record.refused else failure
                raise kind(f"the warm-up request failed: {record.error}")
        if before_run is not None:
            await before_run()
        with _progress() as progress:
            bar = progress.add_task("requests", total=len(requests), status="")
            tokens, failed = 0, 0

            def on_progress(record: RequestRecord) -> None:
                nonlocal tokens, failed
                tokens += record.output_tokens
                failed += not record.ok
                rate = tokens / max(progress.tasks[0].elapsed or 0.0, 1e-3)
                status = f"{rate:,.0f} tok/s" + (f", {failed} failed" if failed else "")
                progress.update(bar, advance=1, status=status)

            return await run_load(
                target, requests, workload.offsets_s(requests), workload.max_concurrency, on_progress
            )


def report(
    run: LoadRun,
    kind: Literal["serve", "offline"],
    title: str,
    client: dict[str, Any],
    server: dict[str, Any] | None,
    output: OutputSettings,
) -> Run:
    """Print the figures, and write the result file."""
    summary = summarize(run, parse_goodput(output.goodput))
    print_summary(output_console(), summary, title)
    result = Run(
        kind=kind,
        started_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        client={**client, "goodput": output.goodput},
        server=server,
        machine=machine_facts(),
        git_revision=git_revision(),
        summary=summary,
        requests=[RequestRow.of(record, run.start_s, output.details) for record in run.records],
    )
    if output.output_file is not None:
        write_results(output.output_file, result, output.append)
    return result


def plain_settings(group: Any) -> dict[str, Any]:
    """A group of settings as plain values, without secrets and without infinities, which JSON lacks."""
    values = dataclasses.asdict(group)
    values.pop("api_key", None)
    return {key: str(value) if isinstance(value, Path | float) else value for key, value in values.items()}


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=Console(stderr=True),
        transient=True,
    )
