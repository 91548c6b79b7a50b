"""`engine top [URL]`: watch a server in a terminal, or print one snapshot for a script."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Annotated, Final, NamedTuple

import typer

from ...runtime.errors import RequestError
from ...runtime.text import variable
from ..options import CONTEXT_SETTINGS, GroupedCommand
from ..server_client import server_url
from .snapshot import Client, Rates, Snapshot, Unreachable
from .view import render

MIN_INTERVAL_S: Final = 0.1
_KEY_VARIABLES: Final = ("ENGINE_ADMIN_API_KEY", "ENGINE_API_KEY")
_ONCE_COLUMNS: Final = 200
_ONCE_LINES: Final = 10_000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def top(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="Server to watch  [default: your newest on this machine]"),
    ] = None,
    url_option: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="The same as the argument.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="TEXT",
            help="Admin key of the server, if it has one (or set ENGINE_ADMIN_API_KEY, ENGINE_API_KEY).",
        ),
    ] = None,
    cacert: Annotated[
        str | None,
        typer.Option(
            "--cacert",
            metavar="FILE",
            help="Certificates to trust (PEM), for a server with a private CA (or set SSL_CERT_FILE).",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="NUMBER", help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print a JSON object.")] = False,
) -> int:
    """Watch a server: running and waiting requests, KV memory, prefix cache, budgets, rates. Ctrl-C quits.

    Example: engine top http://127.0.0.1:30000
    """
    if url is not None and url_option not in (None, url):
        raise RequestError(f"the URL is given twice: {url!r} and --url {url_option!r}; drop one")
    if not interval >= MIN_INTERVAL_S or interval == float("inf"):
        raise RequestError(f"--interval is {interval:g}, but it must be {MIN_INTERVAL_S:g} seconds or more")
    if as_json and not once:
        raise RequestError("--json prints one snapshot; add --once")
    if not once and not sys.stdout.isatty():
        raise RequestError("standard output is no terminal to draw on; use --once, or --once --json")
    key = api_key or next((value for name in _KEY_VARIABLES if (value := variable(name))), None)
    if api_key:
        import setproctitle

        setproctitle.setproctitle("engine: top")  # instead of the command line, which contains the key
    with Client(server_url(url or url_option), key, cacert=cacert) as client:
        if once:
            print_once(client.poll(), as_json=as_json)
        else:
            watch(client, interval)
    return 0


def print_once(snapshot: Snapshot, *, as_json: bool) -> None:
    """Print one snapshot on standard output."""
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(snapshot.as_dict(None), indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    width = console.width if console.is_terminal else _ONCE_COLUMNS
    console = Console(highlight=False, width=width)
    console.print(render(snapshot, None, width=width, height=_ONCE_LINES))


class Poll(NamedTuple):
    """A snapshot to show; `note` says why it is out of date, if it is."""

    snapshot: Snapshot
    rates: Rates | None
    note: str


def polls(poll: Callable[[], Snapshot]) -> Iterator[Poll]:
    """A new snapshot for each `next`, without end; while the server does not answer, the old one with a note.

    Raises:
        EngineError: the first snapshot failed, or the server refuses.
    """
    snapshot, rates = poll(), None
    yield Poll(snapshot, rates, "")
    while True:
        try:
            latest = poll()
        except Unreachable as error:
            yield Poll(snapshot, None, str(error))
            continue
        # The scheduler reports twice a second: between two reports the rates are those of before.
        rates = Rates.between(snapshot, latest) or (rates if _same_report(snapshot, latest) else None)
        snapshot = latest
        yield Poll(snapshot, rates, "")


def _same_report(before: Snapshot, after: Snapshot) -> bool:
    return before.report.sent_s == after.report.sent_s


def watch(client: Client, interval_s: float) -> None:
    """Draw until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    each = polls(client.poll)
    first = next(each)  # before the screen is cleared, so that an error stays visible
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for polled in chain([first], each):
            width, height = console.size
            live.update(
                render(polled.snapshot, polled.rates, width=width, height=height, note=polled.note),
                refresh=True,
            )
            time.sleep(interval_s)
