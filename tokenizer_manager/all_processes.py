"""`AllProcesses`: orders of the operator to all processes of the engine: the log level, and profiles.

Orders go through the supervisor (`Child.order_all`), so that processes that start later follow them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from ..launch.child.control import ForAll, Role, SetLogLevel, StartProfile, StopProfile, process_label
from ..launch.child.crash_report import crash_dir
from ..launch.child.stack_sampler import SUFFIX
from ..runtime.config.engine_config import EngineConfig
from ..runtime.config.server_config import LogLevel
from ..runtime.errors import ConfigError, EngineDeadError, RequestError

DEFAULT_RATE_HZ: Final = 100.0
DEFAULT_DURATION_S: Final = 60.0
KEPT_PROFILES: Final = 20
_PREFIX: Final = "profile-"
_WRITTEN_S: Final = 10.0  # for all processes to write a profile, also in the middle of a step
_POLL_S: Final = 0.02


class Profile(NamedTuple):
    """A running or finished profile.

    Attributes:
        folder: of its files.
        files: names of the files that exist.
        missing: processes that have not written a file.
    """

    folder: Path
    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class AllProcesses:
    """Used by the event loop of the tokenizer manager."""

    def __init__(
        self,
        send: Callable[[ForAll], bool],
        config: EngineConfig,
        running: StartProfile | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Send no order yet.

        Args:
            send: sends an order to the supervisor; False if the supervisor does not listen.
            config: has the current log level, and the folder of the reports.
            running: a profile that the tokenizer manager before this one started.
            clock: CLOCK_MONOTONIC.
            wall_clock: Unix time.
        """
        self._send = send
        self._log_level: LogLevel = config.log.log_level
        self._crash_dir = config.log.crash_dir
        ranks = config.parallel.local_ranks[1:]  # the first is in the scheduler's process
        self._labels = [process_label(Role.TOKENIZER_MANAGER)]
        for replica in range(config.parallel.dp) if config.parallel.dp > 1 else (None,):
            self._labels += [
                process_label(Role.SCHEDULER, replica=replica),
                process_label(Role.DETOKENIZER, replica=replica),
                *(process_label(Role.MODEL_RUNNER, rank, replica) for rank in ranks),
            ]
        self._clock = clock
        self._wall_clock = wall_clock
        self._numbers = itertools.count(1)  # never one of a removed folder: the names' order is their age
        self._running = running
        self._end_s = clock() + (running.duration_s if running is not None else 0.0)

    @property
    def log_level(self) -> LogLevel:
        """The lowest severity that is logged."""
        return self._log_level

    def set_log_level(self, level: LogLevel) -> None:
        """Set the lowest severity that is logged. A process in the middle of a step follows after it.

        Raises:
            EngineDeadError: the supervisor does not listen.
        """
        self._order(SetLogLevel(level))
        self._log_level = level

    def start_profile(
        self, *, rate_hz: float = DEFAULT_RATE_HZ, duration_s: float = DEFAULT_DURATION_S
    ) -> Profile:
        """Start a profile, which ends by itself.

        Args:
            rate_hz: stack samples per second; verified.
            duration_s: verified.

        Raises:
            RequestError: 409, a profile is running; 503, the folder cannot be made.
            EngineDeadError: the supervisor does not listen.
        """
        if self._running is not None and (left_s := self._end_s - self._clock()) > 0:
            raise RequestError(
                f"a profile is being made already, for {left_s:.0f} s more; POST /stop_profile ends it",
                code="profile_running",
                status=409,
            )
        folder = self._make_folder()
        order = StartProfile(folder.name, rate_hz, duration_s)
        self._order(order)
        self._running = order
        self._end_s = self._clock() + duration_s
        return Profile(folder)

    async def stop_profile(self) -> Profile:
        """End the profile, and wait until the processes of this machine have written their files.

        Raises:
            RequestError: 409, no profile is running.
            EngineDeadError: the supervisor does not listen.
        """
        running = self._running
        if running is None or self._clock() >= self._end_s:
            last = "" if running is None else f"; the last one is in {self._folder / running.folder}"
            raise RequestError(
                f"no profile is being made{last}; POST /start_profile begins one",
                code="no_profile",
                status=409,
            )
        self._order(StopProfile())
        self._end_s = self._clock()
        folder = self._folder / running.folder
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WRITTEN_S):
                while self._missing(_files_in(folder)):
                    await asyncio.sleep(_POLL_S)
        files = _files_in(folder)
        return Profile(folder, files, self._missing(files))

    @property
    def _folder(self) -> Path:
        return crash_dir(self._crash_dir)

    def _order(self, order: ForAll) -> None:
        if not self._send(order):
            raise EngineDeadError("the supervisor does not take orders: it is stopped, or hangs")

    def _make_folder(self) -> Path:
        """Make the folder of a profile, and remove the oldest ones."""
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._wall_clock()))
        try:
            parent = self._folder
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_old(parent)
            for number in self._numbers:
                folder = parent / f"{_PREFIX}{when}-{os.getpid()}-{number:03}"
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                    return folder
        except (OSError, ConfigError) as error:
            raise RequestError(
                f"there is no place for the files: {error}; see --crash-dir",
                code="no_profile_folder",
                status=503,
            ) from None
        raise AssertionError("there is always a next number")

    def _missing(self, files: Iterable[str]) -> tuple[str, ...]:
        """The processes without a file: `scheduler.folded`, after a restart `scheduler-1.folded`."""
        written = {name.removesuffix(SUFFIX).partition("-")[0] for name in files}
        return tuple(label for label in self._labels if label not in written)


def _files_in(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX)))
    except OSError:
        return ()


def _remove_old(parent: Path) -> None:
    """Remove the oldest profiles, so that one more fits. Foreign files stay, and so does their folder."""
    old = sorted(path for path in parent.glob(f"{_PREFIX}*") if path.is_dir() and not path.is_symlink())
    for folder in old[: max(0, len(old) + 1 - KEPT_PROFILES)]:
        with contextlib.suppress(OSError):
            for name in _files_in(folder):
                (folder / name).unlink()
            folder.rmdir()
