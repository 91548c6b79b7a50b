"""`engine embed`: texts in, vectors out; `engine rerank`: documents by their relevance to a query.

Standard output carries only the result.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

import typer

from ...runtime.errors import ConfigError, RequestError
from ...runtime.text import counted
from ..console import framed_table, output_console
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    takes_config_options,
    takes_settings,
)
from .backend import Backend, in_parts, open_backend
from .files import WRITERS, FormatName, Rows, Texts, read_texts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
rerank_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_SUFFIXES: Final[dict[str, FormatName]] = {".npy": "npy", ".jsonl": "jsonl", ".csv": "csv"}
_WITHOUT: Final = ("model", "served_model_name", "seed", "sampling_defaults", "chat_template")
"""Settings of the model that are options of their own here, or have no effect."""


_option = functools.partial(typer.Option, show_default=False)
_vectors = functools.partial(_option, rich_help_panel="Vectors")
_ranking = functools.partial(_option, rich_help_panel="Ranking")
_where = functools.partial(_option, rich_help_panel="Where it runs")
_texts = functools.partial(_option, rich_help_panel="Texts")
_Text = str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """The options of both commands: the input, and where it is computed."""

    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Files with a text on each line; - or none: standard input."),
    ] = None
    config_file: ConfigFileOption = None
    model: Annotated[
        _Text,
        _option(
            rich_help_panel="Model",
            metavar="TEXT",
            help="Folder in Hugging Face layout, .gguf file or name of a model; with --url, which of its models  "
            "[default: minilm]",
        ),
    ] = None
    url: Annotated[_Text, _where(metavar="URL", help="Ask this server instead of loading a model.")] = None
    attach: Annotated[
        bool,
        _where(
            help="Ask a server of this user that runs here and can do it, if nothing names a model  "
            "[default: attach]"
        ),
    ] = True
    api_key: Annotated[
        _Text, _where(metavar="TEXT", help="API key of that server (or set ENGINE_API_KEY).")
    ] = None
    truncate: Annotated[
        bool, _texts("--truncate", help="Cut texts that are longer than the model takes.")
    ] = False
    null: Annotated[
        bool,
        _texts(
            "--null",
            "-0",
            help="Texts end with a NUL byte instead of a line end, as `find -print0` writes them.",
        ),
    ] = False
    skip_empty: Annotated[
        bool, _texts("--skip-empty", help="Leave out empty texts; otherwise they are errors.")
    ] = False
    quiet: Annotated[
        bool,
        _option("--quiet", "-q", rich_help_panel="General", help="Print nothing but the result and errors."),
    ] = False

    def read(self) -> Texts:
        """The texts of the files."""
        return read_texts(self.files or [], null=self.null, skip_empty=self.skip_empty)

    def open(self, wanted: Literal["embed", "score"], settings: FlagValues) -> Backend:
        """The model: of a server, or loaded with these settings."""
        return open_backend(
            wanted,
            url=self.url,
            api_key=self.api_key,
            attach_first=self.attach,
            settings={**settings, "model": self.model},
            config_file=self.config_file,
            quiet=self.quiet,
        )


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_settings
@takes_config_options(("model",), exclude=_WITHOUT)
def embed(
    common: CommonOptions,
    output: Annotated[
        _Text,
        _vectors("--output", "-o", metavar="FILE", help="Write to this file instead of standard output."),
    ] = None,
    form: Annotated[
        _Text,
        _vectors(
            "--format",
            metavar="|".join(WRITERS),
            help="Form of the vectors  [default: by the name of FILE; a table on a terminal, else npy]",
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        _vectors(metavar="INT", help="Leading numbers to keep, of a model that was trained for it."),
    ] = None,
    normalize: Annotated[
        bool | None, _vectors(help="Scale vectors to length 1  [default: as the model's files say]")
    ] = None,
    prompt_name: Annotated[
        _Text, _vectors(metavar="TEXT", help="The model's prompt to put before each text.")
    ] = None,
    input_type: Annotated[
        _Text,
        _vectors(metavar="query|document", help="What the texts are, for models that have prompts for it."),
    ] = None,
    *,
    settings: FlagValues,
) -> None:
    """Turn texts into vectors: each line of the input into one.

    The model is minilm (all-MiniLM-L6-v2) if no other one is named, and no server of an embedder runs on this machine.

    Example: engine embed < lines.txt > vectors.npy
    """
    chosen = _format(form, output)
    given: dict[str, Any] = {
        "dimensions": dimensions,
        "normalize": normalize,
        "prompt_name": prompt_name,
        "input_type": input_type,
        "truncate": common.truncate or None,
    }
    options = {name: value for name, value in given.items() if value is not None}
    options["progress_bar"] = False  # there is one for all parts
    texts = common.read()
    with (
        _opened(output) as out,  # before the model is loaded, which takes seconds
        contextlib.closing(common.open("embed", settings)) as backend,
        _progress(len(texts.texts), quiet=common.quiet) as advance,
    ):

        def rows() -> Rows:
            for part, vectors in in_parts(backend, texts, lambda some: backend.embed(some, **options)):
                yield texts.texts[part.start : part.stop], vectors
                advance(len(part))

        WRITERS[chosen](out, len(texts.texts), rows())
    if texts.num_skipped and not common.quiet:
        note = f"{counted(texts.num_skipped, 'empty text')} left out; the rows are those of the other lines"
        print(f"engine: {note}", file=sys.stderr)


@rerank_app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_settings
@takes_config_options(("model",), exclude=_WITHOUT)
def rerank(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the documents are compared with.")],
    common: CommonOptions,
    top_n: Annotated[
        int | None,
        _ranking(
            "--top-n", "-n", metavar="INT", help="Print only so many documents, the most relevant ones."
        ),
    ] = None,
    instruction: Annotated[
        _Text,
        _ranking(
            metavar="TEXT",
            help="What makes a document relevant, for models that take an instruction.",
        ),
    ] = None,
    as_json: Annotated[bool, _ranking("--json", help="Print a JSON object on each line.")] = False,
    *,
    settings: FlagValues,
) -> None:
    """Sort documents by their relevance to a query, the most relevant first.

    A document is a line of the input. Score, line number and document are printed, separated by tabs; on a terminal, a
    table. A reranker computes query and document together; an embedder (such as minilm, the default) compares vectors.

    Example: engine rerank "How do I reset my password?" < articles.txt
    """
    if not query.strip():
        raise RequestError("QUERY is empty; say what the documents are compared with")
    if top_n is not None and top_n < 1:
        raise ConfigError(f"--top-n is {top_n}, but it must be at least 1")
    texts = common.read()
    given: dict[str, Any] = {"progress_bar": False} | ({"truncate": True} if common.truncate else {})
    if instruction is not None:
        given["instruction"] = instruction
    ranked: list[tuple[float, int]] = []
    with (
        contextlib.closing(common.open("score", settings)) as backend,
        _progress(len(texts.texts), quiet=common.quiet) as advance,
    ):
        for part, found in in_parts(backend, texts, lambda some: backend.rerank(query, some, **given)):
            ranked += [(each.score, part.start + each.index) for each in found]
            advance(len(part))
    ranked.sort(key=lambda each: (-each[0], each[1]))
    _print(texts, ranked[:top_n], as_json=as_json)


def _print(texts: Texts, ranked: Sequence[tuple[float, int]], *, as_json: bool) -> None:
    if not as_json and sys.stdout.isatty():
        from rich.markup import escape

        console = output_console()
        table = framed_table(console)
        for column in ("score", "line", "document"):
            table.add_column(column, justify="left" if column == "document" else "right")
        for score, index in ranked:
            table.add_row(f"{score:.4f}", str(texts.numbers[index]), escape(texts.texts[index]))
        console.print(table)
        return
    for score, index in ranked:
        text, number = texts.texts[index], texts.numbers[index]
        if as_json:
            row = {"index": index, "line": number, "score": score, "document": text}
            sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            flat = text.replace("\t", " ").replace("\n", " ")
            sys.stdout.write(f"{score:.6f}\t{number}\t{flat}\n")
    sys.stdout.flush()


def _format(name: str | None, output: str | None) -> FormatName:
    """The form of the vectors.

    Raises:
        ConfigError: an unknown one, or one that standard output cannot take.
    """
    form = next((known for known in WRITERS if known == name), None)
    if name is not None and form is None:
        raise ConfigError(f"--format is {name!r}, but it must be one of {', '.join(WRITERS)}")
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
    """The stream that vectors are written to; a file that was not completed is removed, a device stays.

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
    except BaseException as error:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.stat(output).st_mode):
                os.unlink(output)
        if isinstance(error, OSError):
            raise RequestError(f"--output {output} cannot be written: {error.strerror}") from None
        raise


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields what is called with the number of texts that have just been finished."""
    if quiet or not sys.stderr.isatty():
        yield lambda _num_texts: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda num_texts: progress.advance(task, num_texts)
