"""`Supervisor`: starts, watches and stops the processes of the engine; itself the `engine serve` process.

It knows no model and no HTTP. Its life: start all children, wait until they are ready, serve, drain, stop.
Whatever goes wrong at any point ends in one `Outcome` with one root cause, and nothing is left behind: no
process, no socket directory, no port.

The watchdog counts the seconds in which a child said nothing *while the supervisor was awake*. A machine
that was suspended, a terminal's Ctrl-Z, or a load that starved everybody must not look like a hang.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final, NamedTuple, assert_never

from .child_process import ChildProcess
from .config import EngineConfig
from .control import Failed, Heartbeat, PeerDied, PeersReady, Ready, Role, Settings, Stop, ToSupervisor
from .feasibility import Capacity
from .model_files.model_spec import ModelSpec
from .model_files.source import ModelSource
from .socket_dir import SocketDir

logger = logging.getLogger(__name__)

_PACKAGE: Final = __package__.rsplit(".", 1)[0]
ROOMS: Final[Mapping[Role, str]] = {role: f"{_PACKAGE}.{role}" for role in Role}
"""The module that each process runs; tests run others."""

_TICK_S: Final = 0.5  # the watchdog looks at least this often
_STOP_GRACE_S: Final = 3.0  # from "stop" to SIGKILL
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EngineReady(NamedTuple):
    """What is known once every process can work."""

    url: str
    capacity: Capacity
    details: dict[str, str]  # what the processes want the user to know
    startup_s: float


class Outcome(NamedTuple):
    """How the engine ended: the exit code, and one line that says why."""

    exit_code: int
    message: str


class Supervisor:
    """One engine's processes.

    Args:
        config: resolved: no value is "auto" any more.
        source: where the model's files lie.
        spec: the model's architecture facts.
        on_ready: called once, when clients can connect.
        rooms: the module of each process.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        spec: ModelSpec,
        on_ready: Callable[[EngineReady], None],
        rooms: Mapping[Role, str] = ROOMS,
    ) -> None:
        self._config = config
        self._source = source
        self._spec = spec
        self._on_ready = on_ready
        self._rooms = rooms
        self._children: dict[Role, ChildProcess] = {}
        self._signals = _SignalQueue()
        self._selector = selectors.DefaultSelector()
        self._last_pass_s = 0.0

    def run(self) -> Outcome:
        """Run the engine until a signal or a failure ends it. Main thread only, once.

        Returns:
            Exit code 0 after SIGINT, SIGTERM or SIGHUP and a drain; 2 for what the user can mend; 1 for a
            process that failed, died or hung, also in the drain; 128 + signal number when a signal during the
            start, or a second one, cut it short.

        Raises:
            ConfigError: no directory for the sockets.
        """
        with self._signals, SocketDir() as socket_dir, self._selector:
            try:
                self._selector.register(self._signals, selectors.EVENT_READ)
                self._start(socket_dir)
                self._serve()
                return self._drain()
            except _ChildFailure as failure:
                self._stop(failure.message)
                return Outcome(failure.exit_code, failure.message)
            except _Interrupted as interrupt:
                return Outcome(128 + interrupt.signum, f"stopped at once by {interrupt.signum.name}")
            finally:
                for child in self._children.values():
                    child.kill()

    # ------------------------------------------------------------ the phases

    def _start(self, socket_dir: SocketDir) -> None:
        """Start all children and wait until clients can connect."""
        started_s = time.monotonic()
        endpoints = socket_dir.endpoints()
        for role, module in self._rooms.items():
            child = ChildProcess(role, module)
            self._children[role] = child
            self._selector.register(child, selectors.EVENT_READ)
            child.send(Settings(role, self._config, self._source, self._spec, endpoints))
            logger.info("started child=%s pid=%d", role, child.pid)

        manager = self._children[Role.TOKENIZER_MANAGER]
        self._wait_until_ready(
            [child for child in self._children.values() if child is not manager], started_s
        )
        capacity = _scheduler_capacity(self._children[Role.SCHEDULER])
        manager.send(PeersReady(capacity))
        self._wait_until_ready([manager], started_s)

        startup_s = time.monotonic() - started_s
        details = {
            k: v for child in self._children.values() if child.ready for k, v in child.ready.details.items()
        }
        url = manager.ready.url if manager.ready else None
        if url is None:
            raise _ChildFailure("tokenizer_manager is ready and has not said where it listens")
        logger.info("ready url=%s startup_s=%.2f", url, startup_s)
        self._on_ready(EngineReady(url, capacity, details, startup_s))

    def _wait_until_ready(self, children: list[ChildProcess], started_s: float) -> None:
        timeout_s = self._config.server.startup_timeout
        while late := [child for child in children if child.ready is None]:
            self._pass()
            if self._signals.received:
                raise _Interrupted(self._signals.received[0])
            if time.monotonic() - started_s > timeout_s:
                for child in late:
                    child.abort()
                names = " and ".join(child.role for child in late)
                raise _ChildFailure(
                    f"{names} not ready {timeout_s:g} s after the start; the tracebacks above say where; "
                    "raise --startup-timeout if the machine is slow"
                )

    def _serve(self) -> None:
        while not self._signals.received:
            self._pass()

    def _drain(self) -> Outcome:
        """Let the tokenizer manager finish what runs, for which the others must live; then stop them."""
        timeout_s = self._config.server.drain_timeout
        logger.info("draining signal=%s timeout_s=%g", self._signals.received[0].name, timeout_s)
        manager = self._children[Role.TOKENIZER_MANAGER]
        manager.tell_to_stop(Stop(drain=True))
        # The manager keeps the time-out, and answers whom it cuts off; ours is for a manager that does not.
        deadline_s = time.monotonic() + timeout_s + _STOP_GRACE_S
        while not manager.has_ended() and time.monotonic() < deadline_s:
            self._pass()
            if len(self._signals.received) > 1:
                raise _Interrupted(self._signals.received[1])
        self._check_ends()
        late = self._stop()
        if late and len(self._signals.received) > 1:
            raise _Interrupted(self._signals.received[1])
        if manager in late:
            return Outcome(
                1,
                f"tokenizer_manager hung while it stopped and was killed: it ended neither within the {timeout_s:g} s "
                f"of --drain-timeout nor when told to end at once; clients may have lost answers",
            )
        return Outcome(0, "stopped")

    def _stop(self, cause: str | None = None) -> list[ChildProcess]:
        """Tell the children that work to end, and give them a few seconds; `cause` is for the clients.

        What happens to them now is no cause of anything any more. Another signal ends the waiting.

        Returns:
            those that have not ended and must be killed.
        """
        num_signals = len(self._signals.received)
        at_work = [child for child in self._children.values() if child.ready and not child.has_ended()]
        for child in at_work:
            tell_clients = cause and child.role is Role.TOKENIZER_MANAGER
            child.tell_to_stop(PeerDied(cause) if cause and tell_clients else Stop(drain=False))
        deadline_s = time.monotonic() + _STOP_GRACE_S
        while late := [child for child in at_work if not child.has_ended()]:
            if time.monotonic() > deadline_s or len(self._signals.received) > num_signals:
                logger.warning("killing children=%s", ",".join(child.role for child in late))
                break
            self._wait_for_news()
            for child in late:
                child.receive()
        return late

    # ------------------------------------------------------------ watching

    def _pass(self) -> None:
        """Wait for news, read it, look after everyone.

        Raises:
            _ChildFailure: a child failed, died or hangs.
        """
        self._wait_for_news()
        now_s = time.monotonic()
        # Longer gaps between two passes are our own sleep, in which nobody was listening for heartbeats.
        elapsed_s = min(now_s - self._last_pass_s, 2 * _TICK_S)
        self._last_pass_s = now_s
        for child in self._children.values():
            child.silent_s += elapsed_s
            for message in child.receive():
                _note(child, message)
        self._check_ends()
        self._check_heartbeats()

    def _wait_for_news(self) -> None:
        """Block until a child says something or dies, a signal comes, or a tick is over."""
        for key, _events in self._selector.select(_TICK_S):
            if key.fileobj is self._signals:
                self._signals.clear_wakeup()
            elif isinstance(key.fileobj, ChildProcess) and key.fileobj.closed:
                self._selector.unregister(key.fileobj)  # it would be readable for ever

    def _check_ends(self) -> None:
        for child in self._children.values():
            if child.has_ended() and not (child.stopping and child.exit_code == 0):
                raise _ChildFailure(child.describe_end())

    def _check_heartbeats(self) -> None:
        timeout_s = self._config.server.watchdog_timeout
        for child in self._children.values():
            if child.ready and not child.stopping and child.silent_s > timeout_s:
                child.abort()
                raise _ChildFailure(
                    f"{child.role} hangs: no heartbeat for {timeout_s:g} s (--watchdog-timeout); "
                    "the tracebacks above say where"
                )


def _note(child: ChildProcess, message: ToSupervisor) -> None:
    """Take in what a child said.

    Raises:
        _ChildFailure: it failed.
    """
    match message:
        case Ready():
            child.ready = message
            logger.info("child ready child=%s", child.role)
        case Failed(kind="config"):
            raise _ChildFailure(message.message, exit_code=2)
        case Failed():
            raise _ChildFailure(f"{child.role} failed: {message.message}")
        case Heartbeat():
            pass
        case _:
            assert_never(message)


def _scheduler_capacity(scheduler: ChildProcess) -> Capacity:
    if scheduler.ready is None or scheduler.ready.capacity is None:
        raise _ChildFailure("scheduler is ready and has not said what it can hold")
    return scheduler.ready.capacity


class _ChildFailure(Exception):
    """A child failed, died or hangs: everything stops."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class _Interrupted(Exception):
    """The user wants the end now."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class _SignalQueue:
    """Catches the signals that mean "stop", and wakes whoever selects on it.

    Attributes:
        received: the signals so far, in order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    def fileno(self) -> int:
        """Readable when a signal has come since `clear_wakeup`."""
        return self._reader.fileno()

    def clear_wakeup(self) -> None:
        """Make it unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def __enter__(self) -> _SignalQueue:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {
            signum: signal.signal(signum, self._on_signal)
            for signum in _STOP_SIGNALS
            # `nohup` has SIGHUP ignored, and means it.
            if not (signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN)
        }
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        self._reader.close()
        self._writer.close()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(signum))
