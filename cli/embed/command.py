"""`engine embed`: texts in, vectors out. Standard output carries only the vectors."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

from ...runtime.errors import ConfigError, RequestError
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    takes_config_options,
)
from .backend import Backend, EmbedOptions, PartError
from .server import ApiKeyOption, AttachOption, ModelOption, UrlOption, open_backend
from .texts import Texts, read_texts, skipped_note
from .writing import FORMATS, FormatName, writer_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_SUFFIXES: Final[dict[str, FormatName]] = {".npy": "npy", ".jsonl": "jsonl", ".csv": "csv"}
WITHOUT: Final = ("model", "served_model_name", "seed", "sampling_defaults", "chat_template")
"""Settings of the model that are options of their own here, or have no effect."""


def _option(title: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=title, show_default=False)


def texts_option(text: str, *names: str) -> Any:
    """An option about the input."""
    return _option("Texts", text, *names)


def _vectors(text: str, *names: str, metavar: str | None = None) -> Any:
    return _option("Vectors", text, *names, metavar=metavar)


NullOption = Annotated[
    bool,
    texts_option(
        "Texts end with a NUL byte instead of a line end, as `find -print0` writes them.", "--null", "-0"
    ),
]
SkipEmptyOption = Annotated[
    bool, texts_option("Leave out empty texts; otherwise they are errors.", "--skip-empty")
]
TruncateOption = Annotated[
    bool, texts_option("Cut texts that are longer than the model takes.", "--truncate")
]


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_config_options(("model",), exclude=WITHOUT)
def embed(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Files of texts; - or none: standard input.", show_default=False),
    ] = None,
    config_file: ConfigFileOption = None,
    model: ModelOption = None,
    url: UrlOption = None,
    attach: AttachOption = True,
    api_key: ApiKeyOption = None,
    output: Annotated[
        str | None,
        _vectors("Write to this file instead of standard output.", "--output", "-o", metavar="FILE"),
    ] = None,
    form: Annotated[
        str | None,
        _vectors(
            "Form of the vectors  [default: by the name of FILE; a table on a terminal, else npy]",
            "--format",
            metavar="|".join(FORMATS),
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        _vectors(
            "Leading numbers to keep, of a model that was trained for it.", "--dimensions", metavar="INT"
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        _vectors(
            "Scale vectors to length 1  [default: as the model's files say]", "--normalize/--no-normalize"
        ),
    ] = None,
    prompt_name: Annotated[
        str | None,
        _vectors("The model's prompt to put before each text.", "--prompt-name", metavar="TEXT"),
    ] = None,
    input_type: Annotated[
        str | None,
        _vectors(
            "What the texts are, for models that have prompts for it.",
            "--input-type",
            metavar="query|document",
        ),
    ] = None,
    truncate: TruncateOption = False,
    null: NullOption = False,
    skip_empty: SkipEmptyOption = False,
    quiet: Annotated[
        bool, _option("General", "Print nothing but vectors and errors.", "--quiet", "-q")
    ] = False,
    *,
    settings: FlagValues,
) -> None:
    """Turn texts into vectors: each line of the input into one.

    The model is minilm (all-MiniLM-L6-v2) if no other one is named, and no server of an embedder runs on this machine.

    Example: engine embed < lines.txt > vectors.npy
    """
    chosen = _format(form, output)
    options = EmbedOptions(
        dimensions=dimensions,
        normalize=normalize,
        prompt_name=prompt_name,
        input_type=input_type,
        truncate=truncate,
    )
    texts = read_texts(files or [], null=null, skip_empty=skip_empty)
    with _opened(output) as out:  # before the model is loaded, which takes seconds
        backend = open_backend(
            "embed",
            url=url,
            api_key=api_key,
            attach=attach,
            settings={**settings, "model": model},
            config_file=config_file,
            quiet=quiet,
        )
        with contextlib.closing(backend):
            _write(backend, texts, options, chosen, out, quiet=quiet)
    if not quiet and (note := skipped_note(texts)):
        print(f"engine: {note}; the rows are those of the other lines", file=sys.stderr)


def _write(
    backend: Backend, texts: Texts, options: EmbedOptions, form: FormatName, out: BinaryIO, *, quiet: bool
) -> None:
    writer = writer_of(form, out, len(texts.texts))
    done = 0
    try:
        with progress_of(len(texts.texts), quiet=quiet) as advance:
            for vectors in backend.embed(texts.texts, options):
                writer.write(texts.texts[done : done + len(vectors)], vectors)
                done += len(vectors)
                advance(len(vectors))
    except PartError as error:
        raise texts.located(error, error.start) from None
    writer.end()


def _format(name: str | None, output: str | None) -> FormatName:
    """The form of the vectors.

    Raises:
        ConfigError: an unknown one, or one that standard output cannot take.
    """
    form = next((known for known in FORMATS if known == name), None)
    if name is not None and form is None:
        raise ConfigError(f"--format is {name!r}, but it must be one of {', '.join(FORMATS)}")
    if output is not None:
        if form == "table":
            raise ConfigError(
                "--format table is for standard output; leave out --output, or use another form"
            )
        if form is None and (form := _SUFFIXES.get(Path(output).suffix.lower())) is None:
            known = ", ".join(_SUFFIXES)
            raise ConfigError(f"--output {output} does not end with {known}; pass --format")
        return form
    terminal = sys.stdout.isatty()
    if form == "npy" and terminal:
        raise ConfigError(
            "npy is a binary form, and standard output is a terminal; add -o vectors.npy, or > vectors.npy"
        )
    return form or ("table" if terminal else "npy")


@contextlib.contextmanager
def _opened(output: str | None) -> Iterator[BinaryIO]:
    """The stream that vectors are written to; a file that was not completed is removed.

    Raises:
        ConfigError: the file cannot be written.
    """
    if output is None:
        yield sys.stdout.buffer
        return
    try:
        out = open(output, "wb")  # noqa: SIM115  (closed below)
    except PermissionError:
        raise
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from None
    try:
        with out:
            yield out
    except OSError as error:
        _remove(output)
        raise RequestError(f"--output {output} cannot be written: {error.strerror}") from None
    except BaseException:
        _remove(output)
        raise


def _remove(output: str) -> None:
    """Remove a file; a device such as /dev/null stays."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.stat(output).st_mode):
            os.unlink(output)


@contextlib.contextmanager
def progress_of(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields what is called with the number of texts that have just been finished."""
    if quiet or not sys.stderr.isatty():
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda num_texts: progress.advance(task, num_texts)


def _ignore(num_texts: int) -> None:
    return
