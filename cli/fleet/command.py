"""`engine fleet`: many servers of one model under one command, here or on Ray."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import ConfigError
from ..options import CONTEXT_SETTINGS, GroupedCommand
from ..port import check_address

DEFAULT_PORT: Final = 30_090
_MAX_FIRST_PORT: Final = 65_024  # with the ports of 512 replicas
_SERVER: Final = ServerConfig()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class On(enum.StrEnum):
    """Where the servers run."""

    LOCAL = "local"
    RAY = "ray"


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def fleet(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for `engine serve`.", show_default=False)
    ] = None,
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENT",
            help="After --: options of `engine serve`, for each server.",
            show_default=False,
        ),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", metavar="INT", help="Servers at the start.")] = 2,
    on: Annotated[
        On, typer.Option("--on", help="Run the servers on this machine, or as actors of a Ray cluster.")
    ] = On.LOCAL,
    host: Annotated[
        str, typer.Option("--host", metavar="TEXT", help="Address of the control endpoint.")
    ] = _SERVER.host,
    port: Annotated[
        int, typer.Option("--port", metavar="INT", help="Port of the control endpoint.")
    ] = DEFAULT_PORT,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="TEXT",
            help="API key of the servers and of the control endpoint (or set ENGINE_API_KEY).",
        ),
    ] = None,
    first_port: Annotated[
        int,
        typer.Option(
            "--first-port",
            metavar="INT",
            help="Port of server 0; server i has the i-th after it. 0: free ports.",
        ),
    ] = 0,
    worker_list: Annotated[
        Path | None,
        typer.Option(
            "--worker-list",
            metavar="FILE",
            help="Keep a list of the servers here, as smg's file discovery reads it.",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            metavar="INT",
            help="Restarts of one server within five minutes before it is given up.",
        ),
    ] = 5,
    silence: Annotated[
        float,
        typer.Option(
            "--silence", metavar="NUMBER", help="Seconds without any answer before a server is killed."
        ),
    ] = 60.0,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            "--min-replicas",
            metavar="INT",
            help="Scale by load, down to this number.",
            rich_help_panel="Scaling by load",
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(
            "--max-replicas",
            metavar="INT",
            help="Scale by load, up to this number.",
            rich_help_panel="Scaling by load",
        ),
    ] = None,
    scale_queue_tokens: Annotated[
        int,
        typer.Option(
            "--scale-queue-tokens",
            metavar="INT",
            help="Waiting prompt tokens per server above which servers are added.",
            rich_help_panel="Scaling by load",
        ),
    ] = 8192,
    scale_up_after: Annotated[
        float,
        typer.Option(
            "--scale-up-after",
            metavar="NUMBER",
            help="Seconds for which more must have waited.",
            rich_help_panel="Scaling by load",
        ),
    ] = 10.0,
    scale_down_after: Annotated[
        float,
        typer.Option(
            "--scale-down-after",
            metavar="NUMBER",
            help="Seconds for which one server less must have been enough, half busy, before one is taken away.",
            rich_help_panel="Scaling by load",
        ),
    ] = 300.0,
) -> int:
    """Serve a model with several servers: start them, restart those that fail, scale them, drain them.

    Servers are `engine serve` with a port each. The control endpoint has GET /health, GET /replicas and
    POST /scale {"replicas": 3}. --on ray needs `pip install '.[ray]'`.

    Example: engine fleet default --replicas 2 -- --max-model-len 4096
    """
    from ...launch.resolve.host_facts import read_host_facts
    from ...supervisor.fleet.fleet import FleetSettings
    from ...supervisor.fleet.scaling import MAX_REPLICAS, ScaleBounds
    from .run import FleetPlan, run_fleet
    from .serve_arguments import parse_serve

    if model is not None and model.startswith("-"):  # nothing before the --
        serve_options, model = [model, *(serve_options or ())], None
    options = list(serve_options or ())
    if options and not options[0].startswith("-"):
        raise ConfigError(
            f"the argument {options[0]!r} is no option; name one MODEL, and put options of `engine serve` after --"
        )
    if api_key:  # servers take it from there: a command line can be seen by all users
        os.environ["ENGINE_API_KEY"] = api_key
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ConfigError(f"--replicas is {replicas}, but it must lie in [1, {MAX_REPLICAS}]")
    if (min_replicas is None) != (max_replicas is None):
        raise ConfigError("scaling by load has two bounds; give both --min-replicas and --max-replicas")
    if min_replicas is None or max_replicas is None:
        min_replicas = max_replicas = replicas
    bounds = ScaleBounds(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        queue_tokens=scale_queue_tokens,
        up_after_s=scale_up_after,
        down_after_s=scale_down_after,
    )
    if not 0 <= first_port <= _MAX_FIRST_PORT:
        raise ConfigError(f"first_port is {first_port}, but it must lie in [0, {_MAX_FIRST_PORT}]")
    serve = parse_serve(model, options, read_host_facts(), first_port)
    settings = FleetSettings(
        replicas=replicas,
        bounds=bounds,
        max_restarts=max_restarts,
        silence_s=silence,
        drain_s=serve.merged.config.server.drain_timeout,
    )
    check_address(host, port)
    return run_fleet(
        FleetPlan(
            settings=settings,
            serve=serve,
            on_ray=on is On.RAY,
            host=host,
            port=port,
            worker_list=worker_list,
        )
    )
