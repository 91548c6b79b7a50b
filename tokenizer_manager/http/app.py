"""`App`: the ASGI application; runs the guards, finds the handler, and turns every exception into a response.

Bare ASGI and no framework, by measurement (2 cores, Python 3.11, one JSON route, in process): with Litestar 2.25 the
process starts 250 ms later, is 22 MB larger and spends 28-40 us per request instead of 2. Its features do not fit
either: bodies are decoded here (OpenAI error objects with paths, duplicate keys, NaN), it does not tell a non-streaming
handler that the client disconnected, it only raises for an error after the response has begun (a stream must end with
an error event), and it merges slashes in paths, which the key check must see as sent.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from ...runtime.errors import RequestError
from .access_log import AccessLog, NoAccessLog, show_word
from .batch_runner.lines import LineAnswer
from .exchange import ClientGone, Exchange, LineChecked, Receive, Scope, Send
from .guards.auth import Caller, key_of
from .guards.origins import Hosts, Origins
from .page.endpoints import PAGE_ENDPOINTS
from .page.files import PageFiles
from .reference.openapi import ApiDocs
from .route import Handler, Route
from .routes import ROUTES
from .schema.cache_fields import session_header
from .schema.errors import ErrorObject, MethodNotAllowedError, reply_to, shape_of
from .services import Services

logger = logging.getLogger(__name__)

_CLIENT_GONE: Final = 499  # for the metrics; it is not sent
_NEAR: Final = 0.8
"""Similarity of a path that is suggested."""
_WEIGHTS_STAY: Final = (
    "the weights of a running server do not change: load an adapter by /v1/load_lora_adapter, or restart it"
)
_MEMORY_STAYS: Final = "a running server keeps its memory: pause it with /pause_generation, or stop it"
_NOT_SERVED: Final = {
    "/update_weights_from_disk": _WEIGHTS_STAY,
    "/update_weights_from_tensor": _WEIGHTS_STAY,
    "/update_weights_from_distributed": _WEIGHTS_STAY,
    "/init_weights_update_group": _WEIGHTS_STAY,
    "/init_weight_transfer_engine": _WEIGHTS_STAY,
    "/update_weights": _WEIGHTS_STAY,
    "/load_lora_adapter_from_tensors": "adapters are read from folders: use /v1/load_lora_adapter with lora_path",
    "/release_memory_occupation": _MEMORY_STAYS,
    "/resume_memory_occupation": _MEMORY_STAYS,
    "/sleep": _MEMORY_STAYS,
    "/wake_up": _MEMORY_STAYS,
}
"""Paths of SGLang and vLLM that trainers call and that are not here -> what to do instead."""


class App:
    """The HTTP side of one engine."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._authorizer = services.authorizer
        server = services.config.server
        self._hosts = Hosts(server.allowed_host)
        self._origins = Origins(server.cors_origin, own=self._hosts if server.page else None)
        self._page = PageFiles(enabled=server.page)
        self._docs = ApiDocs(
            ROUTES,
            services.version,
            model=services.served_model,
            tls=server.ssl_certfile is not None,
            needs_key=services.authorizer.needs_key,
            model_defaults=services.sampling_defaults.values(),
        )
        self._access_log = AccessLog() if services.config.log.log_requests else NoAccessLog()
        self._exact: dict[str, dict[str, Route]] = {}
        self._around: dict[tuple[str, str], dict[str, Route]] = {}  # (before the name, after it)
        for route in ROUTES:
            before, brace, rest = route.path.partition("{")
            if brace:
                after = rest.partition("}")[2]
                self._around.setdefault((before, after), {})[route.method] = route
            else:
                self._exact.setdefault(before, {})[route.method] = route
        for path, answer in (("/openapi.json", self._docs.serve_json), ("/docs", self._docs.serve_page)):
            self._exact[path] = {"GET": Route("GET", path, _without_services(answer), "What there is.")}
        if server.page:
            for path, handler in PAGE_ENDPOINTS.items():
                self._exact[path] = {"POST": Route("POST", path, handler, "Part of the page.")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        await self._run(Exchange(scope, receive, send), self._guarded)

    async def answer_line(
        self, path: str, body: bytes, owner: str, *, request_id: str, seed: int
    ) -> LineAnswer:
        """Answer a line of a batch, as if `owner` had sent it by POST over HTTP; a cancellation is a disconnect.

        Args:
            path: of the endpoint.
            body: JSON.
            owner: see `Caller.owner`.
            request_id: of the line.
            seed: for a request that has none.
        """
        parts: list[bytes] = []
        arriving = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            return arriving.pop() if arriving else await asyncio.get_running_loop().create_future()

        async def send(message: MutableMapping[str, Any]) -> None:
            parts.append(message.get("body", b""))

        exchange = self._line_exchange(path, owner, receive, send, request_id)
        exchange.line_seed = seed
        await self._run(exchange, self._dispatch)
        return LineAnswer(exchange.status, b"".join(parts), exchange.error_code)

    def check_line(self, path: str, body: dict[str, Any], owner: str) -> None:
        """Read a line of a batch as its endpoint does, and no more; on any thread, as a read shares nothing.

        Raises:
            RequestError: the endpoint's reader refuses it.
        """
        exchange = self._line_exchange(path, owner, _never, _never)
        exchange.line_seed = 0
        exchange.checked_body = body
        try:
            self._dispatch(exchange).send(None)
        except LineChecked:
            return
        except RequestError as error:
            if error.status == 400:
                raise
        except Exception:
            logger.exception("bug in the reader of %s; the line gets its answer when it runs", path)

    def _line_exchange(
        self, path: str, owner: str, receive: Receive, send: Send, request_id: str = "batch"
    ) -> Exchange:
        headers = [(b"x-request-id", request_id.encode())]
        scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        exchange = Exchange(scope, receive, send)
        exchange.caller = self._authorizer.caller_of(owner)
        return exchange

    async def _run(self, exchange: Exchange, handle: Callable[[Exchange], Awaitable[None]]) -> None:
        exchange.started_s = self._services.manager.now_s()
        try:
            await handle(exchange)
        except ClientGone:
            exchange.status = _CLIENT_GONE
        except Exception as error:  # a request is answered even if its handler has a bug
            await _answer(exchange, error)
        exchange.status = exchange.status or _CLIENT_GONE
        ended_s = self._services.manager.now_s()
        self._services.metrics.http_responses.add(str(exchange.status))
        self._services.traces.ended(exchange, ended_s)
        self._access_log.ended(exchange, ended_s)

    async def _guarded(self, exchange: Exchange) -> None:
        if b"origin" in exchange.headers:
            exchange.more_headers += self._origins.headers_for(exchange.headers)
            if (answer := self._origins.preflight(exchange.method, exchange.headers)) is not None:
                await exchange.send_nothing(answer)
                return
            if not self._authorizer.needs_key:
                self._origins.check(exchange.headers)
        if self._authorizer.trusts_this_machine:
            self._hosts.check(exchange.headers)
        if (file := self._page.find(exchange)) is not None:
            await self._page.send(exchange, file)
            return
        key = exchange.bearer_token or key_of(exchange.path, exchange.headers)
        if self._page.opens(exchange) and not key:
            exchange.caller = Caller(admin=False)
        else:
            caller = self._authorizer.authenticate(exchange.path, key)
            exchange.caller = caller._replace(session_header=session_header(exchange.headers))
        await self._dispatch(exchange)

    async def _dispatch(self, exchange: Exchange) -> None:
        route = self._find(exchange)
        if route.admin:
            self._authorizer.check_admin(exchange.caller, exchange.path)
        await route.handler(exchange, self._services)

    def _find(self, exchange: Exchange) -> Route:
        path = exchange.path
        handlers = self._exact.get(path)
        if handlers is None:
            handlers = next(
                (
                    handlers
                    for (before, after), handlers in self._around.items()
                    if path.startswith(before) and path[len(before) :].endswith(after)
                ),
                None,
            )
        if handlers is None:
            raise _no_endpoint(path, self._exact)
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in handlers:
            message = f"{path} does not take {exchange.method}; use {' or '.join(handlers)}"
            raise MethodNotAllowedError(message, [*handlers, *(["HEAD"] if "GET" in handlers else [])])
        return handlers[method]


async def _never(*_: object) -> Any:
    raise AssertionError("a line that is only checked neither receives nor sends")


def _no_endpoint(path: str, known: Iterable[str]) -> RequestError:
    near = difflib.get_close_matches(path, known, n=1, cutoff=_NEAR)
    if path in _NOT_SERVED:
        hint = _NOT_SERVED[path]
    elif f"/v1{path}" in known:
        hint = f"use /v1{path} (a base URL of OpenAI clients ends in /v1)"
    elif near:
        hint = f"did you mean {near[0]}? /docs lists what there is"
    else:
        hint = "/docs lists what there is"
    return RequestError(f"there is no {path} here; {hint}", code="not_found", status=404)


def _without_services(answer: Callable[[Exchange], Awaitable[None]]) -> Handler:
    """A handler that does not use the services."""
    return lambda exchange, _: answer(exchange)


def _logged_param(error: ErrorObject) -> str | None:
    """The field at fault as the log has it: an unknown one, which the client named, as the object that has it."""
    param = error.param
    if param is not None and error.code == "unknown_field":
        param = param.rpartition(".")[0] or None
    return None if param is None else show_word(param)


async def _answer(exchange: Exchange, error: Exception) -> None:
    """Send an error: as a response with a status, or as an event if the stream has begun."""
    reply = reply_to(error, exchange.request_id)
    exchange.error_code = reply.body.error.code or "error"
    level = (
        logging.WARNING if reply.status == 500 else logging.INFO
    )  # load balancers poll /health during a drain
    logger.log(
        level,
        "request failed request_id=%s path=%s status=%d code=%s param=%s",
        exchange.request_id,
        show_word(exchange.path),
        reply.status,
        reply.body.error.code,
        _logged_param(reply.body.error),
    )
    shape = shape_of(exchange.path)
    if exchange.streaming:
        write = exchange.failure_event
        end = shape.event(reply, exchange.request_id) if write is None else write(reply)
        await exchange.end_events(end)
    elif exchange.status == 0:
        await exchange.send_json(shape.body(reply, exchange.request_id), reply.status, reply.headers)
