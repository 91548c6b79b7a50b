"""`ChildWatch`: the started processes of one machine: reads their messages, and determines which of them failed.

A failure becomes one `ChildFailure` with one root cause. Ranks of a tensor-parallel group make that harder: when one
dies or freezes, all others are stuck in the middle of a step, and fail or fall silent too. A rank that reports that it
lost the others is therefore not the cause; the others get a few seconds to show what happened. Ranks that wait for
others keep sending heartbeats (`Child.beat_while`), so a silent rank is the cause.

The watchdog counts the seconds in which a child sent nothing *while the supervisor was awake*. A suspended machine, a
terminal's Ctrl-Z, or a load that starves all processes must not look like a hang.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import signal
import time
from collections.abc import Sequence
from typing import Final, Protocol, assert_never

from ..launch.child.control import (
    Failed,
    ForAll,
    Heartbeat,
    PeerDied,
    Ready,
    Role,
    SetAdapters,
    SetLogLevel,
    Settings,
    StartProfile,
    Stop,
    StopProfile,
    ToSupervisor,
)
from ..runtime.config.server_config import ServerConfig
from ..runtime.logs import set_log_level
from .child_process import ChildProcess
from .runtime_overrides import RuntimeOverrides, described
from .signal_queue import SignalQueue
from .standby import Standby

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 3.0  # from "stop" to SIGKILL
_TICK_S: Final = 0.5  # the watchdog checks at least this often
_CAUSE_GRACE_S: Final = 3.0  # from the first `lost_others` to the failure
NODES_GRACE_S: Final = 12.0  # the same if the cause may be that another machine fell silent
_WAS_SUSPENDED: Final = "was stopped by a signal (SIGSTOP or SIGTSTP) and has not been continued"
_SUSPENDED_S: Final = 4.0
"""After this time without a heartbeat a process that was stopped by a signal counts as failed: a busy machine cannot be
the reason, so the group does not wait for the whole watchdog timeout."""


class ChildFailure(Exception):
    """A child failed, died or hangs: it is restarted, or the engine stops.

    Attributes:
        message: one line.
        exit_code: 2 if the user can fix it.
        child: the one that failed; None if it is unknown, or on another machine.
    """

    def __init__(self, message: str, exit_code: int = 1, child: ChildProcess | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.child = child


class Interrupted(Exception):
    """The user wants the engine to end now."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Nodes(Protocol):
    """The other machines of an engine; see `node_link.NodeHub`.

    Attributes:
        remedy: what the user can do about a machine that is late.
        restart: what the user must do after a loss.
    """

    remedy: str
    restart: str

    @property
    def late(self) -> list[str]: ...

    def poll(self) -> None: ...

    def pass_on(self, order: ForAll) -> None: ...

    def stop(self, cause: str) -> None: ...


class ChildWatch:
    """See the module. A context manager that kills every child at its end.

    Attributes:
        children: in the order of their start.
        nodes: the other machines, if there are any.
    """

    def __init__(
        self,
        config: ServerConfig,
        signals: SignalQueue,
        cause_grace_s: float = _CAUSE_GRACE_S,
        standby: Standby | None = None,
    ) -> None:
        """No child is started yet.

        Args:
            signals: a signal ends every wait; the caller handles it.
            cause_grace_s: how long to wait for a better cause after a rank reported that it lost the others.
            standby: may have a scheduler that runs already.
        """
        self.children: list[ChildProcess] = []
        self._config = config
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._last_pass_s = 0.0
        self.nodes: Nodes | None = None
        self._cause_grace_s = cause_grace_s
        self._standby = standby
        self._lost_since_s: float | None = None
        self._overrides = RuntimeOverrides()

    def __enter__(self) -> ChildWatch:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for child in self.children:
            child.kill()
        self._selector.close()

    def start(self, module: str, settings: Settings) -> ChildProcess:
        """Start a process and send it its settings."""
        standby = self._standby if settings.role is Role.SCHEDULER else None
        child = ChildProcess(
            settings.role,
            module,
            settings.rank,
            settings.endpoints.black_box,
            settings.one_of_several,
            settings.listener_fd,
            None if standby is None else standby.take(module),
        )
        self.children.append(child)
        self._selector.register(child, selectors.EVENT_READ)
        child.send(self._overrides.applied_to(settings))
        logger.info("started child=%s pid=%d", child.label, child.pid)
        return child

    def pass_on(self, order: ForAll) -> None:
        """Send to all processes, including those of other machines and those that are started later."""
        self._overrides.take(order)
        if isinstance(order, SetLogLevel):
            set_log_level(order.level)  # this process's own
        logger.info("for all processes: %s", described(order))
        for child in self.children:
            child.pass_on(order)
        if self.nodes is not None:
            self.nodes.pass_on(order)

    def remove(self, child: ChildProcess) -> None:
        """Kill a child and stop watching it."""
        self.children.remove(child)
        with contextlib.suppress(KeyError):  # it has already closed its end
            self._selector.unregister(child)
        child.kill()
        self._lost_since_s = None

    def wait_until_ready(self, children: Sequence[ChildProcess], started_s: float) -> None:
        """Wait until these can work; `started_s`: when `startup_timeout` began.

        Raises:
            ChildFailure: any child failed, or one of these is late.
            Interrupted: a signal came first.
        """
        while any(child.ready is None for child in children):
            self.check_start(children, started_s)
            self._look_once()

    def check_start(self, children: Sequence[ChildProcess], started_s: float) -> None:
        """Raise `ChildFailure` if one of these is late; `started_s`: when `startup_timeout` began."""
        timeout_s = self._config.startup_timeout
        late = [child for child in children if child.ready is None]
        if not late or time.monotonic() - started_s <= timeout_s:
            return
        for child in late:
            child.abort()
        names = " and ".join([child.name for child in late] + self._late_nodes)
        raise ChildFailure(
            f"{names} not ready {timeout_s:g} s after the start; the tracebacks above say where; "
            "raise --startup-timeout if the machine is slow",
            child=late[0],
        )

    def wait_for_nodes(self, started_s: float) -> None:
        """Wait until the other machines can work; as `wait_until_ready`."""
        timeout_s = self._config.startup_timeout
        while self.nodes is not None and (late := self.nodes.late):
            if time.monotonic() - started_s > timeout_s:
                raise ChildFailure(
                    f"{' and '.join(late)} not ready {timeout_s:g} s after the start; {self.nodes.remedy}, or raise "
                    "--startup-timeout"
                )
            self._look_once()

    @property
    def _late_nodes(self) -> list[str]:
        return [] if self.nodes is None else self.nodes.late

    def _look_once(self) -> None:
        self.poll()
        if self._signals.received:
            raise Interrupted(self._signals.received[0])

    def poll(self) -> None:
        """Wait for messages, but no longer than a tick; read them, check every child.

        Raises:
            ChildFailure: a child failed, died or hangs.
        """
        self._wait_for_news()
        now_s = time.monotonic()
        # A longer gap between two passes means that this process did not run, so heartbeats could not be read.
        elapsed_s = min(now_s - self._last_pass_s, 2 * _TICK_S)
        self._last_pass_s = now_s
        for child in self.children:
            child.silent_s += elapsed_s
            for message in child.receive():
                self._note(child, message)
        if self.nodes is not None:
            self.nodes.poll()
        self.check_ends()
        self._check_suspended()
        self._check_lost(now_s)
        self._check_heartbeats()

    def check_ends(self) -> None:
        """Raise `ChildFailure` for a child that has ended without having been asked to."""
        for child in self.children:
            if not child.has_ended() or (child.stopping and child.exit_code == 0):
                continue
            for message in child.receive():  # its last messages
                self._note(child, message)
            if not child.lost_others:
                raise ChildFailure(child.describe_end(), child=child)

    def _note(self, child: ChildProcess, message: ToSupervisor) -> None:
        """Handle a child's message.

        Raises:
            ChildFailure: the child failed.
        """
        match message:
            case Ready():
                child.ready = message
                logger.debug("child ready child=%s", child.label)
            case Failed(kind="config"):
                raise ChildFailure(message.message, exit_code=2, child=child)
            case Failed(kind="rank_lost"):
                child.lost_others = message.message
                logger.warning("child=%s lost the other ranks: %s", child.label, message.message)
            case Failed():
                child.traceback = message.traceback
                raise ChildFailure(f"{child.name} failed: {message.message}", child=child)
            case SetLogLevel() | StartProfile() | StopProfile() | SetAdapters():
                self.pass_on(message)
            case Heartbeat():
                pass
            case _:
                assert_never(message)

    def show_stacks(self) -> None:
        """Have every child that is able to write its stacks into the black box, before anything is changed."""
        for child in self.children:
            child.show_stacks()

    def stop(self, cause: str | None = None, *, drain_s: float | None = None) -> list[ChildProcess]:
        """Tell the ready children to end, and give them a few seconds; `cause` is for the clients.

        With `drain_s` schedulers write first what a disk tier should keep, for at most so long.

        Their failures are no longer root causes. Another signal ends the wait.

        Returns:
            the children that have not ended and must be killed.
        """
        num_signals = len(self._signals.received)
        at_work = [child for child in self.children if child.ready and not child.has_ended()]
        # Model runners last: the scheduler may be in the middle of a step, which it cannot finish without them.
        runners = [child for child in at_work if child.role is Role.MODEL_RUNNER]
        others = [child for child in at_work if child.role is not Role.MODEL_RUNNER]
        deadline_s = time.monotonic() + max(STOP_GRACE_S, drain_s or 0.0)
        for children in (others, runners):
            for child in children:
                tell_clients = cause and child.role is Role.TOKENIZER_MANAGER
                drains = drain_s is not None and child.role is Role.SCHEDULER
                child.request_stop(PeerDied(cause) if cause and tell_clients else Stop(drain=drains))
            while late := [child for child in children if not child.has_ended()]:
                if time.monotonic() > deadline_s or len(self._signals.received) > num_signals:
                    logger.warning("killing children=%s", ",".join(child.label for child in late))
                    break
                self._wait_for_news()
                for child in late:
                    child.receive()
        return [child for child in at_work if not child.has_ended()]

    # ------------------------------------------------------------ checks

    def _wait_for_news(self) -> None:
        """Block until a child sends a message or dies, a signal comes, or a tick is over."""
        for key, _events in self._selector.select(_TICK_S):
            if key.fileobj is self._signals:
                self._signals.clear_wakeup()
            elif isinstance(key.fileobj, ChildProcess) and key.fileobj.closed:
                self._selector.unregister(key.fileobj)  # it would stay readable

    def _check_heartbeats(self) -> None:
        timeout_s = self._config.watchdog_timeout
        for child in self.children:
            if child.ready and not child.stopping and child.silent_s > timeout_s and not child.lost_others:
                why = f"it {_WAS_SUSPENDED}" if child.is_suspended() else "the log has its tracebacks"
                child.abort()
                raise ChildFailure(
                    f"{child.name} hangs: no heartbeat for {timeout_s:g} s (--watchdog-timeout); {why}",
                    child=child,
                )

    def _check_suspended(self) -> None:
        for child in (child for group in self._groups() for child in group):
            if child.silent_s > _SUSPENDED_S and child.is_suspended():
                raise ChildFailure(
                    f"{_with_rank(child)} {_WAS_SUSPENDED}; the other ranks cannot continue without it",
                    child=child,
                )

    def _check_lost(self, now_s: float) -> None:
        """After the grace period without a better cause, report the ranks that did not lose the others as failed."""
        if not any(child.lost_others for child in self.children):
            return
        if self._lost_since_s is None:
            self._lost_since_s = now_s
        if now_s - self._lost_since_s < self._cause_grace_s:
            return
        # Of several groups that broke at once, the others are looked at after the restart of the first.
        group = next(group for group in self._groups() if any(child.lost_others for child in group))
        lost = [child for child in group if child.lost_others]
        silent = [child for child in group if not child.lost_others]
        for child in silent:
            child.abort()
        says = "; ".join(child.lost_others for child in lost)
        if silent:
            names = " and ".join(_with_rank(child) for child in silent)
            raise ChildFailure(
                f"{names} did not take part in a step any more: {says}; the log has their tracebacks; raise "
                "--dist-timeout if a step may take that long",
                child=silent[0],
            )
        raise ChildFailure(f"the ranks lost each other: {says}", child=lost[0])

    def _groups(self) -> list[list[ChildProcess]]:
        """The processes that share a model, replica by replica; empty if each model is in one process."""
        ranks = [child for child in self.children if child.role in (Role.SCHEDULER, Role.MODEL_RUNNER)]
        if self.nodes is None and not any(child.role is Role.MODEL_RUNNER for child in ranks):
            return []
        ranks.sort(key=lambda child: (child.replica, child.rank))
        return [list(group) for _, group in itertools.groupby(ranks, key=lambda child: child.replica)]


def _with_rank(child: ChildProcess) -> str:
    return child.name if child.role is Role.MODEL_RUNNER else f"{child.name} (rank 0)"
