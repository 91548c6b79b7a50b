"""Ends of a command: `ExitCode`, the code of each error, and `ends_at_interrupt` for steps that Python cannot stop."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

from ..runtime.errors import ConfigError, EngineError, RequestError, ServerError


class ExitCode(enum.IntEnum):
    """Exit codes of all commands, for scripts. docs/cli.md has this table."""

    SUCCESS = 0
    FAILED = 1
    USER = 2
    SERVER = 3
    NOT_FOUND = 4
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


MEANINGS: Final = {
    ExitCode.SUCCESS: "success; also a server that was stopped by SIGINT, SIGTERM or SIGHUP",
    ExitCode.FAILED: "the engine failed, or the result is negative: a check of `engine doctor` fails, a decision of "
    "`engine replay` differs, a request of `engine bench` or a line of `engine batch` failed, `engine state check` "
    "finds a fault",
    ExitCode.USER: "something to correct: wrong usage, a setting, a missing or damaged file, an unknown model, a "
    "request that is refused, a wrong key, a disk without space",
    ExitCode.SERVER: "no server answers, it is busy (429, 503) for longer than the command waits, or it failed",
    ExitCode.NOT_FOUND: "what was asked for is not there: the request of `engine why`, a damaged part of the log of "
    "`engine replay`",
    ExitCode.INTERRUPTED: "ended by Ctrl-C; `engine serve`: 128 + the number of a signal that ended it at once",
    ExitCode.OUTPUT_CLOSED: "the reader of standard output closed it, such as `head`",
}


def exit_code_of(error: EngineError) -> ExitCode:
    """The code of an error that the engine raised on purpose."""
    if isinstance(error, RequestError) and error.status == HTTPStatus.TOO_MANY_REQUESTS:
        return ExitCode.SERVER
    if isinstance(error, ConfigError | RequestError):
        return ExitCode.USER
    return ExitCode.SERVER if isinstance(error, ServerError) else ExitCode.FAILED


@contextlib.contextmanager
def ends_at_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once inside, where Python waits for native code, as while a model is loaded.

    A thread notices the signal; the interpreter's own handler would run when the main thread is back in Python code.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def watch() -> None:
        while number := os.read(read_end, 1):
            if number[0] == signal.SIGINT:
                with contextlib.suppress(OSError):
                    os.write(
                        2, b"\x1b[?25h\r\x1b[K" if sys.stderr.isatty() else b""
                    )  # a spinner hides the cursor
                os._exit(ExitCode.INTERRUPTED)
        os.close(read_end)

    threading.Thread(target=watch, name="interrupt", daemon=True).start()
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write_end)
