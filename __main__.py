"""`main`: the command `engine`, and `python -m engine`; Ctrl-C ends it in silence from its first import on."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .supervisor.standby import Standby

INTERRUPTED = 130
"""Exit code; see `cli/exit_codes.py`, which is not loaded yet."""


def main() -> None:
    """Run the command line and exit."""
    handles = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # it may be ignored, as under nohup
    if handles:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(INTERRUPTED))
    with _scheduler_ahead() as standby:
        from .cli.main import main as run

        if handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run(standby=standby)


def _scheduler_ahead() -> AbstractContextManager[Standby | None]:
    """For `engine serve`, a scheduler that imports torch while the command line is read; else nothing."""
    if sys.argv[1:2] != ["serve"] or not {"--help", "--print-config"}.isdisjoint(sys.argv):
        return nullcontext()
    from .supervisor.standby import Standby

    standby = Standby()
    standby.start()
    return standby


if __name__ == "__main__":
    main()
