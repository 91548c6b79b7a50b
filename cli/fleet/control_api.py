"""`ControlApi`: the HTTP endpoint of a fleet: `GET /health`, `GET /replicas`, `POST /scale`.

Bare ASGI with the same parts as the servers' API: keys, host names, origins, bodies and errors are those of a server
with the same settings. `/scale` affects all requests, so it needs the admin key, or without one a loopback address.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import RequestError
from ...supervisor.fleet.fleet import Fleet, Replica
from ...tokenizer_manager.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from ...tokenizer_manager.http.guards.auth import Authorizer, Keys
from ...tokenizer_manager.http.guards.body_budget import BodyBudget
from ...tokenizer_manager.http.guards.origins import Hosts, Origins
from ...tokenizer_manager.http.schema.errors import MethodNotAllowedError, reply_to
from ...tokenizer_manager.http.schema.json_body import parse_object
from ...tokenizer_manager.http.schema.values import convert, show

METHODS: Final = {"/health": "GET", "/replicas": "GET", "/scale": "POST"}
_MAX_BODY_BYTES: Final = 4096


class ScaleBody(msgspec.Struct):
    """The body of `/scale`."""

    replicas: int


class ControlApi:
    """The ASGI application; `config` and `keys` are those of the servers."""

    def __init__(self, fleet: Fleet, config: ServerConfig, keys: Keys, *, loopback: bool) -> None:
        """`loopback`: only this machine can connect to this endpoint."""
        self._fleet = fleet
        self._authorizer = Authorizer(keys, loopback=loopback)
        self._hosts = Hosts(config.allowed_host)
        self._origins = Origins(config.cors_origin)
        self._budget = BodyBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        exchange = Exchange(scope, receive, send)
        try:
            body, status = await self._handle(exchange)
            await exchange.send_json(body, status)
        except ClientGone:
            return
        except Exception as error:  # a request is answered even if its handler has a bug
            reply = reply_to(error, exchange.request_id)
            await exchange.send_json(reply.body, reply.status, reply.headers)

    async def _handle(self, exchange: Exchange) -> tuple[dict[str, Any], int]:
        """The body of the answer, and its status."""
        if not self._authorizer.needs_key:
            self._origins.check(exchange.headers)
        if self._authorizer.trusts_this_machine:
            self._hosts.check(exchange.headers)
        fleet, path = self._fleet, exchange.path
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
        counts = {"target": fleet.target, "ready": fleet.num_ready}
        if path == "/health":
            is_well = fleet.num_ready > 0 and fleet.target > 0
            return {"status": "ok" if is_well else "not ready", **counts}, 200 if is_well else 503
        if path == "/scale":
            self._authorizer.check_admin(caller, path)
            fleet.scale_to(await self._wanted_replicas(exchange))
            counts["target"] = fleet.target
        return {**counts, "replicas": [_replica(each) for each in fleet.replicas]}, 200

    async def _wanted_replicas(self, exchange: Exchange) -> int:
        with self._budget.reserve() as reservation:
            body = await exchange.body(_MAX_BODY_BYTES, reservation)
        fields = parse_object(body)
        if unknown := fields.keys() - {"replicas"}:
            raise RequestError(
                f'{show(min(unknown))} is no field of /scale; send {{"replicas": 2}}', param=min(unknown)
            )
        if not self._fleet.target:
            raise RequestError("the fleet ends; nothing is scaled any more", code="draining", status=503)
        return convert(fields, ScaleBody).replicas


def _replica(replica: Replica) -> dict[str, Any]:
    server = replica.server
    status = server.status if server else None
    return {
        "replica": replica.number,
        "state": replica.phase,
        "url": status.url if status else None,
        "pid": status.pid if status else None,
        "where": server.where if server else None,
        "failures": len(replica.failed_s),
        "last_failure": replica.last_failure or None,
    }
