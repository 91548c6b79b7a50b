"""The commands of the chat, `/help` to `/exit`: a table and one function for each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple

from ...runtime.errors import RequestError
from ...runtime.text import counted
from .conversation import Conversation
from .session import text_and_images
from .settings import DEFAULTS, PARAMETERS


class LeaveChat(Exception):
    """`/exit`."""


class SlashCommand(NamedTuple):
    """One command: its name without the slash, its arguments and its line in `/help`, the function that receives the
    text after the name, and completions of the first argument (`PATH`: file names).
    """

    name: str
    arguments: str
    help: str
    run: Callable[[Conversation, str], None]
    words: tuple[str, ...] = ()


PATH: Final = ("PATH",)
MAX_FILE_BYTES: Final = 1_000_000
"""Limit for a text file that goes with a question."""
_ON_OFF: Final = ("on", "off")


def is_command(line: str) -> bool:
    """Whether a line is a command; `//` at its start is an escaped slash of a message."""
    return line.startswith("/") and not line.startswith("//")


def message_of(line: str) -> str:
    """The message text of a line that is not a command."""
    return line[1:] if line.startswith("//") else line


def find_command(name: str) -> SlashCommand:
    """The command with this name, or the only one that begins with it.

    Raises:
        RequestError: none or several match; the message lists candidates.
    """
    name = _ALIASES.get(name, name)
    if name in COMMANDS:
        return COMMANDS[name]
    matches = [known for known in COMMANDS if name and known.startswith(name)]
    if len(matches) == 1:
        return COMMANDS[matches[0]]
    if matches:
        raise RequestError(f"/{name} could be {', '.join('/' + match for match in matches)}")
    near = difflib.get_close_matches(name, [*COMMANDS, *_ALIASES], n=1)
    hint = f"did you mean /{near[0]}?" if near else "/help lists them"
    raise RequestError(f"there is no command /{name}; {hint} (a message that begins with a slash: //{name})")


def run_command(chat: Conversation, line: str) -> None:
    """Run a command line; mistakes are shown.

    Raises:
        LeaveChat: the user wants to leave.
    """
    name, _, argument = line[1:].partition(" ")
    try:
        find_command(name).run(chat, argument.strip())
    except RequestError as error:
        chat.screen.error(str(error))


def _help(chat: Conversation, argument: str) -> None:
    if argument:
        command = find_command(argument.removeprefix("/"))
        chat.screen.line(f"/{command.name} {command.arguments}".rstrip() + f": {command.help}")
        return
    for command in COMMANDS.values():
        chat.screen.line(f"  {f'/{command.name} {command.arguments}':<22}{command.help}")
    chat.screen.note("Names may be shortened. Ctrl-C stops an answer; Ctrl-D leaves.")
    chat.screen.note('Several lines: """ around them, \\ at the end of a line, Alt-Enter, or a paste.')


def _set(chat: Conversation, argument: str) -> None:
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    if not name:
        _show(chat, "")
        return
    name = name.replace("-", "_")
    show: Callable[[str], None] = chat.screen.line
    if name not in PARAMETERS or value.strip():
        chat.session.settings = chat.session.settings.changed(name, value.strip())
        show = chat.screen.note
    show(f"{name} = {_value(getattr(chat.session.settings, name))}")


def _show(chat: Conversation, _argument: str) -> None:
    chat.screen.line(f"  {'model':<20}{chat.backend.model} {chat.backend.where}")
    chat.screen.line(f"  {'system':<20}{chat.session.system or '-'}")
    for name in PARAMETERS:
        value = getattr(chat.session.settings, name)
        mark = "" if value == getattr(DEFAULTS, name) else "  (set)"
        chat.screen.line(f"  {name:<20}{_value(value)}{mark}")


def _system(chat: Conversation, argument: str) -> None:
    if not argument:
        chat.screen.line(chat.session.system or "There is no system prompt; /system TEXT sets one.")
        return
    chat.session.system = None if argument.lower() == "none" else argument
    chat.screen.note("The system prompt holds from the next answer on.")


def _clear(chat: Conversation, _argument: str) -> None:
    chat.session.clear()
    chat.attached.clear()
    chat.images.clear()
    chat.screen.note("Forgot the conversation; system prompt and settings stay.")


def _regen(chat: Conversation, _argument: str) -> None:
    chat.ask(_take_back(chat))


def _undo(chat: Conversation, _argument: str) -> None:
    question = " ".join(_take_back(chat).split())
    chat.images.clear()
    chat.screen.note(f"Forgot: {question if len(question) <= 60 else f'{question[:57]}...'}")


def _edit(chat: Conversation, _argument: str) -> None:
    chat.pending = _take_back(chat)


def _drop(chat: Conversation, argument: str) -> None:
    count = argument or "1"
    if not count.isdecimal() or int(count) < 1:
        raise RequestError(f"{count!r} is no count; give a number from 1")
    dropped = chat.session.drop_oldest(int(count))
    chat.screen.note(
        f"Forgot the {dropped} oldest of {counted(dropped + chat.session.num_exchanges, 'exchange')}."
    )


def _save(chat: Conversation, argument: str) -> None:
    path = _new_path(chat.own_files, argument, "/save")
    chat.session.save(path, chat.backend.model)
    chat.own_files.add(path.resolve())
    chat.screen.note(f"Saved {_exchanges(chat)} to {path}.")


def _export(chat: Conversation, argument: str) -> None:
    path = _new_path((), argument, "/export")
    chat.session.export(path, chat.backend.model)
    chat.screen.note(f"Wrote {_exchanges(chat)} to {path}, as Markdown.")


def _file(chat: Conversation, argument: str) -> None:
    name, question = _first_word(argument)
    path = _path(name, "/file FILE [QUESTION]")
    text = _text_of(path)
    chat.attached.append(f"{path.name}:\n```\n{text.rstrip()}\n```")
    if question:
        chat.ask(question)
    else:
        chat.screen.note(f"{path.name}, {len(text):,} characters, goes with the next question.")


def _image(chat: Conversation, argument: str) -> None:
    name, question = _first_word(argument)
    chat.attach_image(_path(name, "/image FILE [QUESTION]"))
    if question:
        chat.ask(question)


def _markdown(chat: Conversation, argument: str) -> None:
    chat.screen.styles_markdown = _is_on(argument, "/markdown")
    chat.screen.note(f"Markdown is styled: {argument}.")


def _load(chat: Conversation, argument: str) -> None:
    path = _path(argument, "/load FILE")
    chat.session.load(path)
    chat.own_files.add(path.resolve())
    chat.screen.note(f"Loaded {_exchanges(chat)} from {path}.")


def _stats(chat: Conversation, argument: str) -> None:
    if argument:
        chat.shows_stats = _is_on(argument, "/stats")
        chat.screen.note(f"A footer follows each answer: {argument}.")
        return
    if chat.last is not None:
        chat.screen.line(f"  last answer  {chat.last.footer(chat.backend.max_context) or 'nothing came'}")
    chat.screen.line(
        f"  this chat    {counted(chat.num_answers, 'answer')}, {counted(chat.num_tokens, 'token')}"
    )


def _tokens(chat: Conversation, _argument: str) -> None:
    used, limit = chat.used_tokens(), chat.backend.max_context
    if used is None:
        raise RequestError("this server cannot count tokens; the footer of an answer has its numbers")
    share = counted(used, "token") if limit is None else f"{used} of {limit} tokens ({used / limit:.0%})"
    chat.screen.line(f"The conversation has {share}.")


def _model(chat: Conversation, _argument: str) -> None:
    chat.screen.line(chat.title)


def _exit(_chat: Conversation, _argument: str) -> None:
    raise LeaveChat


def _take_back(chat: Conversation) -> str:
    """The text of the last question; its images go with the next one."""
    question = chat.session.take_back()
    if question is None:
        raise RequestError("there is no question yet")
    text, chat.images = text_and_images(question)
    return text


def _is_on(argument: str, command: str) -> bool:
    if argument not in _ON_OFF:
        raise RequestError(f"{command} takes on or off, not {argument!r}")
    return argument == "on"


def _path(text: str, usage: str) -> Path:
    if not text:
        raise RequestError(f"which file? {usage}")
    return Path(text).expanduser()


def _new_path(own_files: Collection[Path], argument: str, command: str) -> Path:
    """A path to write to: new, one of the chat's own files, or any after `-f`."""
    forced = argument.startswith("-f ")
    path = _path(argument.removeprefix("-f ").strip(), f"{command} FILE")
    if path.exists() and not forced and path.resolve() not in own_files:
        raise RequestError(f"{path} exists already; `{command} -f {path}` replaces it")
    return path


def _first_word(text: str) -> tuple[str, str]:
    """A file name, in quotes if it has spaces, and the rest."""
    if text[:1] in ("'", '"'):
        name, closing, rest = text[1:].partition(text[0])
        if closing:
            return name, rest.strip()
    name, _, rest = text.partition(" ")
    return name, rest.strip()


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RequestError(
                f"{path} has {path.stat().st_size:,} bytes; /file takes {MAX_FILE_BYTES:,} at most"
            )
        return path.read_bytes().decode()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _exchanges(chat: Conversation) -> str:
    return counted(chat.session.num_exchanges, "exchange")


def _value(value: object) -> str:
    if value is None:
        return "default"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return str(value)


_TABLE: Final = (
    SlashCommand("help", "[COMMAND]", "this list", _help),
    SlashCommand(
        "set", "[NAME [VALUE]]", "a sampling parameter: /set temperature 0.2", _set, tuple(PARAMETERS)
    ),
    SlashCommand("show", "", "model, system prompt and sampling parameters", _show),
    SlashCommand("system", "[TEXT|none]", "the system prompt", _system),
    SlashCommand("clear", "", "forget the conversation", _clear),
    SlashCommand("regen", "", "answer the last question again", _regen),
    SlashCommand("undo", "", "forget the last question and its answer", _undo),
    SlashCommand("edit", "", "take the last question back onto the input line", _edit),
    SlashCommand("drop", "[COUNT]", "forget the oldest exchanges, to free context", _drop),
    SlashCommand("file", "FILE [QUESTION]", "send a text file along with a question", _file, PATH),
    SlashCommand("image", "FILE [QUESTION]", "send an image along with a question", _image, PATH),
    SlashCommand("save", "[-f] FILE", "write the conversation to a JSON file", _save, PATH),
    SlashCommand("export", "[-f] FILE", "write the conversation as Markdown", _export, PATH),
    SlashCommand("load", "FILE", "go on with a saved conversation", _load, PATH),
    SlashCommand("markdown", "on|off", "style Markdown in answers", _markdown, _ON_OFF),
    SlashCommand("stats", "[on|off]", "figures of this chat; the footer on or off", _stats, _ON_OFF),
    SlashCommand("tokens", "", "how full the context is", _tokens),
    SlashCommand("model", "", "which model answers, and where", _model),
    SlashCommand("exit", "", "leave", _exit),
)
COMMANDS: Final = {command.name: command for command in _TABLE}
"""Every command by name, in the order of `/help`."""
_ALIASES: Final = {"quit": "exit", "bye": "exit", "q": "exit", "ex": "exit", "?": "help"}
