"""`ControlApi`: the HTTP endpoint of a fleet: `GET /health`, `GET /replicas`, `POST /scale`.

Bare ASGI with the same parts as the servers' API: keys, host names, origins, bodies and errors are those of a server
with the same settings. `/scale` affects all requests, so it needs the admin key, or without one a loopback address.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import RequestError
from ...supervisor.fleet.fleet import Fleet
from ...supervisor.fleet.replica import Phase, Replica
from ...tokenizer_manager.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from ...tokenizer_manager.http.guards.auth import Authorizer, Keys
from ...tokenizer_manager.http.guards.body_budget import BodyBudget
from ...tokenizer_manager.http.guards.origins import Hosts, Origins
from ...tokenizer_manager.http.schema.errors import MethodNotAllowedError, reply_to
from ...tokenizer_manager.http.schema.json_body import parse_object
from ...tokenizer_manager.http.schema.values import convert, show

logger = logging.getLogger(__name__)

METHODS: Final = {"/health": "GET", "/replicas": "GET", "/scale": "POST"}
_MAX_BODY_BYTES: Final = 4096


class ScaleBody(msgspec.Struct):
    """The body of `/scale`."""

    replicas: int


class ReplicaBody(msgspec.Struct):
    """One replica.

    Attributes:
        where: its machine, or what it waits for.
        queue_tokens, busy: its load; None before its first report.
        failures: within five minutes before the last one, which counts.
        last_failure: null if none has failed.
    """

    replica: int
    state: Phase
    url: str | None
    pid: int | None
    where: str | None
    queue_tokens: int | None
    busy: float | None
    failures: int
    last_failure: str | None


class FleetBody(msgspec.Struct):
    """The fleet.

    Attributes:
        target: how many replicas there should be.
        ready: how many serve.
    """

    target: int
    ready: int
    replicas: list[ReplicaBody]


class HealthBody(msgspec.Struct):
    """Whether requests can be served."""

    status: str
    target: int
    ready: int


class ControlApi:
    """The ASGI application."""

    def __init__(
        self,
        fleet: Fleet,
        config: ServerConfig,
        keys: Keys,
        *,
        loopback: bool,
    ) -> None:
        """Serve.

        Args:
            fleet: the fleet to report and to scale.
            config: of the servers.
            keys: of the servers.
            loopback: only this machine can connect to this endpoint.
        """
        self._fleet = fleet
        self._authorizer = Authorizer(keys, loopback=loopback)
        self._hosts = Hosts(config.allowed_host)
        self._origins = Origins(config.cors_origin)
        self._budget = BodyBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        exchange = Exchange(scope, receive, send)
        try:
            await self._handle(exchange)
        except ClientGone:
            return
        except Exception as error:  # a request is answered even if its handler has a bug
            reply = reply_to(error, exchange.request_id)
            await exchange.send_json(reply.body, reply.status, reply.headers)

    async def _handle(self, exchange: Exchange) -> None:
        if not self._authorizer.needs_key:
            self._origins.check(exchange.headers)
        if self._authorizer.trusts_this_machine:
            self._hosts.check(exchange.headers)
        path = exchange.path
        caller = self._authorizer.authenticate(path, exchange.bearer_token)
        wanted = METHODS.get(path)
        if wanted is None:
            raise RequestError(
                f"there is no {show(path)} here, only {', '.join(METHODS)}; models are served at the addresses in "
                "/replicas",
                code="not_found",
                status=404,
            )
        if ("GET" if exchange.method == "HEAD" else exchange.method) != wanted:
            raise MethodNotAllowedError(f"{path} does not take {exchange.method}; use {wanted}", [wanted])
        if path == "/health":
            await self._health(exchange)
        elif path == "/scale":
            self._authorizer.check_admin(caller, path)
            await self._scale(exchange)
        else:
            await exchange.send_json(self._body())

    async def _health(self, exchange: Exchange) -> None:
        fleet = self._fleet
        is_well = fleet.num_ready > 0 and fleet.target > 0
        body = HealthBody("ok" if is_well else "not ready", fleet.target, fleet.num_ready)
        await exchange.send_json(body, 200 if is_well else 503)

    async def _scale(self, exchange: Exchange) -> None:
        with self._budget.reserve() as reservation:
            body = await exchange.body(_MAX_BODY_BYTES, reservation)
        fields = parse_object(body)
        if unknown := fields.keys() - {"replicas"}:
            raise RequestError(
                f'{show(min(unknown))} is no field of /scale; send {{"replicas": 2}}', param=min(unknown)
            )
        if not self._fleet.target:
            raise RequestError("the fleet ends; nothing is scaled any more", code="draining", status=503)
        self._fleet.scale_to(convert(fields, ScaleBody).replicas)
        await exchange.send_json(self._body())

    def _body(self) -> FleetBody:
        fleet = self._fleet
        each = [_replica(replica) for replica in fleet.replicas]
        return FleetBody(fleet.target, fleet.num_ready, each)


def _replica(replica: Replica) -> ReplicaBody:
    server, load = replica.server, replica.load
    return ReplicaBody(
        replica.number,
        replica.phase,
        None if server is None else server.url,
        None if server is None else server.pid,
        None if server is None else server.where,
        None if load is None else load.queue_tokens,
        None if load is None else round(load.busy, 4),
        replica.restarts.count,
        replica.last_failure or None,
    )
