"""`engine state list`, `purge` and `check`: the folder of `--state-dir` of a server that does not run."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..runtime.config.server_config import duration_s
from ..runtime.errors import ConfigError
from ..runtime.text import counted
from .console import print_table
from .exit_codes import ExitCode
from .options import CONTEXT_SETTINGS, GroupedCommand

if TYPE_CHECKING:
    from ..tokenizer_manager.state.upkeep import Holding

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_OWNER_CHARS: Final = 8
_WITHOUT_KEY: Final = "-"

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of --state-dir; no server may use it meanwhile.")
]


@app.callback(invoke_without_command=True)
def root(ctx: typer.Context) -> None:
    """List, purge or check the state that a server keeps for its users: files, batches, responses."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command("list", cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def list_state(
    folder: FolderArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List what each owner has in a folder: files, batches and responses, their bytes and ages.

    OWNER is the beginning of the digest of an API key, - without keys. The next server goes on with unfinished ones.

    Example: engine state list ~/engine-state
    """
    from ..tokenizer_manager.state import upkeep

    with _opened(folder) as db:
        found = upkeep.holdings(db)
    if as_json:
        rows = [
            {
                "owner": each.owner,
                "kind": each.kind,
                "count": each.num_entries,
                "unfinished": each.num_unfinished,
                "bytes": each.num_bytes,
                "oldest": each.oldest_s,
                "newest": each.newest_s,
            }
            for each in found
        ]
        json.dump(rows, sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif not found:
        typer.echo(f"{folder} is empty.")
    else:
        _print(found)
    return 0


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def purge(
    folder: FolderArgument,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="files|batches|responses",
            help="What to delete; may be repeated  [default: all]",
            show_default=False,
        ),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option("--owner", metavar="TEXT", help="Only of this owner, as `engine state list` shows it."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Only what was made, or for responses last continued, so long ago: 90s, 12h, 30d.",
        ),
    ] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also what the next server would go on with.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")] = False,
) -> int:
    """Delete files, batches and responses from a folder: all of them, or those of an owner, a kind, an age.

    Unfinished batches with their inputs, and responses that run, stay without --unfinished.

    Example: engine state purge ~/engine-state --older-than 30d --kind responses
    """
    from ..launch.startup_display import size_text
    from ..tokenizer_manager.state import upkeep

    for kind in kinds or ():
        if kind not in upkeep.KINDS:
            raise ConfigError(f"--kind is {kind!r}, but it must be one of {', '.join(upkeep.KINDS)}")
    age_s = 0.0
    if older_than is not None and not (age_s := duration_s(older_than)):
        raise ConfigError(
            f"--older-than is {older_than!r}, but it must be a number above 0 and s, m, h or d, such as 30d"
        )
    with _opened(folder) as db:
        before = upkeep.holdings(db)
        owners = None if owner is None else _owners(owner, before, folder)
        what = upkeep.Selection(kinds or upkeep.KINDS, owners, time.time() - age_s, unfinished)
        db.execute("BEGIN IMMEDIATE")
        files = upkeep.purge(db, what)
        gone = _difference(before, upkeep.holdings(db))
        if not gone:
            db.execute("ROLLBACK")
            typer.echo("There is nothing of this kind and age to delete.")
            return 0
        _print(gone, ages=False)
        if not yes and not _confirmed():
            db.execute("ROLLBACK")
            typer.echo("Nothing is deleted.")
            return int(ExitCode.FAILED)
        db.execute("COMMIT")
        for name in files:
            (folder / "files" / name).unlink(missing_ok=True)
        upkeep.compact(db)
    freed = size_text(sum(each.num_bytes for each in gone))
    typer.echo(f"Deleted {counted(sum(each.num_entries for each in gone), 'entry', 'entries')}, {freed}.")
    return 0


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def check(folder: FolderArgument) -> int:
    """Check a folder: the database, files without rows, rows without files, states that cannot be.

    Each fault is a line of standard output, and the exit code is then 1. Nothing is changed.

    Example: engine state check ~/engine-state
    """
    from ..tokenizer_manager.state import upkeep

    try:
        with upkeep.opened(folder) as db:
            faults = upkeep.faults(db, folder)
    except sqlite3.Error as error:
        faults = [f"state.sqlite cannot be read: {error}"]
    for fault in faults:
        typer.echo(fault)
    if not faults:
        typer.echo(f"{folder} is sound.")
    return int(ExitCode.FAILED if faults else ExitCode.SUCCESS)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[sqlite3.Connection]:
    from ..tokenizer_manager.state import upkeep

    try:
        with upkeep.opened(folder) as db:
            yield db
    except sqlite3.Error as error:
        raise ConfigError(
            f"the database of {folder} cannot be used: {error}; `engine state check` lists what is wrong"
        ) from None


def _confirmed() -> bool:
    """Whether the user wants it.

    Raises:
        ConfigError: there is no terminal to ask on.
    """
    if not sys.stdin.isatty():
        raise ConfigError("standard input is no terminal, so there is no answer to a question; pass --yes")
    return typer.confirm("Delete these?", default=False)


def _owners(shown: str, found: list[Holding], folder: Path) -> list[str]:
    """The owner that is meant.

    Raises:
        ConfigError: none, or several.
    """
    known = {each.owner for each in found}
    owners = [""] if shown == _WITHOUT_KEY else [each for each in known if each.startswith(shown) and each]
    if len(owners) != 1 or owners[0] not in known:
        problem = "names several owners" if len(owners) > 1 else "has nothing here"
        raise ConfigError(f"--owner is {shown!r}, which {problem}; see `engine state list {folder}`")
    return owners


def _difference(before: list[Holding], after: list[Holding]) -> list[Holding]:
    """The entries that a purge deletes; the ages stay those of all that was there."""
    left = {(each.owner, each.kind): each for each in after}
    gone = []
    for each in before:
        rest = left.get((each.owner, each.kind))
        if rest is not None:
            each = each._replace(
                num_entries=each.num_entries - rest.num_entries,
                num_unfinished=each.num_unfinished - rest.num_unfinished,
                num_bytes=each.num_bytes - rest.num_bytes,
            )
        if each.num_entries:
            gone.append(each)
    return gone


def _print(found: list[Holding], *, ages: bool = True) -> None:
    from ..launch.startup_display import size_text
    from ..models.local_models import ago

    columns = ("OWNER", "KIND", "COUNT", "UNFINISHED", "SIZE", *(("OLDEST", "NEWEST") if ages else ()))
    print_table(
        columns,
        [
            (
                each.owner[:_OWNER_CHARS] or _WITHOUT_KEY,
                each.kind,
                str(each.num_entries),
                str(each.num_unfinished or ""),
                size_text(each.num_bytes),
                *((ago(each.oldest_s), ago(each.newest_s)) if ages else ()),
            )
            for each in found
        ],
    )
