"""`engine why RID`: why a request waited, was computed in chunks, was preempted or missed the cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from ..runtime.errors import RequestError, ServerError
from ..runtime.text import variable
from .exit_codes import ExitCode
from .options import CONTEXT_SETTINGS, GroupedCommand

if TYPE_CHECKING:
    from ..runtime.messages import Explanation

_TIMEOUT_S: Final = 10.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def why(
    rid: Annotated[str, typer.Argument(metavar="RID", help="The `id` of a response: chatcmpl-..., cmpl-...")],
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Server that handled the request  [default: your newest on this machine]",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="TEXT", help="API key of that server (or set ENGINE_API_KEY)."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", metavar="FILE", help="Read a file of --decision-log instead of asking a server."
        ),
    ] = None,
) -> int:
    """Explain why a request waited, was preempted or missed the cache: one sentence and a table.

    A server keeps its last few thousand decisions; a file has all of them. The exit code is 4 if the request is
    unknown.
    """
    if log is not None and url is not None:
        raise RequestError("--log reads a file and --url asks a server; pass one of them")
    if log is not None:
        explanation = _ask_file(log, rid)
    else:
        key = api_key or variable("ENGINE_API_KEY")
        explanation = _ask_server(url, key, rid)
    if not explanation.found:
        typer.echo(f"engine: {explanation.sentence}", err=True)
        return ExitCode.NOT_FOUND
    print_explanation(explanation)
    return 0


def _ask_file(path: Path, rid: str) -> Explanation:
    """The explanation from the last run that contains the request; after a crash, two runs can contain it."""
    from ..scheduler.journal.log_file import read_runs
    from ..scheduler.queries.why import explain

    answer: Explanation | None = None
    for run in read_runs(path):
        explanation = explain(run.decisions, rid)
        if answer is None or explanation.found or not answer.found:
            answer = explanation
        if run.damage:
            typer.echo(f"engine: note: {run.damage}", err=True)
    assert answer is not None, "a decision log has a run"
    return answer


def _ask_server(url: str | None, api_key: str | None, rid: str) -> Explanation:
    import httpx

    from ..runtime.messages import Explanation
    from .server_client import base_url, connection_problem, error_of, server_url

    base = base_url(server_url(url))
    headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
    try:
        response = httpx.get(
            f"{base}/v1/requests/{quote(rid, safe='')}/why", headers=headers, timeout=_TIMEOUT_S
        )
    except httpx.HTTPError as error:
        hint = "name it with --url, or read its decision log with --log FILE"
        raise ServerError(connection_problem(base, error, hint)) from None
    body = _json_of(response)
    error_body = body.get("error")
    if isinstance(error_body, dict) and error_body.get("code") == "request_not_found":
        return Explanation(False, str(error_body.get("message", "")))
    if "sentence" in body:
        columns = tuple(map(str, body.get("columns", ())))
        rows = tuple(tuple(map(str, row)) for row in body.get("rows", ()))
        return Explanation(bool(body.get("found")), str(body["sentence"]), columns, rows)
    if response.status_code == httpx.codes.NOT_FOUND:
        raise ServerError(f"{base} does not explain requests; is it an engine of this version? Check --url")
    if response.status_code != httpx.codes.OK:
        raise error_of(response)
    raise ServerError(f"{base} gave an answer that is no explanation; check --url")


def _json_of(response: Any) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def print_explanation(explanation: Explanation) -> None:
    """The sentence, then the table; without a terminal, lines of values divided by tabs."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        typer.echo(explanation.sentence)
        for row in (explanation.columns, *explanation.rows):
            typer.echo("\t".join(row))
        return
    console.print(explanation.sentence, markup=False, highlight=False)
    table = Table()
    for column in explanation.columns:
        table.add_column(column, justify="right" if column in ("need", "have") else "left")
    for row in explanation.rows:
        table.add_row(*(_plain(cell) for cell in row))
    console.print(table)


def _plain(cell: str) -> Any:
    from rich.text import Text

    return Text(cell)
