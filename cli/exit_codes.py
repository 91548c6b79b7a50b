"""`ExitCode`: the exit codes of all commands. docs/cli.md has this table."""

from __future__ import annotations

import enum
from typing import Final


class ExitCode(enum.IntEnum):
    """Exit codes of all commands, for scripts."""

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
    "`engine replay` differs, a request of `engine bench` failed",
    ExitCode.USER: "something to correct: wrong usage, a setting, a missing or damaged file, an unknown model, a "
    "request that is refused, a wrong key",
    ExitCode.SERVER: "no server answers, or the server failed",
    ExitCode.NOT_FOUND: "what was asked for is not there: the request of `engine why`, a damaged part of the log of "
    "`engine replay`",
    ExitCode.INTERRUPTED: "ended by Ctrl-C; `engine serve`: 128 + the number of a signal that ended it at once",
    ExitCode.OUTPUT_CLOSED: "the reader of standard output closed it, such as `head`",
}
