"""`run_fleet`: one fleet from its start to its end: its loop, its control endpoint and its signals."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from ...runtime.config.server_config import ServerConfig
from ...runtime.counted import counted
from ...runtime.errors import ConfigError
from ...supervisor.fleet.fleet import END_GRACE_S, Fleet, FleetOutcome, FleetSettings
from ...supervisor.fleet.probe import FleetProbe
from ...supervisor.fleet.server import LocalServers, ServerCommand, Servers
from ...supervisor.fleet.worker_list import NoWorkerList, WorkerList
from ..service_manager import report_ready
from .serve_arguments import ServeArguments

logger = logging.getLogger(__name__)

_TITLE: Final = "engine: fleet"
_MODULE: Final = f"{__package__.rsplit('.', 1)[0]}.main"
_LOOK_S: Final = 0.1
_ASK_S: Final = 1.0

Serving = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """All that one fleet is started with.

    Attributes:
        settings: of the fleet.
        serve: of each server.
        on_ray: servers are actors on Ray, otherwise processes here.
        host, port: of the control endpoint.
        worker_list: the file that the user wants.
    """

    settings: FleetSettings
    serve: ServeArguments
    on_ray: bool
    host: str
    port: int
    worker_list: Path | None


def run_fleet(plan: FleetPlan) -> int:
    """Run it; the exit code is that of `engine serve` in the same case."""
    import setproctitle

    from ...runtime.logs import configure_logging

    configure_logging(plan.serve.merged.config.log, "fleet")
    setproctitle.setproctitle(_TITLE)  # instead of the command line, which may contain a key
    with ExitStack() as stack:
        servers = stack.enter_context(_servers(plan))
        listing: WorkerList | NoWorkerList = NoWorkerList()
        path = plan.worker_list
        if path is not None:
            listing = stack.enter_context(WorkerList(path.absolute()))
        fleet = Fleet(plan.settings, servers, listing)
        stack.callback(fleet.kill)
        outcome = asyncio.run(_FleetRun(plan, fleet, listing).run())
        logger.info("stopped exit_code=%d", outcome.exit_code)
    if outcome.exit_code != 0:
        typer.echo(f"engine: {outcome.message}", err=True)
    return outcome.exit_code


@contextmanager
def _servers(plan: FleetPlan) -> Iterator[Servers]:
    serve, settings = plan.serve, plan.settings
    if plan.on_ray:
        from ...supervisor.fleet.ray_servers import ray_servers

        share = max(settings.replicas, settings.bounds.max_replicas)
        command = ServerCommand(_MODULE, serve.command, serve.env_elsewhere)
        takes_host = serve.merged.config.server.host == ServerConfig().host
        log = serve.merged.config.log
        with ray_servers(command, serve.needs(share), log, takes_host=takes_host) as servers:
            yield servers
        return
    places = serve.num_places()
    wanted = max(settings.replicas, settings.bounds.max_replicas)
    if places is not None and wanted > places:
        raise ConfigError(
            f"{counted(wanted, 'replica')} need {wanted * serve.devices_each} GPUs, but this machine has "
            f"{len(serve.devices())}; lower --replicas or --max-replicas to {places}"
        )
    yield LocalServers(ServerCommand(_MODULE, serve.command, serve.env_here), places)


class _FleetRun:
    """One run. All of it happens in one event loop: nothing needs a lock."""

    def __init__(self, plan: FleetPlan, fleet: Fleet, listing: WorkerList | NoWorkerList) -> None:
        from ...tokenizer_manager.http.guards.auth import read_keys

        self._plan = plan
        self._fleet = fleet
        self._keys = read_keys(plan.serve.merged.config.server)
        self._key = next(iter(self._keys.clients), None)
        self._listing = listing
        self._signals: list[signal.Signals] = []
        self._wake = asyncio.Event()
        self._is_announced = False

    async def run(self) -> FleetOutcome:
        """Until a signal or a failure ends it."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` sets SIGHUP to be ignored, and it stays ignored.
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)
        async with FleetProbe(self._fleet, self._key) as probe:
            with self._control() as serving:
                duties = [asyncio.create_task(serving()), asyncio.create_task(self._ask(probe))]
                try:
                    return await self._run(duties)
                finally:
                    for task in duties:
                        task.cancel()
                    await asyncio.gather(*duties, return_exceptions=True)

    async def _run(self, duties: list[asyncio.Task[None]]) -> FleetOutcome:
        fleet = self._fleet
        while True:
            now_s = time.monotonic()
            fleet.look(now_s)
            if self._signals:
                logger.info("draining signal=%s", self._signals[0].name)
                return await self._end(FleetOutcome(0, "stopped"))
            if fleet.failure is not None:
                return await self._end(fleet.failure)
            for task in duties:
                if task.done():
                    task.result()  # raises its error; none of them ends without one
            self._announce()
            await self._pause()

    async def _end(self, outcome: FleetOutcome) -> FleetOutcome:
        """Drain everything; a second signal, or the end of all patience, kills it."""
        fleet, before = self._fleet, len(self._signals)
        began_s = time.monotonic()
        fleet.stop(began_s)
        patience_s = self._plan.settings.drain_s + END_GRACE_S + 5.0
        while not fleet.is_gone:
            now_s = time.monotonic()
            if len(self._signals) > max(1, before):
                signum = self._signals[-1]
                fleet.kill()
                return FleetOutcome(128 + signum, f"stopped at once by {signum.name}")
            if now_s - began_s > patience_s:
                fleet.kill()
                return FleetOutcome(1, f"the servers did not end within {patience_s:g} s and were killed")
            fleet.look(now_s)
            await self._pause()
        return outcome

    async def _pause(self) -> None:
        """Until a signal, or the next look."""
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _ask(self, probe: FleetProbe) -> None:
        while True:
            await probe.ask_all()
            await asyncio.sleep(_ASK_S)

    def _on_signal(self, signum: signal.Signals) -> None:
        self._signals.append(signum)
        self._wake.set()

    @contextmanager
    def _control(self) -> Iterator[Serving]:
        """The control endpoint, bound and serving."""
        from ...tokenizer_manager.http.server import BACKLOG, HttpServer, bind, is_loopback
        from .control_api import ControlApi

        plan, limits = self._plan, self._plan.serve.merged.config.server
        with bind(plan.host, plan.port) as listener:
            address = listener.getsockname()[0]
            api = ControlApi(self._fleet, limits, self._keys, loopback=is_loopback(address))
            limits = dataclasses.replace(limits, ssl_certfile=None, ssl_keyfile=None)
            server = HttpServer(api, limits)
            listener.listen(BACKLOG)
            logger.info("control endpoint url=%s", self.control_url)
            yield lambda: server.serve(sockets=[listener])

    @property
    def control_url(self) -> str:
        """Where the control endpoint listens."""
        return _url(self._plan.host, self._plan.port)

    def _announce(self) -> None:
        """Say once that all servers are there."""
        fleet = self._fleet
        if self._is_announced or fleet.num_ready < fleet.target:
            return
        self._is_announced = True
        model = next(
            (str(each.server.model) for each in fleet.replicas if each.server is not None), "the model"
        )
        typer.echo(ready_text(model, fleet.num_ready, self.control_url))
        report_ready(f"{counted(fleet.num_ready, 'server')} of {model}")


def ready_text(model: str, num_servers: int, control_url: str) -> str:
    """What a user sees when all servers are there."""
    lines = ["", f"Ready: {counted(num_servers, 'server')} of {model}"]
    return "\n".join(
        [
            *lines,
            f"  The servers: curl {control_url}/replicas",
            f"  Another number: curl {control_url}/scale -d '{{\"replicas\": {num_servers + 1}}}'",
            "  Stop with Ctrl-C.",
            "",
        ]
    )


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
