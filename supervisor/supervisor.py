"""`Supervisor`: starts, watches and stops the processes of the engine; it runs in the `engine serve` process.

It has no model and no HTTP. Its phases: start all children, wait until they are ready, serve, drain, stop. A process
that is lost while the engine serves is restarted (`Recovery`). Every other failure ends in one `Outcome` with one root
cause, and leaves no process, no socket directory and no open port. `ChildWatch` determines the cause.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from ..launch.child.control import PeersReady, Role, Settings, Stop
from ..launch.child.crash_report import CrashReports
from ..launch.child.socket_dir import ServerRecord, SocketDir, write_record
from ..models.source import ModelSource
from ..models.spec.model_spec import ModelSpec
from ..runtime.adapter_spec import LoadedAdapter
from ..runtime.config.engine_config import EngineConfig
from ..runtime.feasibility import Capacity
from .child_process import ChildProcess
from .child_watch import NODES_GRACE_S, STOP_GRACE_S, ChildFailure, ChildWatch, Interrupted, Nodes
from .recovery import Recovery, scheduler_facts
from .signal_queue import SignalQueue
from .standby import Standby

logger = logging.getLogger(__name__)

_PACKAGE: Final = __package__.rsplit(".", 1)[0]
PROCESS_MODULES: Final[Mapping[Role, str]] = {role: f"{_PACKAGE}.{role}" for role in Role}
"""The module that each process runs; tests use others."""


class EngineReady(NamedTuple):
    """Facts that are known once every process can work."""

    url: str
    capacity: Capacity
    details: dict[str, str]  # further information of the processes for the user
    startup_s: float


class Outcome(NamedTuple):
    """End of the engine: the exit code, and one line that says why."""

    exit_code: int
    message: str


class Supervisor:
    """One engine's processes.

    Args:
        config: resolved: no value is "auto".
        source: the model's files.
        spec: the model's architecture facts.
        on_ready: called once, when clients can connect.
        modules: the module of each process.
        make_nodes: listens for the other machines, if there are any; default: `NodeHub`.
        crash_reports: writes a report when a failure ends the engine.
        started_requests: requests that a scheduler has started, from the files in the engine's private directory; None
            if unknown.
        adapters: the LoRA adapters of the start.
        listener_fd: the listening socket that the tokenizer manager inherits; None: it binds its own.
        before_serving: called once, before the tokenizer manager accepts connections: nothing else may from then on.
        standby: may have a scheduler that runs already, and gets others for restarts.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        spec: ModelSpec,
        on_ready: Callable[[EngineReady], None],
        modules: Mapping[Role, str] = PROCESS_MODULES,
        make_nodes: Callable[[EngineConfig, ModelSpec], Nodes] | None = None,
        crash_reports: CrashReports | None = None,
        started_requests: Callable[[Path], Collection[str] | None] = lambda folder: None,
        adapters: tuple[LoadedAdapter, ...] = (),
        listener_fd: int | None = None,
        before_serving: Callable[[], None] = lambda: None,
        standby: Standby | None = None,
    ) -> None:
        self._config = config
        self._source = source
        self._spec = spec
        self._on_ready = on_ready
        self._modules = modules
        self._make_nodes = make_nodes or _listen_for_nodes
        self._crash_reports = crash_reports
        self._started_requests = started_requests
        self._adapters = adapters
        self._listener_fd = listener_fd
        self._before_serving = before_serving
        self._standby = standby or Standby(modules[Role.SCHEDULER])
        self._signals = SignalQueue()

    def run(self) -> Outcome:
        """Run the engine until a signal or a failure ends it. Main thread only, once.

        Returns:
            Exit code 0 after SIGINT, SIGTERM or SIGHUP and a drain; 2 if the user can fix it; 1 for a process that
            failed, died or hung, also in the drain; 128 + signal number if a signal during the start, or a second
            one, ended it early.

        Raises:
            ConfigError: no directory for the sockets, or no connection to the other machines.
        """
        with self._signals, self._standby, ExitStack() as stack:
            # A folder for each replica: what its processes write into it has the same names in all of them.
            socket_dirs = [stack.enter_context(SocketDir()) for _ in range(self._config.parallel.dp)]
            watch = stack.enter_context(self._watch())
            outcome = Outcome(1, "failed")  # for the other machines, if an unexpected error is raised
            try:
                outcome = self._run(watch, socket_dirs)
            finally:
                if watch.nodes is not None:
                    watch.nodes.stop("" if outcome.exit_code == 0 else f"machine 0: {outcome.message}")
            return outcome

    def _watch(self) -> ChildWatch:
        if self._config.parallel.nnodes == 1:
            return ChildWatch(self._config.server, self._signals, standby=self._standby)
        return ChildWatch(self._config.server, self._signals, NODES_GRACE_S, self._standby)

    def _run(self, watch: ChildWatch, socket_dirs: Sequence[SocketDir]) -> Outcome:
        try:
            recovery = self._start(watch, socket_dirs)
            while not self._signals.received:
                recovery.poll()
            return self._drain(watch, recovery)
        except ChildFailure as failure:
            watch.show_stacks()
            watch.stop(failure.message)
            return Outcome(failure.exit_code, failure.message + self._report(failure, watch, socket_dirs))
        except Interrupted as interrupt:
            return Outcome(128 + interrupt.signum, f"stopped at once by {interrupt.signum.name}")

    def _report(self, failure: ChildFailure, watch: ChildWatch, socket_dirs: Sequence[SocketDir]) -> str:
        """The suffix with the path of a crash report, for the last line; "" if the user can fix the failure."""
        if failure.exit_code != 1:
            return ""
        replica = 0 if failure.child is None else failure.child.replica
        concerned = [each for each in watch.children if each.replica == replica]
        return self._note(failure.message, concerned, socket_dirs[replica], "ended by a failure")

    def _note(self, cause: str, children: Sequence[ChildProcess], socket_dir: SocketDir, what: str) -> str:
        if self._crash_reports is None:
            return ""
        return self._crash_reports.note(cause, children, socket_dir.path, what)

    # ------------------------------------------------------------ the phases

    def _start(self, watch: ChildWatch, socket_dirs: Sequence[SocketDir]) -> Recovery:
        """Start all children and wait until clients can connect."""
        started_s = time.monotonic()
        socket_dir = socket_dirs[0]
        record = ServerRecord(
            os.getpid(), self._config.model.name_in_api(self._source.name), self._source.path, "", time.time()
        )
        write_record(socket_dir.path, record)
        if self._config.parallel.nnodes > 1:
            watch.nodes = self._make_nodes(self._config, self._spec)
        settings = self._settings(socket_dirs)
        children = [watch.start(self._modules[each.role], self._with_listener(each)) for each in settings]
        [manager] = [child for child in children if child.role is Role.TOKENIZER_MANAGER]
        watch.wait_until_ready([child for child in watch.children if child is not manager], started_s)
        watch.wait_for_nodes(started_s)
        capacity, about = scheduler_facts(watch.children)
        self._before_serving()
        manager.send(PeersReady(capacity, details=about))
        watch.wait_until_ready([manager], started_s)

        startup_s = time.monotonic() - started_s
        details = {k: v for child in watch.children if child.ready for k, v in child.ready.details.items()}
        url = manager.ready.url if manager.ready else None
        if url is None:
            raise ChildFailure("tokenizer_manager is ready but has not sent its address")
        logger.info("ready url=%s startup_s=%.2f", url, startup_s)
        write_record(socket_dir.path, replace(record, url=url))
        self._on_ready(EngineReady(url, capacity, details, startup_s))
        return Recovery(
            watch,
            self._modules,
            settings,
            forget_ranks=lambda replica: socket_dirs[replica].forget_ranks(),
            report=lambda cause, lost: self._note(
                cause, lost, socket_dirs[lost[0].replica], "has restarted lost processes"
            ),
            started_requests=lambda replica: self._started_requests(socket_dirs[replica].path),
            standby=self._standby if self._config.server.standby_scheduler and watch.nodes is None else None,
        )

    def _with_listener(self, settings: Settings) -> Settings:
        is_manager = settings.role is Role.TOKENIZER_MANAGER
        return replace(settings, listener_fd=self._listener_fd) if is_manager else settings

    def _settings(self, socket_dirs: Sequence[SocketDir]) -> list[Settings]:
        """Settings of all processes, in the order of their start; the first replica's include the tokenizer manager."""
        ranks = self._config.parallel.local_ranks[1:]  # the first one is in the scheduler's process
        endpoints = [socket_dir.endpoints(ranks) for socket_dir in socket_dirs]
        if len(endpoints) > 1:
            schedulers = tuple(each.scheduler for each in endpoints)
            manager = endpoints[0].tokenizer_manager
            endpoints = [
                replace(each, tokenizer_manager=manager, schedulers=schedulers) for each in endpoints
            ]
        settings = []
        for replica, addresses in enumerate(endpoints):
            of_replica = self._config_of(replica)
            processes = [(Role.SCHEDULER, 0), (Role.DETOKENIZER, 0)]
            processes += [(Role.TOKENIZER_MANAGER, 0)] if replica == 0 else []
            processes += [(Role.MODEL_RUNNER, rank) for rank in ranks]
            settings += [
                Settings(
                    role,
                    self._config if role is Role.TOKENIZER_MANAGER else of_replica,
                    self._source,
                    self._spec,
                    addresses,
                    rank,
                    adapters=self._adapters,
                    replica=replica,
                )
                for role, rank in processes
            ]
        return settings

    def _config_of(self, replica: int) -> EngineConfig:
        log = dataclasses.replace(self._config.log, decision_log=self._config.log.decision_log_of(replica))
        scheduler = self._config.scheduler
        if scheduler.disaggregation_mode == "both":
            scheduler = dataclasses.replace(scheduler, disaggregation_mode="decode" if replica else "prefill")
        return dataclasses.replace(self._config, log=log, scheduler=scheduler)

    def _drain(self, watch: ChildWatch, recovery: Recovery) -> Outcome:
        """Let the tokenizer manager finish running requests while the other processes run; then stop them."""
        timeout_s = self._config.server.drain_timeout
        manager = recovery.manager
        logger.info("draining signal=%s timeout_s=%g", self._signals.received[0].name, timeout_s)
        manager.request_stop(Stop(drain=True))
        # The manager enforces the timeout and answers the requests that it cuts off; this one is for a hung manager.
        deadline_s = time.monotonic() + timeout_s + STOP_GRACE_S
        while not manager.has_ended() and time.monotonic() < deadline_s:
            recovery.poll()
            if len(self._signals.received) > 1:
                raise Interrupted(self._signals.received[1])
        watch.check_ends()
        keeps_kv = bool(self._config.cache.kv_tier)
        late = watch.stop(drain_s=deadline_s - time.monotonic() if keeps_kv else None)
        if late and len(self._signals.received) > 1:
            raise Interrupted(self._signals.received[1])
        if manager in late:
            return Outcome(
                1,
                f"tokenizer_manager hung while it stopped and was killed: it ended neither within the {timeout_s:g} s "
                f"of --drain-timeout nor when told to end at once; clients may have lost answers",
            )
        return Outcome(0, "stopped")


def _listen_for_nodes(config: EngineConfig, spec: ModelSpec) -> Nodes:
    from .node_link import NodeHub  # imported here: engines on one machine do not need it

    return NodeHub(config, spec)
