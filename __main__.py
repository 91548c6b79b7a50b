"""`main`: the command `engine`, and `python -m engine`; Ctrl-C ends it in silence from its first import on."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code; see `cli/exit_codes.py`, which is not loaded yet."""


def main() -> None:
    """Run the command line and exit."""
    handles = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # it may be ignored, as under nohup
    if handles:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(INTERRUPTED))
    from .cli.main import main as run

    if handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
