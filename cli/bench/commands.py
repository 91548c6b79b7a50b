"""The `engine bench` commands. Each passes its settings to the other modules of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..exit_codes import ExitCode
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    ModelArgument,
    merge_options,
    takes_config_options,
)
from .command_settings import takes_settings
from .runs import OutputSettings, SamplingSettings
from .serve_run import ServerSettings
from .workloads.workload import WorkloadSettings

app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def root(ctx: typer.Context) -> None:
    """Measure throughput and latency, in process or over HTTP, and compare two measurements."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_settings
def serve(
    server: ServerSettings, workload: WorkloadSettings, sampling: SamplingSettings, output: OutputSettings
) -> None:
    """Measure a running server with an OpenAI-compatible API."""
    from .serve_run import run_serve

    if not run_serve(server, sampling, workload, output):
        raise typer.Exit(ExitCode.FAILED)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_settings
@takes_config_options(("model", "cache", "scheduler"), exclude=("seed",))
def offline(
    model_argument: ModelArgument = None,
    config_file: ConfigFileOption = None,
    *,
    settings: FlagValues,
    workload: WorkloadSettings,
    sampling: SamplingSettings,
    output: OutputSettings,
) -> None:
    """Measure an engine in this process, without HTTP."""
    from .offline_run import run_offline

    merged = merge_options(settings, config_file=config_file, model=model_argument)
    if not run_offline(merged, sampling, workload, output):
        raise typer.Exit(ExitCode.FAILED)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="Result file of the first system (one or more runs).")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="Result file of the second system.")],
) -> None:
    """Compare two results: whether B is faster than A.

    Differences have 95 % confidence intervals.
    """
    from .tables import print_comparison

    print_comparison(a, b)
