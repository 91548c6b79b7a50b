"""`engine pull`, `list`, `rm` and `ps`: the models and servers on this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.errors import ConfigError
from ..runtime.text import counted
from .options import CONTEXT_SETTINGS, GroupedCommand

if TYPE_CHECKING:
    from ..launch.startup_display import StartupDisplay


def _app() -> typer.Typer:
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


pull_app, list_app, rm_app, ps_app = _app(), _app(), _app(), _app()


@pull_app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="smollm2, minilm, org/repo, org/repo@revision, org/repo:Q4_K_M; see docs/models.md.",
        ),
    ],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> int:
    """Download a model for later starts, which then need no network.

    Only the files that serving needs are downloaded, and verified. After an interruption, whole files stay;
    a model that is there is brought to the newest commit of its revision.

    Example: engine pull Qwen/Qwen3-0.6B
    """
    from ..launch.startup_display import StartupDisplay

    with StartupDisplay(quiet=quiet, only_slow=True) as display:
        line = _pull(model, display)
    typer.echo(line)
    return 0


def _pull(model: str, display: StartupDisplay) -> str:
    from ..launch.startup_display import size_text
    from ..models.hub.built_in.models import find_built_in
    from ..models.hub.hub_place import pull_named
    from ..models.source import hub_name_of, resolve_source

    is_local = os.path.exists(os.path.expanduser(model)) and model != "default"
    built_in = None if is_local else find_built_in(model)
    if is_local or built_in:
        source = resolve_source(model, progress=display.download)
        num_bytes = sum(member.num_bytes for member in built_in.wheel.members) if built_in else 0
        size = f", {size_text(num_bytes)}" if built_in else ""
        return f"{model} is on this machine: {source.path}{size}"
    name = hub_name_of(model)
    if name is None:
        resolve_source(model, fetch=False)  # raises the error that every command has for it
        raise ConfigError(f"{model}: is no name of a model")
    pulled = pull_named(name, progress=display.download)
    size = size_text(pulled.total_bytes)
    what = (
        f"downloaded {size_text(pulled.new_bytes)} of {size}" if pulled.new_bytes else f"up to date, {size}"
    )
    return f"{name}: {what}, commit {pulled.commit[:12]}: {pulled.place}"


@list_app.command("list", cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the models on this machine: name, quantization or precision, size, commit, last use.

    Models that other tools have put into the hub's cache are listed, too. `incomplete`: a start downloads the rest.
    """
    from ..launch.startup_display import size_text
    from ..models.local_models import ago, local_models, unfinished_bytes
    from .console import print_table

    models = local_models()
    if as_json:
        rows = [
            {
                "name": model.name,
                "quantization": model.quantization or None,
                "size_bytes": model.size_bytes,
                "commit": model.commit or None,
                "last_used": model.last_used_s or None,
                "path": str(model.path),
                "complete": model.complete,
            }
            for model in models
        ]
        json.dump(rows, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    if not models:
        typer.echo("There are no models on this machine; `engine pull smollm2` downloads a small one.")
    else:
        print_table(
            ("NAME", "WEIGHTS", "SIZE", "COMMIT", "LAST USED"),
            [
                (
                    model.name,
                    model.quantization if model.complete else "incomplete",
                    size_text(model.size_bytes),
                    model.commit[:12],
                    ago(model.last_used_s),
                )
                for model in models
            ],
        )
    if unfinished := unfinished_bytes():
        hint = "`engine pull NAME` downloads the rest, `engine rm NAME` frees them"
        typer.echo(f"Interrupted downloads hold {size_text(unfinished)}; {hint}.", err=True)
    return 0


@rm_app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def rm(
    models: Annotated[
        list[str], typer.Argument(metavar="NAME", help="As `engine list` shows them; org/repo: all of it.")
    ],
    force: Annotated[bool, typer.Option("--force", "-f", help="Also a model that a server uses.")] = False,
) -> int:
    """Remove models. Contents that another revision or quantization uses stay.

    Example: engine rm org/repo:Q4_K_M
    """
    from ..launch.child.socket_dir import running_servers
    from ..launch.startup_display import size_text
    from ..models.removal import remove

    in_use = {} if force else {server.path: server.pid for server in running_servers()}
    for model in models:
        removed = remove(model, in_use)
        files, freed = counted(removed.num_files, "file"), size_text(removed.freed_bytes)
        typer.echo(f"{model}: removed {files}, {freed} are free now")
    return 0


@ps_app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List this user's servers on this machine: model, address, process id, memory, uptime.

    MEMORY is host memory of all processes of the server, shared pages counted once (PSS). What a killed server has left
    is removed.
    """
    from ..launch.child.process_resources import tree_bytes
    from ..launch.child.socket_dir import running_servers
    from ..launch.startup_display import size_text
    from .console import print_table

    now_s = time.time()
    rows = [(server, tree_bytes(server.pid)) for server in running_servers()]
    if as_json:
        found = [
            {
                "model": server.model,
                "url": server.url or None,
                "pid": server.pid,
                "memory_bytes": memory,
                "uptime_s": round(now_s - server.started_s, 1),
                "path": server.path,
            }
            for server, memory in rows
        ]
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    if not rows:
        typer.echo("No server runs; `engine serve` starts one.")
        return 0
    print_table(
        ("MODEL", "ADDRESS", "PID", "MEMORY", "UPTIME"),
        [
            (
                server.model,
                server.url or "starting",
                str(server.pid),
                size_text(memory),
                uptime_text(now_s - server.started_s),
            )
            for server, memory in rows
        ],
    )
    return 0


def uptime_text(seconds: float) -> str:
    """`42 s`, `3:07`, `2:03:09`, `5 d 2:03:09`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    days, rest = divmod(whole, 86_400)
    hours, minutes, left = rest // 3600, rest // 60 % 60, rest % 60
    clock = f"{hours}:{minutes:02}:{left:02}" if days or hours else f"{minutes}:{left:02}"
    return f"{days} d {clock}" if days else clock
