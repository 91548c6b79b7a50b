"""`engine fleet`: many servers of one model on Ray under one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import ConfigError
from ..options import CONTEXT_SETTINGS, GroupedCommand
from ..preflight import check_address

DEFAULT_PORT: Final = 30_090

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def fleet(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for `engine serve`.", show_default=False)
    ] = None,
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT", help="After --: options of `engine serve`, for each server."),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", metavar="INT", help="Servers at the start.")] = 2,
    on: Annotated[str, typer.Option("--on", hidden=True)] = "ray",
    host: Annotated[
        str, typer.Option("--host", metavar="TEXT", help="Address of the control endpoint.")
    ] = ServerConfig().host,
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
) -> int:
    """Serve a model with several servers on Ray: start them, restart those that fail, scale them, drain them.

    Servers are `engine serve` with a port each. The control endpoint has GET /health, GET /replicas and
    POST /scale {"replicas": 3}. It needs `pip install '.[ray]'`; on one machine `engine serve --dp N` needs no Ray.

    Example: engine fleet default --replicas 2 -- --max-model-len 4096
    """
    from ...launch.resolve.host_facts import read_host_facts
    from ...supervisor.fleet.fleet import MAX_REPLICAS, FleetSettings
    from .run import FleetPlan, run_fleet
    from .serve_arguments import parse_serve

    if on != "ray":
        raise ConfigError(
            f"--on {on} is gone: servers of a fleet run on Ray; for one machine use `engine serve --dp {replicas}`"
        )
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
    serve = parse_serve(model, options, read_host_facts())
    drain_s = serve.merged.config.server.drain_timeout
    settings = FleetSettings(replicas=replicas, max_restarts=max_restarts, drain_s=drain_s)
    check_address(host, port)
    return run_fleet(FleetPlan(settings=settings, serve=serve, host=host, port=port, worker_list=worker_list))
