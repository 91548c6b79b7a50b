"""`Child`: the child's side of the supervision: receives the supervisor's messages and answers them.

Every package that is a process has `process.py` with `main(child: Child) -> None`, and as its `__main__.py`:

    from ..runtime.child import run_child

    run_child(__package__)

Rules for a `main`:

- Call `ready(...)` once, when the process can work. The tokenizer manager first calls `wait_for_peers()`, which
  returns once the other processes can work; then it serves HTTP and calls `ready(url=...)`.
- Call `heartbeat()` in every pass of its loop, also when there is nothing to do (`keep_beating` in asyncio). A process
  that is silent for `watchdog_timeout` counts as hung. Before `ready` there is no watchdog, only `startup_timeout`.
- Follow the supervisor's orders: a plain loop polls `fileno()` together with its sockets (`ipc.Inbox` does) and calls
  `stop_requested()` in every pass; an asyncio process awaits `next_order()`. Then return from `main`.
- Do not handle signals: SIGINT, SIGTERM and SIGHUP are ignored, because a terminal or a service manager sends them to
  all processes at once, and only the supervisor knows the order in which to stop. It forwards them as `Stop`.
- Do not catch errors: `run_child` reports them. A `ConfigError` is for the user to fix, any other error is a bug.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn, assert_never

import setproctitle
from msgspec.structs import replace

from ...runtime.errors import ConfigError, RankLostError
from ...runtime.feasibility import Capacity
from ...runtime.logs import configure_logging, set_log_level, with_log_level
from ...runtime.messages import HEARTBEAT_INTERVAL_S
from .control import (
    MAX_TRACEBACK_CHARS,
    ControlChannel,
    Failed,
    ForAll,
    Heartbeat,
    Order,
    PeerDied,
    PeersLost,
    PeersReady,
    Ready,
    Role,
    SetAdapters,
    SetLogLevel,
    Settings,
    StartProfile,
    Stop,
    StopProfile,
    ToChild,
    child_end,
)
from .crash_report import crash_dir, keep_stacks
from .stack_sampler import SUFFIX, StackSampler

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_PROFILE_WRITTEN_S: Final = 1.0


class StopRequested(Exception):
    """The supervisor stops the child instead of answering, or is gone; `run_child` exits without an error."""


class Child:
    """The child's side of the control channel. Used by one thread, except for the heartbeat thread it starts itself.

    Attributes:
        role: which process this is.
        settings: from the supervisor: role, config, source, spec, endpoints, rank; with the current log level.
        peer_details: the scheduler's facts about itself; empty before `wait_for_peers`.
    """

    def __init__(self, channel: ControlChannel[ToChild]) -> None:
        """Wait for the settings.

        Raises:
            StopRequested: the supervisor stops the child instead, or is gone.
        """
        settings, *others = _wait_for_settings(channel)
        self.role = settings.role
        self.settings = settings
        self._channel = channel
        self.peer_details: dict[str, str] = {}
        self._capacity: Capacity | None = None
        self._stop: Stop | None = None
        self._orders: deque[Order] = deque()
        self._last_heartbeat_s = -HEARTBEAT_INTERVAL_S
        self._sampler: StackSampler | None = None
        if settings.profile is not None:
            self._start_profile(settings.profile)
        self._take(others)

    # ------------------------------------------------------------ to the supervisor

    def ready(self, capacity: Capacity | None = None, url: str | None = None, **details: str) -> None:
        """Tell the supervisor that this process can work; from now on it must send heartbeats.

        Args:
            capacity: from the scheduler.
            url: from the tokenizer manager, the address where it listens.
            details: further information for the user.
        """
        self._channel.send(Ready(capacity=capacity, url=url, details=details))

    def heartbeat(self) -> None:
        """Report that the loop is running. Cheap: sends at most once per `HEARTBEAT_INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s - self._last_heartbeat_s >= HEARTBEAT_INTERVAL_S:
            self._last_heartbeat_s = now_s
            self._channel.send_if_room(Heartbeat())

    def order_all(self, order: ForAll) -> bool:
        """Have the supervisor forward an order to all processes, including this one; False if it does not read."""
        return self._channel.send_if_room(order)

    async def keep_beating(self) -> None:
        """Send heartbeats from the running asyncio loop until cancelled: a blocked loop falls silent."""
        while True:
            self.heartbeat()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def beat_while(self, waiting: Callable[[], bool]) -> None:
        """Send heartbeats from a thread of its own while `waiting()` is true; it is called twice a second.

        A rank that does not answer blocks all others in their collectives. The blocked ranks are healthy and keep
        sending heartbeats, so that the silent rank can be identified.
        """
        threading.Thread(target=self._beat_while, args=(waiting,), name="heartbeat", daemon=True).start()

    def _beat_while(self, waiting: Callable[[], bool]) -> None:
        while not self._channel.closed:
            time.sleep(HEARTBEAT_INTERVAL_S)
            if waiting():
                self._channel.send_if_room(Heartbeat())

    # ------------------------------------------------------------ from the supervisor

    def fileno(self) -> int:
        """Readable when the supervisor has sent a message or is gone; for a poller."""
        return self._channel.fileno()

    def wait_for_peers(self) -> Capacity:
        """Block until scheduler and detokenizer are ready (tokenizer manager only).

        Raises:
            StopRequested: the supervisor stops the child instead, or is gone.
        """
        while self._capacity is None:
            self._channel.wait(None)
            if self.stop_requested():
                raise StopRequested
        return self._capacity

    def stop_requested(self) -> bool:
        """Whether to stop now: the supervisor sent `Stop`, with or without drain, or it is gone. Never blocks."""
        self._read()
        return self._stop is not None

    @property
    def stops_in_order(self) -> bool:
        """Whether the requested stop is that of the engine, after a drain: there is time for what should outlive it."""
        return self._stop is not None and self._stop.drain

    async def next_order(self) -> Order:
        """The supervisor's next order (tokenizer manager), after the `PeersReady` that `wait_for_peers` consumed.

        `Stop(drain=True)` may be followed by `Stop(drain=False)`, when the time is up, and by `PeerDied`: keep
        listening while draining. A supervisor that is gone reads as `Stop(drain=False)`.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._read()
            if self._orders:
                return self._orders.popleft()
            if self._channel.closed:
                return Stop(drain=False)
            readable = asyncio.Event()
            loop.add_reader(self.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self.fileno())

    def _read(self) -> None:
        self._take(self._channel.receive())
        if self._channel.closed and self._stop is None:
            self._stop = Stop(drain=False)

    def _take(self, messages: Sequence[ToChild]) -> None:
        for message in messages:
            match message:
                case PeersReady(capacity=capacity, details=details) if self._capacity is None:
                    self._capacity = capacity
                    self.peer_details = details
                case PeersReady() | PeersLost() | PeerDied():
                    self._orders.append(message)
                case Stop():
                    self._stop = message
                    self._orders.append(message)
                case SetLogLevel(level=level):
                    self.settings = replace(self.settings, config=with_log_level(self.settings.config, level))
                    set_log_level(level)
                case StartProfile():
                    self._start_profile(message)
                case StopProfile():
                    self._stop_profile()
                case SetAdapters(adapters=adapters):
                    self.settings = replace(self.settings, adapters=adapters)
                case Settings():
                    raise ValueError("the supervisor sent a second Settings")
                case _:
                    assert_never(message)

    # ------------------------------------------------------------ profiles

    def _start_profile(self, order: StartProfile) -> None:
        self._stop_profile()
        label = self.settings.label
        name = f"{label}-{self.settings.life}" if self.settings.life else label
        try:
            folder = crash_dir(self.settings.config.log.crash_dir) / order.folder
        except ConfigError as error:  # of this machine; the profile was requested on another one
            logger.warning("no profile: %s", error)
            return
        self._sampler = StackSampler(
            folder / f"{name}{SUFFIX}", label, rate_hz=order.rate_hz, duration_s=order.duration_s
        )

    def _stop_profile(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def end_profile(self) -> None:
        """Before the process ends: wait briefly until a running profile is written."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler.wait(_PROFILE_WRITTEN_S)


def run_child(room: str) -> NoReturn:
    """Run a child process: set it up, run `main` of `<room>.process`, report how it ended, exit.

    `main` is imported here and not by the caller, so that a failed import (no torch) is reported too. It is imported
    before the settings are there: a process may be started before they are known. While the imports take seconds, the
    process already ends with its supervisor.

    Args:
        room: package of the process, for example "engine.scheduler".
    """
    faulthandler.enable()
    # SIGTTOU: a background process group must be able to write to its terminal.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
        signal.signal(signum, signal.SIG_IGN)
    role, control_fd, supervisor_pid = _parse_argv(room)
    die_with(supervisor_pid)
    setproctitle.setproctitle(f"engine: {role}")
    channel = child_end(control_fd)
    sys.exit(_run(room, channel))


def _run(room: str, channel: ControlChannel[ToChild]) -> int:
    """Run the package's `main`; returns the exit code of the process."""
    try:
        module = _import(f"{room}.process")
        child = Child(channel)
        label = child.settings.label
        setproctitle.setproctitle(f"engine: {label}")
        if child.settings.endpoints.black_box:
            keep_stacks(Path(child.settings.endpoints.black_box), label)
        configure_logging(child.settings.config.log, label)
        try:
            if isinstance(module, Exception):
                raise module
            module.main(child)
        finally:
            child.end_profile()
    except StopRequested:
        return 0
    except ConfigError as error:
        channel.send(Failed(kind="config", message=str(error)))
        return 2
    except RankLostError as error:
        # Not the root cause, see the class. An engine that is stopped at once may also end like this.
        logger.warning("%s", error)
        channel.send(Failed(kind="rank_lost", message=str(error)))
        return 1
    except Exception as error:  # every error must reach the supervisor
        logger.error("unexpected error, the process ends", exc_info=True)
        first_line = next(iter(str(error).splitlines()), "")
        what = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
        message = f"{what}{_where(error)}{_out_of_memory(error)}"
        trace = traceback.format_exc()[-MAX_TRACEBACK_CHARS:]
        channel.send(Failed(kind="bug", message=message, traceback=trace))
        return 1
    return 0


def _import(name: str) -> ModuleType | Exception:
    """The module, or the error, which is raised where it can be logged as the settings say."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _where(error: Exception) -> str:
    """The innermost frame of an error's traceback, for the one-line root cause."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    folder, name = os.path.split(frames[-1].filename)
    return f" ({os.path.join(os.path.basename(folder), name)}:{frames[-1].lineno} in {frames[-1].name})"


def _out_of_memory(error: Exception) -> str:
    """A hint if the error is that the process got no memory."""
    is_it = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        # Messages of the dynamic loader and of torch's allocator.
        or any(
            text in str(error)
            for text in ("failed to map segment", "annot allocate memory", "not enough memory")
        )
    )
    if not is_it:
        return ""
    return (
        "; there was no memory for it: see `free -m`, `ulimit -v`, the container's limit, and `engine doctor`"
    )


def _parse_argv(room: str) -> tuple[Role, int, int]:
    """Role, descriptor of the control channel and process id of the supervisor, from the command line."""
    with contextlib.suppress(ValueError):
        role, control_fd, supervisor_pid = sys.argv[1:]
        return Role(role), int(control_fd), int(supervisor_pid)
    sys.exit(f"{room} is a process of the engine and is started by `engine serve`, not by hand")


def _wait_for_settings(channel: ControlChannel[ToChild]) -> tuple[Settings, *tuple[ToChild, ...]]:
    """The settings, and further messages that have arrived with them."""
    while not channel.closed:
        channel.wait(None)
        match channel.receive():
            case [Settings() as settings, *others]:
                return settings, *others
    raise StopRequested


def die_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process when the supervisor ends in any way (Linux).

    A closed control channel reports the same, but only to a loop that still reads it.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor_pid:  # the supervisor died before the call above
        os._exit(1)
