"""The black box: files in the engine's private directory that explain a crash of one of its processes.

    fatal_<process>      the stacks of its threads at a fatal signal (SIGSEGV, SIGABRT, ...)
    stacks_<process>     the same when the engine ended because of a failure, for the processes that were alive
    decisions_0, _1      the scheduler's last decisions; see `scheduler.flight_recorder`

The files are written during normal operation or by a signal handler, because a killed process cannot write anything.
They are removed with the directory; `crash_report` reads them before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from pathlib import Path
from typing import Final

DECISION_NAMES: Final = ("decisions_0", "decisions_1")
SHOW_STACKS: Final = signal.SIGUSR1
"""A child that receives it writes the stacks of its threads and continues."""
MAX_STACKS_BYTES: Final = 256 << 10
_STACKS_NAME: Final = re.compile(r"(?:fatal|stacks)_\w{1,64}")


def is_black_box(name: str) -> bool:
    """Whether a file of the private directory belongs to the black box."""
    return name in DECISION_NAMES or _STACKS_NAME.fullmatch(name) is not None


def keep_stacks(folder: Path, label: str) -> None:
    """Write the stacks of this process to the black box on a fatal signal and on `SHOW_STACKS`.

    If the files cannot be created, the stacks of a fatal signal go to standard error.
    """
    with contextlib.suppress(OSError):  # the descriptors stay open as long as the process lives
        faulthandler.enable(_create(folder / f"fatal_{label}"))
        faulthandler.register(SHOW_STACKS, _create(folder / f"stacks_{label}"), all_threads=True, chain=False)


def read_fatal_stacks(folder: Path, label: str) -> str:
    """The stacks that the process wrote on a fatal signal; "" if there was none."""
    return _read(folder / f"fatal_{label}")


def read_stacks(folder: Path, label: str) -> str:
    """The stacks that the process wrote on `SHOW_STACKS`; "" if there are none."""
    return _read(folder / f"stacks_{label}")


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(MAX_STACKS_BYTES).decode(errors="replace")
    return ""
