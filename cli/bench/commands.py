"""The `engine bench` commands. Each passes its settings to the other modules of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from ...runtime.errors import ConfigError
from ..exit_codes import ExitCode
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    ModelArgument,
    merge_options,
    takes_config_options,
    takes_settings,
)
from .runs import OutputSettings, SamplingSettings
from .serve_run import ServerSettings
from .workloads.workload import WorkloadSettings


class BenchGroup(TyperGroup):
    """The commands; an unknown one is answered with those that there are."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command."""
        if args[0] not in self.commands:
            answer = f": {_ELSEWHERE[args[0]]}" if args[0] in _ELSEWHERE else ""
            raise ConfigError(
                f"there is no command 'bench {args[0]}'{answer}; the commands are {', '.join(self.commands)}"
            )
        return super().resolve_command(ctx, args)


_ELSEWHERE: Final = {
    "latency": "engine bench offline --max-concurrency 1 has it",
    "throughput": "engine bench offline has it",
    "sweep": "engine bench serve --sweep 1,2,4 has it",
}
"""Commands of vLLM -> what to use."""

app = typer.Typer(
    cls=BenchGroup,
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
    html: Annotated[
        Path | None, typer.Option(help="Write a page with distributions and curves.", metavar="FILE")
    ] = None,
) -> None:
    """Compare two results: whether B is faster than A.

    Differences have 95 % confidence intervals.
    """
    from .tables import print_comparison

    print_comparison(a, b, html)
