"""`engine`: the entry point of the command line; prints its errors.

Commands are imported when they run: `engine --help` shows them from the table below and loads nothing else. The exit
codes are those of `exit_codes.py`.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ..runtime.config.migration import COMMANDS as ELSEWHERE
from ..runtime.config.migration import answer_for
from ..runtime.errors import ConfigError, EngineError
from ..runtime.installation import __version__
from ..runtime.text import check_os_text
from .exit_codes import ExitCode, exit_code_of
from .options import CONTEXT_SETTINGS

if TYPE_CHECKING:
    from ..supervisor.standby import Standby

PROG_NAME: Final = "engine"
_CANNOT_WRITE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of a disk: without space, over a quota or a limit, failing, read-only."""
_EXTRA: Final = re.compile(r"^Got unexpected extra argument\S* \((.*)\)")
_NO_NUMBER: Final = re.compile("^Input should be a valid (integer|number)")
_NUMBERS: Final = {"integer": "whole number", "number": "number"}
"""The word of a validation -> the word of settings."""
PANELS: Final = {
    "Core commands": {
        "serve": (".serve", "Serve a model over HTTP, compatible with the OpenAI API."),
        "chat": (".chat.command", "Chat with a model in the terminal, or ask one question."),
        "bench": (".bench.commands", "Measure throughput and latency."),
        "doctor": (".doctor.command", "Check whether a model can be served here, and what to fix."),
    },
    "Models on this machine": {
        "pull": (".models:pull_app", "Download a model, for starts that need no network."),
        "list": (".models:list_app", "List the models on this machine."),
        "rm": (".models:rm_app", "Remove models from this machine."),
    },
    "Servers": {
        "ps": (".models:ps_app", "List the servers that run on this machine."),
        "launch": (".launch", "Start a coding agent that uses a model on this machine."),
        "top": (".top.command", "Watch a server: running and waiting requests, memory, rates."),
        "fleet": (".fleet.command", "Run many servers of one model on Ray: heal, scale, drain them."),
        "state": (".state", "List, purge or check the files and responses that a server keeps."),
    },
    "Texts, vectors and scores of files": {
        "batch": (".batch.command", "Answer the requests of a JSONL file, as OpenAI's batches."),
        "embed": (".embed.command", "Turn texts into vectors, for search and comparison."),
        "rerank": (".embed.command:rerank_app", "Sort documents by their relevance to a query."),
        "decisions": (".decisions", "Fit the temperatures of a model's decisions to labeled questions."),
    },
    "Decisions of the scheduler": {
        "why": (".why", "Explain why a request waited, was preempted or missed the cache."),
        "replay": (".replay", "Replay a decision log, with its settings or with others."),
        "trace": (".trace.command", "Draw a timeline of the scheduler from a decision log."),
        "simulate": (".simulate.command", "Simulate settings, policies and machines without a model."),
    },
}
"""Title in `--help` -> command -> (module with the typer app, which is `app` or named, one line for `--help`)."""
COMMANDS: Final = {name: entry for panel in PANELS.values() for name, entry in panel.items()}
EXAMPLES: Final = """Examples:

  engine serve                         the default model on 127.0.0.1:30000
  engine serve ./my-model --port 80    a Hugging Face folder, or a .gguf file
  engine serve --print-config          every setting, and where it came from
  engine chat                          chat with the default model, no server
  engine chat "Why is the sky blue?"   one question; stdout is the answer
  engine embed < lines > vectors.npy   a vector for each line

Every command takes --help, and works without a model: the default is small."""


class LazyGroup(TyperGroup):
    """The commands of `COMMANDS`; a command's module is imported only when the command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, most used first."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """A command as `--help` lists it: its name and its line."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the command that was asked for, or suggest one."""
        name = args[0]
        if name not in COMMANDS:
            if name in ELSEWHERE:
                raise ConfigError(f"there is no command '{name}': {ELSEWHERE[name]}")
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"the commands are {', '.join(COMMANDS)}"
            raise ConfigError(f"there is no command '{name}'; {hint}")
        return name, load_command(name), args[1:]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One section per panel."""
        width = max(map(len, COMMANDS))
        for title, commands in PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The usual help, then examples."""
        super().format_help(ctx, formatter)
        formatter.write(f"\n{EXAMPLES}\n")


app = typer.Typer(
    cls=LazyGroup, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=CONTEXT_SETTINGS
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version and exit.")] = False,
) -> None:
    """An inference engine for large language models."""
    if version:
        typer.echo(f"{PROG_NAME} {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@functools.cache
def load_command(name: str) -> Any:
    """The command, made once in a process that calls `run` often: the options of `serve` take 0.1 s."""
    module, _, app = COMMANDS[name][0].partition(":")
    return get_command(getattr(importlib.import_module(module, __package__), app or "app"))


def main(argv: Sequence[str] | None = None, standby: Standby | None = None) -> None:
    """Run the command line and exit; a mistake of the user is one line, a bug is a traceback."""
    show_what_cannot_be_encoded((sys.stdout, sys.stderr))
    sys.exit(run(argv, standby))


def run(argv: Sequence[str] | None = None, standby: Standby | None = None) -> int:
    """Run the command line.

    Args:
        standby: may have a scheduler that runs already, for `serve`.

    Returns:
        The exit code.
    """
    try:
        code = _run(argv, standby)
        if sys.stdout is not None:  # closed, as by `>&-`
            sys.stdout.flush()  # a disk that is full is noticed here, and not while Python exits
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return ExitCode.OUTPUT_CLOSED
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _drop_output()
        what = error.filename or "the output"
        return _fail(f"{what} cannot be written: {error.strerror}", ExitCode.USER)
    return code


def _run(argv: Sequence[str] | None, standby: Standby | None) -> int:
    arguments: Sequence[str] = ()
    try:
        arguments = check_arguments(sys.argv[1:] if argv is None else argv)
        result = app(args=arguments, prog_name=PROG_NAME, standalone_mode=False, obj=standby)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "") or _command_path(arguments)
        message = error.format_message().replace("Value error, ", "").rstrip(".")
        message = _EXTRA.sub(r"there is no use for the argument \1", message)
        if answer := _answer(error, arguments):
            return _fail(answer, ExitCode.USER)
        if problem := _no_number(error, arguments):
            return _fail(problem, ExitCode.USER)
        return _fail(f"{message} (see {command} --help)", ExitCode.USER)
    except EngineError as error:
        return _fail(str(error), exit_code_of(error))
    except PermissionError as error:
        return _fail(
            f"{error.filename}: {error.strerror}; give this user access, or use another path", ExitCode.USER
        )
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer exits with 1
            raise error.__context__ from None
        raise
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Standard output cannot be written. Python would report that again when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no real file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command_path(arguments: Sequence[str]) -> str:
    """The command that was called, for errors that typer raises before it has a context."""
    return f"{PROG_NAME} {arguments[0]}" if arguments and arguments[0] in COMMANDS else PROG_NAME


def _no_number(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """The sentence for an option with a value that is no number; "" if the error is another one."""
    kind = _NO_NUMBER.search(getattr(error, "message", ""))
    if kind is None:
        return ""
    for flag in getattr(getattr(error, "param", None), "opts", ()):
        for index, word in reversed([*enumerate(arguments)]):  # the last one counts
            name, equals, value = word.partition("=")
            if name == flag and (equals or index + 1 < len(arguments)):
                given = value if equals else arguments[index + 1]
                return f"{flag} is {given!r}, but it must be a {_NUMBERS[kind[1]]}"
    return ""


def _answer(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Replacement for an option of another engine; "" if the error is another one."""
    if " ".join(arguments[:2]) != "bench offline" and arguments[0] not in (
        "serve",
        "fleet",
        "chat",
        "doctor",
        "embed",
        "rerank",
    ):
        return ""
    wrong = getattr(error, "option_name", "")
    for argument in arguments:
        word = argument.partition("=")[0]
        if wrong and word.startswith(wrong) and (answer := answer_for(word, chat=arguments[0] == "chat")):
            return f"there is no option {word}: {answer}"
    return ""


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # the exit code remains
        typer.echo(f"{PROG_NAME}: {message}", err=True)
    return code


def check_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments, which must be Unicode text, and not empty, as `"$MODEL"` is where the variable is not set.

    Raises:
        ConfigError: one is not; the message names its place and not its text, which may be a key.
    """
    for index, text in enumerate(arguments):
        place = _place(arguments, index)
        check_os_text(text, place)
        flag, equals, value = text.partition("=")
        if not text or (flag.startswith("-") and equals and not value):
            raise ConfigError(f"{place} is empty; is a variable not set? Give a value, or leave it out")
    return list(arguments)


def show_what_cannot_be_encoded(streams: Iterable[object]) -> None:
    """Write a replacement for characters that the encoding of a stream lacks, instead of an error.

    A terminal or a pipe may have any encoding (`LC_ALL=C` with `PYTHONUTF8=0` is ASCII).
    """
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _place(arguments: Sequence[str], index: int) -> str:
    """`argument 3 (--api-key)`, counted from 1."""
    own, before = arguments[index], arguments[index - 1] if index else ""
    option = own.partition("=")[0] if own.startswith("--") and "=" in own else before
    named = option.startswith("-") and len(option) > 1 and option.isascii()
    return f"argument {index + 1} ({option})" if named else f"argument {index + 1}"


if __name__ == "__main__":
    main()
