"""`run_fleet`: one fleet from its start to its end: Ray, its loop, its control endpoint and its signals.

All of it happens in one event loop, in the process that is the driver of Ray (`run_driver`): nothing needs a lock. If
the cluster loses its head, Ray ends that process within a minute.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from ...launch.startup_display import report_ready
from ...runtime.config.server_config import ServerConfig
from ...runtime.logs import configure_logging
from ...runtime.text import counted
from ...supervisor.fleet.driver import DriverSocket, run_driver
from ...supervisor.fleet.fleet import END_GRACE_S, Fleet, FleetOutcome, FleetSettings, WorkerList
from ...supervisor.fleet.server import Server, ServerOptions
from ...supervisor.ray.cluster import RayUse, ray_cluster
from ...tokenizer_manager.http.connection import HttpServer
from ...tokenizer_manager.http.guards.auth import Keys, read_keys
from ...tokenizer_manager.http.port import BACKLOG, bind, is_loopback
from .control_api import ControlApi
from .serve_arguments import ServeArguments

logger = logging.getLogger(__name__)

RAY_USE: Final = RayUse("servers of a fleet run on Ray", "`engine serve --dp N` on this machine", "the fleet")
_POLL_S: Final = 0.1
_DRIVER_END_S: Final = 10.0  # from the end of the fleet to that of a Ray that it started


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Arguments of one fleet.

    Attributes:
        settings: of the fleet.
        serve: of each server.
        host, port: of the control endpoint.
        worker_list: the file that the user wants.
    """

    settings: FleetSettings
    serve: ServeArguments
    host: str
    port: int
    worker_list: Path | None


def run_fleet(plan: FleetPlan) -> int:
    """Run it; the exit code is that of `engine serve` in the same case."""
    import setproctitle

    configure_logging(plan.serve.merged.config.log, "fleet")
    setproctitle.setproctitle("engine: fleet")  # instead of the command line, which may contain a key
    limit_s = patience_s(plan.settings) + _DRIVER_END_S
    with WorkerList(plan.worker_list.absolute()) if plan.worker_list else nullcontext() as listing:
        code, message = run_driver(lambda driver: _drive(plan, listing, driver), limit_s)
    if message:
        typer.echo(f"engine: {message}", err=True)
    return code


def _drive(plan: FleetPlan, listing: WorkerList | None, driver: DriverSocket) -> int:
    server, settings = plan.serve.merged.config.server, plan.settings
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_cluster(driver.folder, RAY_USE))
        driver.joined()
        keys = read_keys(server)
        options = ServerOptions(
            plan.serve.needs(settings.replicas),
            plan.serve.env(),
            next(iter(keys.clients), None),
            cluster.address,
            takes_host=server.host == ServerConfig().host,
        )
        fleet = Fleet(
            settings,
            lambda number: Server(cluster.ray, plan.serve.command(number, settings.replicas), options),
            listing,
        )
        stack.callback(fleet.kill)
        outcome = asyncio.run(_FleetRun(plan, fleet, driver).run(keys))
        logger.info("stopped exit_code=%d", outcome.exit_code)
    if outcome.exit_code != 0:
        typer.echo(f"engine: {outcome.message}", err=True)
    return outcome.exit_code


def patience_s(settings: FleetSettings) -> float:
    """From the begin of a fleet's end until its servers are killed."""
    return settings.drain_s + END_GRACE_S + 5.0


class _FleetRun:
    """One run."""

    def __init__(self, plan: FleetPlan, fleet: Fleet, driver: DriverSocket) -> None:
        self._plan = plan
        self._fleet = fleet
        self._driver = driver
        self._signals: list[signal.Signals] = []
        self._wake = asyncio.Event()
        self._is_announced = False

    async def run(self, keys: Keys) -> FleetOutcome:
        """Run until a signal or a failure ends it."""
        asyncio.get_running_loop().add_reader(self._driver, self._on_signal)
        with self._control(keys) as serving:
            task = asyncio.create_task(serving())
            try:
                return await self._run(task)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, serving: asyncio.Task[None]) -> FleetOutcome:
        fleet = self._fleet
        while True:
            fleet.poll(time.monotonic())
            if self._signals:
                logger.info("draining signal=%s", self._signals[0].name)
                return await self._end(FleetOutcome(0, "stopped"))
            if fleet.failure is not None:
                return await self._end(fleet.failure)
            if serving.done():
                serving.result()  # raises its error; it does not end without one
            self._announce()
            await self._pause()

    async def _end(self, outcome: FleetOutcome) -> FleetOutcome:
        """Drain everything; a second signal, or the end of all patience, kills it."""
        fleet, before = self._fleet, len(self._signals)
        began_s = time.monotonic()
        fleet.stop(began_s)
        limit_s = patience_s(self._plan.settings)
        while not fleet.is_gone:
            if len(self._signals) > max(1, before):
                signum = self._signals[-1]
                fleet.kill()
                return FleetOutcome(128 + signum, f"stopped at once by {signum.name}")
            if time.monotonic() - began_s > limit_s:
                fleet.kill()
                return FleetOutcome(1, f"the servers did not end within {limit_s:g} s and were killed")
            fleet.poll(time.monotonic())
            await self._pause()
        return outcome

    async def _pause(self) -> None:
        """Wait until a signal, or the next poll."""
        try:
            async with asyncio.timeout(_POLL_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _on_signal(self) -> None:
        self._signals += self._driver.signals()
        self._wake.set()

    @contextmanager
    def _control(self, keys: Keys) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        """The control endpoint, bound and serving."""
        plan, limits = self._plan, self._plan.serve.merged.config.server
        with bind(plan.host, plan.port) as listener:
            loopback = is_loopback(listener.getsockname()[0])
            limits = dataclasses.replace(limits, ssl_certfile=None, ssl_keyfile=None)
            server = HttpServer(ControlApi(self._fleet, limits, keys, loopback=loopback), limits)
            listener.listen(BACKLOG)
            logger.info("control endpoint url=%s", control_url(plan.host, plan.port))
            yield lambda: server.serve(sockets=[listener])

    def _announce(self) -> None:
        """Say once that all servers are there."""
        fleet = self._fleet
        if self._is_announced or fleet.num_ready < fleet.target:
            return
        self._is_announced = True
        names = [each.server.status.model for each in fleet.replicas if each.server and each.server.status]
        model = names[0] or "the model"
        typer.echo(ready_text(model, fleet.num_ready, control_url(self._plan.host, self._plan.port)))
        report_ready(f"{counted(fleet.num_ready, 'server')} of {model}")


def ready_text(model: str, num_servers: int, url: str) -> str:
    """Text shown when all servers are ready."""
    return (
        f"\nReady: {counted(num_servers, 'server')} of {model}\n"
        f"  The servers: curl {url}/replicas\n"
        f"  Another number: curl {url}/scale -d '{{\"replicas\": {num_servers + 1}}}'\n"
        "  Stop with Ctrl-C.\n"
    )


def control_url(host: str, port: int) -> str:
    """The address of the control endpoint on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
