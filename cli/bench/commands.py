"""The `engine bench` commands: settings in, tables and files out; the modules beside this do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .command_settings import takes_settings
from .runs import OutputSettings, SamplingSettings, ServerSettings
from .workload import WorkloadSettings

app = typer.Typer(
    help="Measure throughput and latency, in process or over HTTP, and compare two measurements.",
    no_args_is_help=True,
)
EXIT_SOME_FAILED = 1


@app.command()
@takes_settings
def serve(
    server: ServerSettings, workload: WorkloadSettings, sampling: SamplingSettings, output: OutputSettings
) -> None:
    """Measure a running server; any OpenAI-compatible one will do."""
    from .runs import run_serve

    if not run_serve(server, sampling, workload, output):
        raise typer.Exit(EXIT_SOME_FAILED)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Result file of the first system (one or more runs).")],
    b: Annotated[Path, typer.Argument(help="Result file of the second.")],
) -> None:
    """Say whether B is faster than A, with 95 % confidence intervals."""
    from .compare_report import print_comparison

    print_comparison(a, b)
