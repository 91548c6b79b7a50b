"""`NodeSupervisor`: `engine serve` on a machine other than 0: starts and ends its ranks on machine 0's orders."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping

from ..launch.child.control import Role, Settings
from ..launch.child.crash_report import CrashReports
from ..launch.child.socket_dir import SocketDir
from ..models.source import ModelSource
from ..models.spec.model_spec import ModelSpec
from ..runtime.config.engine_config import EngineConfig
from .child_watch import NODES_GRACE_S, ChildFailure, ChildWatch, Interrupted
from .node_link import RESTART, NodeFailed, NodeLink, NodeReady, NodeStopped
from .signal_queue import SignalQueue
from .supervisor import PROCESS_MODULES, Outcome

logger = logging.getLogger(__name__)

_PASS_S = 0.2


class NodeSupervisor:
    """The ranks of one machine.

    Args:
        config: resolved for this machine; replaced by that of machine 0, except for settings of this machine.
        source: the model's files on this machine.
        spec: the model's architecture facts.
        modules: the module of each process.
        crash_reports: writes a report when a failure here ends the ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        spec: ModelSpec,
        modules: Mapping[Role, str] = PROCESS_MODULES,
        crash_reports: CrashReports | None = None,
    ) -> None:
        self._config = config
        self._source = source
        self._spec = spec
        self._modules = modules
        self._crash_reports = crash_reports
        self._signals = SignalQueue()

    def run(self) -> Outcome:
        """Run the ranks until machine 0, a signal or a failure ends them. Main thread only, once.

        Returns:
            Exit code 0 when machine 0 was stopped; 2 if the user can fix it; 1 for a failure, on any machine;
            128 + signal number for a signal, after which the whole engine ends.

        Raises:
            ConfigError: no directory for the sockets, or no key.
        """
        with (
            self._signals,
            SocketDir() as socket_dir,
            NodeLink(self._config.parallel, self._spec) as link,
            ChildWatch(self._config.server, self._signals, NODES_GRACE_S) as watch,
        ):
            try:
                self._start(watch, link, socket_dir)
                while not self._signals.received:
                    link.poll()
                    _pass_on(link, watch)
                    watch.poll()
                raise Interrupted(self._signals.received[0])
            except NodeStopped as stopped:
                watch.stop()
                return Outcome(1 if stopped.cause else 0, stopped.cause or "stopped")
            except ChildFailure as failure:
                link.send(NodeFailed(failure.message))
                watch.show_stacks()
                watch.stop()
                report = ""
                if self._crash_reports is not None and failure.exit_code == 1:
                    report = self._crash_reports.note(failure.message, watch.children, socket_dir.path)
                remedy = f"; {RESTART}" if failure.exit_code == 1 else ""
                return Outcome(failure.exit_code, failure.message + remedy + report)
            except Interrupted as interrupt:
                message = f"stopped by {interrupt.signum.name}"
                link.send(NodeFailed(message))
                watch.stop()
                return Outcome(128 + interrupt.signum, message)

    def _start(self, watch: ChildWatch, link: NodeLink, socket_dir: SocketDir) -> None:
        """Wait for machine 0's settings, start the ranks, and wait until they can work."""
        started_s = time.monotonic()
        logger.info("waiting for machine 0 at %s", self._config.parallel.dist_init_addr)
        while (settings := link.poll(_PASS_S)) is None:
            if self._signals.received:
                raise Interrupted(self._signals.received[0])
            if time.monotonic() - started_s > self._config.server.startup_timeout:
                raise ChildFailure(
                    f"no answer from {self._config.parallel.dist_init_addr}; start machine 0 with the same "
                    "--dist-init-addr, or raise --startup-timeout"
                )
        config = self._own(settings.config)
        endpoints = socket_dir.endpoints()
        for rank in config.parallel.local_ranks:
            watch.start(
                self._modules[Role.MODEL_RUNNER],
                Settings(Role.MODEL_RUNNER, config, self._source, self._spec, endpoints, rank),
            )
        while any(child.ready is None for child in watch.children):
            link.poll()
            _pass_on(link, watch)
            watch.poll()
            if self._signals.received:
                raise Interrupted(self._signals.received[0])
        link.send(NodeReady())
        logger.info("ready ranks=%d startup_s=%.2f", len(watch.children), time.monotonic() - started_s)

    def _own(self, config: EngineConfig) -> EngineConfig:
        """Machine 0's configuration, with this machine's own paths, threads and rank."""
        own = self._config
        model = dataclasses.replace(
            config.model,
            model=own.model.model,
            load_format=own.model.load_format,
            num_threads=own.model.num_threads,
        )
        parallel = dataclasses.replace(
            config.parallel,
            node_rank=own.parallel.node_rank,
            dist_init_addr=own.parallel.dist_init_addr,
            cluster_key_file=own.parallel.cluster_key_file,
        )
        return dataclasses.replace(config, model=model, parallel=parallel, log=own.log)


def _pass_on(link: NodeLink, watch: ChildWatch) -> None:
    for order in link.orders:
        watch.pass_on(order)
    link.orders.clear()
