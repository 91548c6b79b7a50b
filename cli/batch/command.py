"""`engine batch`: answers the requests of a file, on a server of its own that ends with it, or on a running one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from ...runtime.errors import ConfigError
from ...runtime.text import counted, variable
from ..console import late_progress, no_progress
from ..exit_codes import ExitCode
from ..launch import ended_by_signals, started_server
from ..options import CONTEXT_SETTINGS, GroupedCommand
from ..server_client import ServerConnection, base_url

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_START_ONE: Final = "start one with `engine serve MODEL`, or leave out --url"
_SERVE: Final = ("--served-model-name", "*", "--host", "127.0.0.1", "--port", "0")
"""A file may name any model, such as one of OpenAI; options after `--` may say otherwise."""


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def batch(
    output: Annotated[
        Path,
        typer.Option(
            "--output", "--output-file", "-o", metavar="OUT", help="Write the results to this file."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IN",
            help="File with a request in each line, as for /v1/batches; after `--` options of `engine serve`.",
            show_default=False,
        ),
    ] = None,
    given: Annotated[
        Path | None,
        typer.Option(
            "--input-file", "-i", metavar="IN", help="IN, as vLLM's run-batch has it.", show_default=False
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(
            "--errors", metavar="FILE", help="Write results that are errors to this file.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Model to load, for whatever model the lines name; with --url, which of its models.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="Ask this server instead of loading a model.", show_default=False
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="TEXT",
            help="API key of that server (or set ENGINE_API_KEY).",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> int:
    """Answer the requests of a JSONL file, in the form of OpenAI's batches.

    Results are in the order of the input. Endpoints may be mixed. Lines that begin alike run one after another, so that
    a shared prefix is computed once. With --url the lines are in the class of `service_tier: flex`, which runs on what
    other requests leave.

    Results are kept in OUT.partial until all are there. After Ctrl-C, a crash or a power cut the same command goes on:
    no line is missing or there twice. The exit code is 1 if a result is an error, such as a line that is too long.

    Example: engine batch requests.jsonl -o results.jsonl --model smollm2
    """
    path, arguments = _input(given, words or [])
    if url is not None and arguments:
        raise ConfigError(f"{arguments[0]} has no effect on a server that runs already; drop it, or --url")
    if errors is not None and errors.absolute() == output.absolute():
        raise ConfigError(
            f"--errors and --output are both {output}; name another file, or leave out --errors"
        )
    from .answers import Answers, digest_of
    from .run import LineSender, read_lines

    lines = read_lines(path)  # before the model is loaded, which takes seconds
    digest = digest_of(path)
    key = api_key or variable("ENGINE_API_KEY")
    with contextlib.ExitStack() as stack:
        answers = stack.enter_context(Answers(output, errors, digest))
        num_before = len(answers)
        if num_before and not quiet:
            _note(f"{num_before} of {counted(len(lines), 'line')} have results from an earlier run")
        if num_before < len(lines):
            if url is None:
                stack.enter_context(ended_by_signals())
                serve = [*_SERVE, *([] if model is None else ["--model", model]), *arguments]
                base = stack.enter_context(
                    started_server(serve, os.environ, note=(lambda _line: None) if quiet else _note)
                )
                sender = LineSender(base_url(base), api_key=key, model=None)
            else:
                server = ServerConnection(url, api_key=key, model=model, how_to_start=_START_ONE)
                server.client.close()
                sender = LineSender(server.base, api_key=key, model=model)
            show = no_progress if quiet else stack.enter_context(late_progress())
            asyncio.run(
                sender.send_all(path, lines, answers, digest, lambda done: show("lines", done, len(lines)))
            )
        answers.finish([line.custom_id for line in lines])
        num_failed = answers.num_failed
    if not quiet:
        note = f", {counted(num_failed, 'error')} among them" if num_failed else ""
        places = f"{output} and {errors}" if num_failed and errors is not None else output
        _note(f"{counted(len(lines), 'line')} answered{note}: {places}")
    return int(ExitCode.FAILED if num_failed else ExitCode.SUCCESS)


def _input(given: Path | None, words: list[str]) -> tuple[Path, list[str]]:
    """The input, and the arguments of `engine serve`."""
    if given is None:
        if not words or words[0].startswith("-"):
            raise ConfigError("IN is missing: name the file with the requests, as engine batch IN -o OUT")
        given, words = Path(words[0]), words[1:]
    if words and not words[0].startswith("-"):
        raise ConfigError(
            f"there is no use for {words[0]!r}: one file is answered, and options of `engine serve` come after --"
        )
    return given, words


def _note(line: str) -> None:
    typer.echo(f"engine: {line}", err=True)
