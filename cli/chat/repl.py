"""`run_repl`: read, answer, repeat."""

from __future__ import annotations

from ..exit_codes import ExitCode
from .conversation import Conversation
from .line_editor import LineEditor
from .slash_commands import LeaveChat, is_command, message_of, run_command


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
            if is_command(line):
                run_command(chat, line)
            else:
                chat.ask(message_of(line))
        except LeaveChat:
            return ExitCode.SUCCESS
        except KeyboardInterrupt:  # between two answers, while a server is asked for a token count
            chat.screen.note("[stopped]")
