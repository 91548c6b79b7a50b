"""`engine rm NAME...`: remove models from this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ...runtime.text import counted
from ..options import CONTEXT_SETTINGS, GroupedCommand

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def rm(
    models: Annotated[
        list[str], typer.Argument(metavar="NAME", help="As `engine list` shows them; org/repo: all of it.")
    ],
    force: Annotated[bool, typer.Option("--force", "-f", help="Also a model that a server uses.")] = False,
) -> int:
    """Remove models. Contents that another revision or quantization uses stay.

    Example: engine rm org/repo:Q4_K_M
    """
    from ...launch.child.socket_dir import running_servers
    from ...launch.startup_display import size_text
    from ...models.removal import remove

    in_use = {} if force else {server.path: server.pid for server in running_servers()}
    for model in models:
        removed = remove(model, in_use)
        files, freed = counted(removed.num_files, "file"), size_text(removed.freed_bytes)
        typer.echo(f"{model}: removed {files}, {freed} are free now")
    return 0
