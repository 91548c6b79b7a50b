"""`LineEditor`: reads user input with history, completion and several lines. Only module with prompt_toolkit."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output

from ...runtime.text import replace_surrogates
from .slash_commands import COMMANDS, PATH, is_command

QUOTES: Final = '"""'
_PROMPT: Final = ">>> "
_CONTINUATION: Final = "... "
_ESCAPE: Final = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.|.)?")
"""An arrow or another key that sends a sequence."""


class LineEditor:
    """Reads one message at a time from the terminal."""

    def __init__(
        self,
        history_path: Path | None,
        *,
        colors: bool = True,
        terminal_input: Input | None = None,
        terminal_output: Output | None = None,
        held_terminal: TextIO | None = None,
    ) -> None:
        """Set up the terminal's line.

        Args:
            history_path: where lines are remembered; None: only in memory.
            colors: whether to write escape sequences for colors.
            terminal_input, terminal_output: other than this process's terminal.
            held_terminal: where keys are typed during an answer, with another `terminal_input`.
        """
        self._terminal = sys.stdin if terminal_input is None else held_terminal
        self._typed = ""
        self._session: PromptSession[str] = PromptSession(
            message=_PROMPT,
            multiline=True,
            prompt_continuation=_CONTINUATION,
            history=_history(history_path),
            completer=SlashCompleter(),
            complete_while_typing=False,
            enable_open_in_editor=True,  # Ctrl-X Ctrl-E
            editing_mode=EditingMode.EMACS,
            key_bindings=_key_bindings(),
            color_depth=None if colors else ColorDepth.DEPTH_1_BIT,
            input=terminal_input,
            output=terminal_output,
        )

    def read(self, default: str = "") -> str:
        """The next message, unwrapped; bytes that are not UTF-8 are replaced, as the terminal shows them.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C.
        """
        typed, self._typed = self._typed, ""
        text = "\n".join(part for part in (default, typed) if part)
        return unwrap(replace_surrogates(self._session.prompt(default=text)))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keys that are typed inside, while an answer is written, are not echoed: they begin the next message."""
        if self._terminal is None or not self._terminal.isatty():
            yield
            return
        terminal = self._terminal.fileno()
        before = termios.tcgetattr(terminal)
        silent = [*before]
        silent[3] &= ~(termios.ECHO | termios.ICANON)  # Ctrl-C still interrupts
        termios.tcsetattr(terminal, termios.TCSANOW, silent)
        try:
            yield
        finally:
            keys = b""
            try:
                while select.select([terminal], [], [], 0)[0] and (more := os.read(terminal, 4096)):
                    keys += more
            finally:  # another Ctrl-C
                termios.tcsetattr(terminal, termios.TCSANOW, before)
            self._typed = typed_text(keys)


class UnicodeHistory(FileHistory):
    """A history file for lines that may have bytes that are not UTF-8, which arrive as lone surrogates."""

    def store_string(self, string: str) -> None:
        super().store_string(replace_surrogates(string))


class SlashCompleter(Completer):
    """Completes commands, and the arguments of some of them."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        if not is_command(line) or "\n" in line:
            return
        name, space, argument = line[1:].partition(" ")
        if not space:
            for command in COMMANDS.values():
                if command.name.startswith(name):
                    yield Completion(f"/{command.name}", -len(line), display_meta=command.help)
            return
        words = COMMANDS[name].words if name in COMMANDS else ()
        if words == PATH:
            rest = Document(argument, len(argument))
            yield from self._paths.get_completions(rest, complete_event)
            return
        for word in words:
            if word.startswith(argument):
                yield Completion(word, -len(argument))


def is_complete(text: str) -> bool:
    """Whether Enter sends this text: no quotes are open and the last line does not end with a backslash."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        return len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES)
    return not text.endswith("\\")


def unwrap(text: str) -> str:
    """The message without its continuation marks; quoted text is never a command."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES):
        quoted = stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
        return f"/{quoted}" if quoted.startswith("/") else quoted
    return text.replace("\\\n", "\n").strip()


def typed_text(keys: bytes) -> str:
    """The text of key presses: Backspace removes a character, other keys without a character have no effect."""
    text = ""
    for char in _ESCAPE.sub("", keys.decode(errors="replace")).replace("\r", "\n"):
        if char in "\x08\x7f":
            text = text[:-1]
        elif char.isprintable() or char in "\n\t":
            text += char
    return text.rstrip("\n")


def default_history_path() -> Path | None:
    """$XDG_STATE_HOME/engine/chat_history or ~/.local/state/engine/chat_history; None without a home folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return folder / "engine" / "chat_history"


def _history(path: Path | None) -> History:
    """The file's history; in memory if the file cannot be written, for example in a read-only home."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))  # questions are private
    except OSError:
        return InMemoryHistory()
    return UnicodeHistory(str(path))


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
