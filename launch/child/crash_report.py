"""`CrashReports`: a file about a failure that ended the server or one of its processes; made from the black box.

It has the cause, the settings (no secrets), the end of each process with its traceback or stacks, and the scheduler's
last decisions; no prompts and no answers. The supervisor writes it when the processes have been asked to end and their
private directory still exists; the last line that the command prints has its path.

The black box are files in the engine's private directory that explain a crash of one of its processes:

    fatal_<process>      the stacks of its threads at a fatal signal (SIGSEGV, SIGABRT, ...)
    stacks_<process>     the same when the engine ended because of a failure, for the processes that were alive
    decisions_0, _1      the scheduler's last decisions; see `scheduler/journal/flight_recorder.py`

They are written during normal operation or by a signal handler, because a killed process cannot write anything. They
are removed with the directory; a report reads them before.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from ...runtime.config.config_fields import SECRETS, config_fields
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.installation import __version__, cache_dir

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
        faulthandler.enable(_open_for_stacks(folder / f"fatal_{label}"))
        faulthandler.register(
            SHOW_STACKS, _open_for_stacks(folder / f"stacks_{label}"), all_threads=True, chain=False
        )


def read_fatal_stacks(folder: Path, label: str) -> str:
    """The stacks that the process wrote on a fatal signal; "" if there was none."""
    return _read_stacks(folder / f"fatal_{label}")


def read_stacks(folder: Path, label: str) -> str:
    """The stacks that the process wrote on `SHOW_STACKS`; "" if there are none."""
    return _read_stacks(folder / f"stacks_{label}")


def _open_for_stacks(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _read_stacks(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(MAX_STACKS_BYTES).decode(errors="replace")
    return ""


logger = logging.getLogger(__name__)

KEPT_REPORTS: Final = 20
_PREFIX: Final = "crash-"
_RULE: Final = "-" * 100


class Crashed(Protocol):
    """One process of the engine; `ChildProcess` implements it."""

    label: str
    traceback: str

    @property
    def pid(self) -> int: ...

    @property
    def exit_code(self) -> int | None: ...

    def describe_end(self) -> str: ...


class CrashReports:
    """Writes reports into one folder, which keeps the newest `KEPT_REPORTS`."""

    def __init__(
        self,
        config: EngineConfig,
        decision_lines: Callable[[Path], Sequence[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Nothing is written yet.

        Args:
            config: of the engine; `log.crash_dir` is the folder.
            decision_lines: the scheduler's last decisions, from the engine's private directory.
            clock: seconds since 1970.
        """
        self._config = config
        self._decision_lines = decision_lines
        self._clock = clock

    def note(
        self, cause: str, children: Sequence[Crashed], folder: Path, what: str = "ended by a failure"
    ) -> str:
        """Write a report; returns the suffix for the last line: `; report: PATH`. A failure to write it is only logged.

        Args:
            cause: why the engine ends.
            children: its processes, in the order of their start.
            folder: its private directory, with the files of the black box.
            what: the consequence for the engine.
        """
        try:
            return f"; report: {self._write(cause, children, folder, what)}"
        except (OSError, ConfigError) as error:
            logger.warning("no crash report: %s; see --crash-dir", error)
            return ""

    def _write(self, cause: str, children: Sequence[Crashed], folder: Path, what: str) -> Path:
        reports = crash_dir(self._config.log.crash_dir)
        reports.mkdir(mode=0o700, parents=True, exist_ok=True)
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._clock()))
        text = "\n".join(self._lines(cause, children, folder, what))
        path, fd = _create(reports / f"{_PREFIX}{when}-{os.getpid()}")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")
        _remove_old(reports)
        return path

    def _lines(self, cause: str, children: Sequence[Crashed], folder: Path, what: str) -> Iterator[str]:
        yield f"engine {__version__} {what}"
        yield f"cause: {cause}"
        yield f"time: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self._clock()))}"
        yield f"python: {platform.python_version()} ({sys.executable}); {platform.platform()}"
        for child in children:
            yield from ("", _RULE, f"{child.label} (pid {child.pid}): {_end_of(child)}")
            if child.traceback:
                yield from ("", child.traceback.rstrip())
            if stacks := read_fatal_stacks(folder, child.label):
                yield from ("", stacks.rstrip())
            elif stacks := read_stacks(folder, child.label):
                yield from ("", "where it was when the engine gave up:", stacks.rstrip())
        yield from ("", _RULE, "last decisions of the scheduler, the newest last:", "")
        yield from self._decisions(folder)
        yield from ("", _RULE, "settings that are not the default:", "")
        for field in config_fields().values():
            value = getattr(getattr(self._config, field.group), field.name)
            if value != field.default:
                yield f"{field.name}: {'(hidden)' if field.name in SECRETS else value}"

    def _decisions(self, folder: Path) -> Sequence[str]:
        try:
            return self._decision_lines(folder) or ["none"]
        except Exception as error:  # a reader that fails must not prevent the rest of the report
            return [f"cannot be read: {type(error).__name__}: {error}"]


def crash_dir(setting: str | None) -> Path:
    """The folder of the reports.

    Raises:
        ConfigError: there is no home folder for it.
    """
    return cache_dir() / "crashes" if setting is None else Path(setting).expanduser().absolute()


def _end_of(child: Crashed) -> str:
    code = child.exit_code
    if code is None:
        return "did not end when it was told to"
    return "ended when it was told to" if code == 0 else child.describe_end()


def _create(stem: Path) -> tuple[Path, int]:
    """A new file, open for writing: two reports within one second are two files."""
    for count in itertools.count(1):
        path = stem.with_name(f"{stem.name}{f'-{count}' if count > 1 else ''}.txt")
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    raise AssertionError("there is always a next number")


def _remove_old(folder: Path) -> None:
    for path in sorted(folder.glob(f"{_PREFIX}*.txt"), key=lambda path: path.name)[:-KEPT_REPORTS]:
        with contextlib.suppress(OSError):
            path.unlink()
