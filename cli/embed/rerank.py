"""`engine rerank`: documents by their relevance to a query."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated, Any

import typer

from ...runtime.errors import ConfigError, RequestError
from ..console import framed_table, output_console
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    takes_config_options,
)
from .backend import PartError, Scored
from .command import WITHOUT, NullOption, SkipEmptyOption, TruncateOption, progress_of
from .server import ApiKeyOption, AttachOption, ModelOption, UrlOption, open_backend
from .texts import Texts, read_texts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _ranking(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel="Ranking", show_default=False)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_config_options(("model",), exclude=WITHOUT)
def rerank(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What the documents are compared with.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Files with a document on each line; - or none: standard input.",
            show_default=False,
        ),
    ] = None,
    config_file: ConfigFileOption = None,
    model: ModelOption = None,
    url: UrlOption = None,
    attach: AttachOption = True,
    api_key: ApiKeyOption = None,
    top_n: Annotated[
        int | None,
        _ranking("Print only so many documents, the most relevant ones.", "--top-n", "-n", metavar="INT"),
    ] = None,
    instruction: Annotated[
        str | None,
        _ranking(
            "What makes a document relevant, for models that take an instruction.",
            "--instruction",
            metavar="TEXT",
        ),
    ] = None,
    as_json: Annotated[bool, _ranking("Print a JSON object on each line.", "--json")] = False,
    truncate: TruncateOption = False,
    null: NullOption = False,
    skip_empty: SkipEmptyOption = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print nothing but documents and errors.", rich_help_panel="General"
        ),
    ] = False,
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
    texts = read_texts(files or [], null=null, skip_empty=skip_empty)
    backend = open_backend(
        "score",
        url=url,
        api_key=api_key,
        attach=attach,
        settings={**settings, "model": model},
        config_file=config_file,
        quiet=quiet,
    )
    ranked: list[Scored] = []
    with contextlib.closing(backend):
        try:
            with progress_of(len(texts.texts), quiet=quiet) as advance:
                for part in backend.rerank(query, texts.texts, instruction=instruction, truncate=truncate):
                    ranked += part
                    advance(len(part))
        except PartError as error:
            raise texts.located(error, error.start) from None
    ranked.sort(key=lambda scored: (-scored.score, scored.index))
    _print(texts, ranked[:top_n], as_json=as_json)


def _print(texts: Texts, ranked: list[Scored], *, as_json: bool) -> None:
    if not as_json and sys.stdout.isatty():
        from rich.markup import escape

        console = output_console()
        table = framed_table(console)
        for column in ("score", "line", "document"):
            table.add_column(column, justify="left" if column == "document" else "right")
        for scored in ranked:
            text, number = texts.texts[scored.index], texts.numbers[scored.index]
            table.add_row(f"{scored.score:.4f}", str(number), escape(text))
        console.print(table)
        return
    for scored in ranked:
        text, number, score = texts.texts[scored.index], texts.numbers[scored.index], scored.score
        if as_json:
            row = {"index": scored.index, "line": number, "score": score, "document": text}
            sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            flat = text.replace("\t", " ").replace("\n", " ")
            sys.stdout.write(f"{score:.6f}\t{number}\t{flat}\n")
    sys.stdout.flush()
