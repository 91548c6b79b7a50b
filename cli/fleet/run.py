"""`run_fleet`: one fleet from its start to its end: its loop, its control endpoint, its router and its signals."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import tempfile
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
from ...supervisor.fleet.router import END_GRACE_S as ROUTER_GRACE_S
from ...supervisor.fleet.router import FleetRouter, NoRouter, Router
from ...supervisor.fleet.server import LocalServers, ServerCommand, Servers
from ...supervisor.fleet.worker_list import NoWorkerList, WorkerList
from ..route.smg import RouterAddress, smg_command
from ..service_manager import report_ready
from .serve_arguments import ServeArguments

logger = logging.getLogger(__name__)

_TITLE: Final = "engine: fleet"
_MODULE: Final = f"{__package__.rsplit('.', 1)[0]}.main"
_LOOK_S: Final = 0.1
_ASK_S: Final = 1.0
_LIST_NAME: Final = "workers.json"

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
        router: where the router listens; None: no router.
        smg: the program.
        policy: of the router.
    """

    settings: FleetSettings
    serve: ServeArguments
    on_ray: bool
    host: str
    port: int
    worker_list: Path | None
    router: RouterAddress | None
    smg: str
    policy: str


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
        if path is None and plan.router is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-fleet-"))
            path = Path(folder) / _LIST_NAME
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
        self._tokenizer_path: str | None = None
        self._router: Router = NoRouter()
        if plan.router is not None:
            self._router = FleetRouter(self._router_command, plan.settings.max_restarts)
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
                    self._router.kill()
                    for task in duties:
                        task.cancel()
                    await asyncio.gather(*duties, return_exceptions=True)

    async def _run(self, duties: list[asyncio.Task[None]]) -> FleetOutcome:
        fleet, router = self._fleet, self._router
        while True:
            now_s = time.monotonic()
            fleet.look(now_s)
            router.look(now_s)
            if self._signals:
                logger.info("draining signal=%s", self._signals[0].name)
                return await self._end(FleetOutcome(0, "stopped"))
            if fleet.failure is not None:
                return await self._end(fleet.failure)
            if router.failure:
                return await self._end(FleetOutcome(1, router.failure))
            for task in duties:
                if task.done():
                    task.result()  # raises its error; none of them ends without one
            self._announce()
            await self._pause()

    async def _end(self, outcome: FleetOutcome) -> FleetOutcome:
        """Drain everything; a second signal, or the end of all patience, kills it."""
        fleet, router, before = self._fleet, self._router, len(self._signals)
        began_s = time.monotonic()
        fleet.stop(began_s)
        router.stop()
        patience_s = self._plan.settings.drain_s + max(END_GRACE_S, ROUTER_GRACE_S) + 5.0
        while not (fleet.is_gone and router.is_gone):
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
            if self._tokenizer_path is None and (ready := self._ready_url()) is not None:
                self._tokenizer_path = await probe.tokenizer_path(ready)
            await asyncio.sleep(_ASK_S)

    def _ready_url(self) -> str | None:
        urls = [each.url for each in self._fleet.to_ask()]
        return urls[0] if urls and self._fleet.num_ready else None

    def _on_signal(self, signum: signal.Signals) -> None:
        self._signals.append(signum)
        self._wake.set()

    def _router_command(self) -> list[str] | None:
        """Of smg, once a server has said where its tokenizer is."""
        if self._tokenizer_path is None or self._plan.router is None:
            return None
        assert isinstance(self._listing, WorkerList)
        return smg_command(
            self._plan.smg,
            self._listing.path,
            self._plan.router,
            policy=self._plan.policy,
            tokenizer_path=self._tokenizer_path,
            api_key=self._key,
            more=(),
        )

    @contextmanager
    def _control(self) -> Iterator[Serving]:
        """The control endpoint, bound and serving."""
        from ...tokenizer_manager.http.server import BACKLOG, HttpServer, bind, is_loopback
        from .control_api import ControlApi

        plan, limits = self._plan, self._plan.serve.merged.config.server
        with bind(plan.host, plan.port) as listener:
            address = listener.getsockname()[0]
            api = ControlApi(
                self._fleet, self._router, self._router_url, limits, self._keys, loopback=is_loopback(address)
            )
            limits = dataclasses.replace(limits, ssl_certfile=None, ssl_keyfile=None)
            server = HttpServer(api, limits)
            listener.listen(BACKLOG)
            logger.info("control endpoint url=%s", self.control_url)
            yield lambda: server.serve(sockets=[listener])

    @property
    def control_url(self) -> str:
        """Where the control endpoint listens."""
        return _url(self._plan.host, self._plan.port)

    @property
    def _router_url(self) -> str | None:
        router = self._plan.router
        return None if router is None else _url(router.host, router.port)

    def _announce(self) -> None:
        """Say once that all servers are there."""
        fleet = self._fleet
        if self._is_announced or fleet.num_ready < fleet.target or self._router.state == "waiting":
            return
        self._is_announced = True
        model = next(
            (str(each.server.model) for each in fleet.replicas if each.server is not None), "the model"
        )
        typer.echo(ready_text(model, fleet.num_ready, self.control_url, self._router_url))
        report_ready(f"{counted(fleet.num_ready, 'server')} of {model}")


def ready_text(model: str, num_servers: int, control_url: str, router_url: str | None) -> str:
    """What a user sees when all servers are there."""
    lines = ["", f"Ready: {counted(num_servers, 'server')} of {model}"]
    if router_url is not None:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
        lines += [f"  Clients ask {router_url}:"]
        lines += [f"  curl {router_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"]
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
