"""`engine chat`: options in, then one answer or a conversation."""

from __future__ import annotations

import functools
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from ...launch.startup_display import StartupDisplay
from ...runtime.config.config_sources import MergedConfig
from ...runtime.errors import ConfigError, RequestError
from ...runtime.text import decode_utf8, variable
from ..exit_codes import ExitCode, ends_at_interrupt
from ..options import (
    CONTEXT_SETTINGS,
    ConfigFileOption,
    FlagValues,
    GroupedCommand,
    merge_options,
    takes_config_options,
)
from ..server_client import attach, names_a_model, refuse_settings
from .backend import BASE_SETTINGS, Backend, HttpBackend, InProcessBackend
from .conversation import Conversation, ask_once, check_sight
from .images import content_of, image_of_file, pasted_images
from .line_editor import LineEditor, default_history_path
from .screen import Screen, wants_color
from .session import ChatSession
from .settings import ChatSettings, read_form
from .slash_commands import LeaveChat, is_command, message_of, run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


_chat = functools.partial(typer.Option, rich_help_panel="Chat", show_default=False)
_sampling = functools.partial(typer.Option, rich_help_panel="Sampling", show_default=False)

Text = str | None
Question = typer.Argument(
    metavar="QUESTION", help="Ask this, print the answer, and exit.", show_default=False
)


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@takes_config_options(("model", "cache"), exclude=("served_model_name",))
def chat(
    question: Annotated[list[str] | None, Question] = None,
    config_file: ConfigFileOption = None,
    url: Annotated[Text, _chat(metavar="URL", help="Talk to this server instead of loading a model.")] = None,
    attach_first: Annotated[
        bool,
        _chat(
            "--attach/--no-attach",
            help="Talk to a server of this user that runs here, if nothing names a model  [default: attach]",
        ),
    ] = True,
    api_key: Annotated[
        Text, _chat(metavar="TEXT", help="API key of that server (or set ENGINE_API_KEY).")
    ] = None,
    system: Annotated[Text, _chat("--system", "-s", metavar="TEXT", help="The system prompt.")] = None,
    image: Annotated[
        list[Path] | None, _chat(metavar="FILE", help="Image that goes with the question; may be repeated.")
    ] = None,
    load: Annotated[
        Path | None, _chat(metavar="FILE", help="Continue a conversation saved by /save.")
    ] = None,
    schema: Annotated[
        Path | None, _chat(metavar="FILE", help="Answers are JSON that matches the JSON Schema in this file.")
    ] = None,
    tools: Annotated[
        Path | None, _chat(metavar="FILE", help="Tools that the model may call (JSON, OpenAI's form).")
    ] = None,
    as_json: Annotated[
        bool, _chat("--json", help="Print the answer as a JSON object, with statistics.")
    ] = False,
    stats: Annotated[
        bool | None, _chat(help="Statistics after each answer, on stderr  [default: on a terminal]")
    ] = None,
    markdown: Annotated[
        bool, _chat(help="Style Markdown in answers on a terminal  [default: markdown]")
    ] = True,
    stop_loops: Annotated[
        bool, _chat(help="Stop an answer that repeats itself without end  [default: stop-loops]")
    ] = True,
    quiet: Annotated[bool, _chat("--quiet", "-q", help="Print nothing but answers and errors.")] = False,
    history: Annotated[bool, _chat(help="Remember typed lines  [default: history]")] = True,
    temperature: Annotated[
        Text, _sampling(metavar="NUMBER", help="Sampling temperature; 0 is greedy  [default: the model's]")
    ] = None,
    top_p: Annotated[
        Text, _sampling(metavar="NUMBER", help="Probability mass of nucleus sampling  [default: the model's]")
    ] = None,
    top_k: Annotated[
        Text, _sampling(metavar="INT", help="Most likely tokens to sample from  [default: the model's]")
    ] = None,
    min_p: Annotated[
        Text,
        _sampling(metavar="NUMBER", help="Smallest probability, relative to that of the most likely token"),
    ] = None,
    max_tokens: Annotated[
        Text, _sampling(metavar="INT", help="Most tokens in an answer  [default: what fits]")
    ] = None,
    stop: Annotated[Text, _sampling(metavar="TEXT", help="String that ends an answer.")] = None,
    *,
    settings: FlagValues,
) -> int:
    """Chat with a model in the terminal, or ask one question.

    A server of this user that runs on this machine answers; without one, or with a setting of the model, the model is
    loaded into this process. Piped input is the question, or is appended to it: `engine chat "Summarize this:" <
    notes.txt`. Standard output carries only the answer.
    """
    chosen = ChatSettings()
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "stop": stop}
    for name, text in (sampling | {"max_tokens": max_tokens, "seed": settings["seed"]}).items():
        if text is not None:
            chosen = chosen.changed(name, text)
    session = ChatSession(system, chosen)
    form = read_form(schema, tools)
    if load is not None:
        session.load(load)
        session.system = system or session.system
    one_question = read_question(question or [], sys.stdin)
    if one_question is None and (as_json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        raise RequestError(
            'there is no question and no terminal to hold a conversation; try: engine chat "Hello"'
        )
    if not quiet and url is None and settings["model"] is None and is_name_of_model(question or []):
        word = " ".join(question or [])
        typer.echo(f"{word!r} is the question; to chat with that model: engine chat --model {word}", err=True)
    key = api_key or variable("ENGINE_API_KEY")
    with StartupDisplay(quiet=quiet) as display:
        backend: Backend | None = None
        if url:
            refuse_settings(settings, except_for=("model", "seed"))
            backend = HttpBackend(url, api_key=key, model=settings["model"], form=form)
        else:
            merged = merge_options(settings, config_file=config_file, base=BASE_SETTINGS)
            if attach_first and not names_a_model(merged, BASE_SETTINGS):
                silent = quiet or one_question is None
                backend = attach(
                    lambda url: HttpBackend(url, api_key=key, form=form),
                    lambda line: None if silent else print(f"engine: {line}", file=sys.stderr),
                )
            if backend is None:
                backend = _start(merged, display, form)
    try:
        if image:
            check_sight(backend)
        images = [image_of_file(path) for path in image or ()]
        if one_question is not None:
            shows = stats if stats is not None else sys.stderr.isatty() and not (quiet or as_json)
            screen = Screen(sys.stdout, sys.stderr, styles_markdown=markdown)
            return ask_once(
                session,
                backend,
                screen,
                content_of(one_question, images),
                as_json=as_json,
                shows_stats=shows,
                stops_loops=stop_loops,
            )
        screen = Screen(sys.stdout, styles_markdown=markdown)
        conversation = Conversation(
            session, backend, screen, shows_stats=stats is not False and not quiet, stops_loops=stop_loops
        )
        conversation.images = images
        return _converse(conversation, display, quiet=quiet, history=history)
    finally:
        backend.close()


def _converse(chat: Conversation, display: StartupDisplay, *, quiet: bool, history: bool) -> int:
    if not quiet:
        chat.screen.heading(chat.title)
        if about := chat.backend.about():
            chat.screen.note(about)
        started = f"Started: {display.summary()}. " if display.steps else ""
        chat.screen.note(f"{started}/help lists the commands, Ctrl-D leaves.")
    editor = LineEditor(default_history_path() if history else None, colors=wants_color(sys.stdout))
    return run_repl(chat, editor)


def _start(merged: MergedConfig, display: StartupDisplay, form: Mapping[str, Any]) -> Backend:
    with ends_at_interrupt():
        return InProcessBackend(merged, display, form)


def run_repl(chat: Conversation, editor: LineEditor) -> int:
    """Talk until the user leaves.

    Ctrl-C stops an answer and nothing else; at the prompt, twice in a row, it leaves. So do Ctrl-D and `/exit`.

    Returns:
        The exit code.
    """
    interrupted = False
    while True:
        try:
            default, chat.pending = chat.pending or "", None
            line = editor.read(default)
        except EOFError:
            return ExitCode.SUCCESS
        except KeyboardInterrupt:
            if interrupted:
                return ExitCode.INTERRUPTED
            interrupted = True
            chat.screen.note("Ctrl-C again leaves; so does Ctrl-D.")
            continue
        interrupted = False
        if not line:
            continue
        try:
            with editor.held():
                _run_line(chat, line)
        except LeaveChat:
            return ExitCode.SUCCESS
        except KeyboardInterrupt:  # between two answers, while a server is asked for a token count
            chat.screen.note("[stopped]")


def _run_line(chat: Conversation, line: str) -> None:
    """Run a command, or ask a question; the images whose paths a line has go with it, or with the next one.

    Raises:
        LeaveChat: the user wants to leave.
    """
    paths, rest = pasted_images(line)
    if is_command(rest):  # the path is its argument
        run_command(chat, line)
        return
    try:
        for path in paths:
            chat.attach_image(path)
    except RequestError as error:
        chat.screen.error(str(error))
        return
    if rest:
        chat.ask(message_of(rest))


def read_question(words: list[str], stdin: TextIO) -> str | None:
    """The question from the command line, followed by the piped input; None if there is neither.

    Standard input is read only if it is a pipe or a file: a program that runs this command may
    pass on a terminal, a socket or nothing.

    Raises:
        ConfigError: the input is not UTF-8.
        RequestError: it is empty.
    """
    question = " ".join(words).strip()
    piped = ""
    try:
        mode = os.fstat(stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or no real file
        mode = 0
    if stat.S_ISFIFO(mode) or stat.S_ISREG(mode):
        # The bytes, because a text stream decodes them as the locale demands.
        text = decode_utf8(stdin.buffer.read(), "standard input")
        piped = text.replace("\r\n", "\n").replace("\r", "\n").strip()
        if not (question or piped):
            raise RequestError("there is no question: standard input is empty")
    return "\n\n".join(part for part in (question, piped) if part) or None


def is_name_of_model(words: list[str]) -> bool:
    """Whether the question is one word that names a model, as `ollama run NAME` has it. Looks at nothing but names."""
    from ...models.hub.built_in.models import find_built_in
    from ...models.source import hub_name_of

    if len(words) != 1:
        return False
    word = words[0]
    if find_built_in(word) or word.endswith(".gguf") or os.path.isfile(os.path.join(word, "config.json")):
        return True
    try:
        return hub_name_of(word) is not None
    except ConfigError:
        return False
