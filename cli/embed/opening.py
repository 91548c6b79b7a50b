"""`open_backend`: a server that is named or runs already, else the model in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...launch.child.socket_dir import running_servers
from ...launch.startup_display import StartupDisplay
from ...runtime.config.config_fields import config_fields
from ...runtime.config.config_sources import DEFAULT_ORIGIN, MergedConfig
from ...runtime.errors import EngineError, RequestError
from ...runtime.text import variable
from ..options import FlagValues, merge_options
from .backend import Backend
from .in_process import BASE_SETTINGS, InProcessBackend

if TYPE_CHECKING:
    from ...tokenizer_manager.pooling.embedding import Want
    from .server import ServerBackend

_PANEL: Final = "Where it runs"

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Ask this server instead of loading a model.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="TEXT",
        help="Folder in Hugging Face layout, .gguf file or name of a model; with --url, which of its models  [default: "
        "minilm]",
        rich_help_panel="Model",
        show_default=False,
    ),
]
AttachOption = Annotated[
    bool,
    typer.Option(
        "--attach/--no-attach",
        help="Ask a server of this user that runs here and can do it, if nothing names a model  [default: attach]",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="TEXT",
        help="API key of that server (or set ENGINE_API_KEY).",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


def open_backend(
    wanted: Want,
    *,
    url: str | None,
    api_key: str | None,
    attach: bool,
    settings: FlagValues,
    config_file: Path | None,
    quiet: bool,
) -> Backend:
    """The backend of a command, which closes it.

    Raises:
        ConfigError: the model cannot run on this machine.
        RequestError: the model cannot do what is wanted, or an option has no effect.
        ServerError: no server answers at `url`.
    """
    key = api_key or variable("ENGINE_API_KEY")
    if url is not None:
        return _connect(url, key, settings, wanted)
    merged = merge_options(settings, config_file=config_file, base=BASE_SETTINGS)
    if attach and not _asks_for_a_model(merged):
        server = _attach(key, wanted, quiet=quiet)
        if server is not None:
            return server
    with StartupDisplay(quiet=quiet) as display:
        return InProcessBackend.start(merged, display, wanted)


def _connect(url: str, key: str | None, settings: FlagValues, wanted: Want) -> ServerBackend:
    from .server import ServerBackend

    useless = [name for name, value in settings.items() if value is not None and name != "model"]
    if useless:
        raise RequestError(
            f"{config_fields()[useless[0]].flag} has no effect on a server that runs already; drop it"
        )
    return ServerBackend(url, api_key=key, model=settings["model"], wanted=wanted)


def _attach(key: str | None, wanted: Want, *, quiet: bool) -> ServerBackend | None:
    """The newest server of this user that can do it; one that generates text is passed over without a word."""
    from .server import ServerBackend

    for record in reversed(running_servers()):
        if not record.url:
            continue
        try:
            backend = ServerBackend(record.url, api_key=key, model=None, wanted=wanted)
        except EngineError as error:
            if not quiet and getattr(error, "code", None) != "unsupported_task":
                print(f"engine: the server at {record.url} is not used: {error}", file=sys.stderr)
            continue
        if not quiet:
            print(
                f"engine: asking {backend.model} {backend.where}; --no-attach loads a model here",
                file=sys.stderr,
            )
        return backend
    return None


def _asks_for_a_model(merged: MergedConfig) -> bool:
    """Whether a setting of the model is given."""
    own = {name: value.origin for name, value in BASE_SETTINGS.items()}
    return any(origin not in (DEFAULT_ORIGIN, own.get(name)) for name, origin in merged.origins.items())
