"""`/openapi.json` and `/docs`, made from the route table and the structs at the first request; `reference_page.py`
writes the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..exchange import Exchange
from ..guards.auth import OPEN_PATHS, takes_key_header
from ..native.wire import NativeSampling
from ..page.files import security_headers
from ..route import Route
from ..schema.errors import shape_of
from ..schema.field_types import OVERRIDES
from .field_notes import BODIES, PATH_PARTS, with_notes
from .reference_page import render_reference

_REF: Final = "#/components/schemas/{name}"
_FAILURES: Final = {
    400: "the request, or a field of it, is not valid",
    401: "the server requires an API key, and the request has no valid one",
    403: "it needs the admin key, or comes from a web page that is not allowed",
    404: "there is no such path, model or request",
    408: "the request did not arrive in time",
    409: "it conflicts with the current state of the server",
    413: "the body is too large",
    415: "the body is compressed",
    429: "there is no room for it now; see Retry-After",
    431: "the request's head is too large",
    500: "this request failed alone",
    501: "this server has no such feature",
    503: "the engine is not available",
    504: "it did not end within its timeout",
    507: "there is no room to store it",
}
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
"""A `Host` header that can stand in an example."""
_EVERYWHERE: Final = (400, 401, 403, 408, 431, 500, 503)
_WITH_BODY: Final = (413, 415, 429)
_STREAMS: Final = {
    "text/event-stream": "events whose data are each a {name}; in OpenAI's older APIs [DONE] follows",
    "application/x-ndjson": "lines that are each a {name}",
}


class ApiDocs:
    """The description of an API, as JSON and as a page."""

    def __init__(
        self,
        routes: Sequence[Route],
        version: str,
        *,
        model: str = "model",
        tls: bool = False,
        needs_key: bool = False,
        model_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Describe `routes`.

        Args:
            routes: the route table.
            version: of the engine.
            model: name of the served model, for examples.
            tls: the server speaks HTTPS.
            needs_key: requests must have an API key.
            model_defaults: sampling fields for which this server takes other defaults, by name.
        """
        self._routes = routes
        self._version = version
        self._model = model
        self._scheme = "https" if tls else "http"
        self._needs_key = needs_key
        self._model_defaults = model_defaults or {}
        self._document: dict[str, Any] | None = None

    async def serve_json(self, exchange: Exchange) -> None:
        """The OpenAPI 3.1 document."""
        await exchange.send_json(self.document())

    async def serve_page(self, exchange: Exchange) -> None:
        """The HTML page."""
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        url = f"{self._scheme}://{host if _HOST.fullmatch(host) else '127.0.0.1:30000'}"
        page, policy = render_reference(self.document(), url)
        headers = security_headers(policy)
        await exchange.send_bytes(page.encode(), b"text/html; charset=utf-8", headers=headers)

    def document(self) -> dict[str, Any]:
        """The OpenAPI 3.1 document."""
        if self._document is None:
            types = [each for route in self._routes for each in _types_of(route)]
            shapes, schemas = msgspec.json.schema_components(
                [*types, NativeSampling, *{shape_of(route.path).kind for route in self._routes}],
                ref_template=_REF,
            )
            schema_of = dict(zip(types, shapes, strict=False))
            for each in types:
                schemas.get(getattr(each, "__name__", ""), {}).update(_either(getattr(each, "one_of", ())))
            paths: dict[str, Any] = {}
            num_with_name: Counter[str] = Counter()
            for route in self._routes:
                operation = _operation(route, schema_of, self._model)
                num_with_name[operation["operationId"]] += 1
                if (number := num_with_name[operation["operationId"]]) > 1:  # one handler at several paths
                    operation["operationId"] += f"_{number}"
                if self._needs_key and route.path in OPEN_PATHS:
                    operation["security"] = []
                if takes_key_header(route.path):
                    keys: list[dict[str, Any]] = [{"bearer": []}, {"x-api-key": []}]
                    operation["security"] = keys if self._needs_key else [{}, *keys]
                paths.setdefault(route.path, {})[route.method.lower()] = operation
            schemas = _with_overrides(schemas)
            requests = {each.__name__ for route in self._routes if (each := route.request) is not None}
            requests.add(NativeSampling.__name__)
            with_notes({name: schemas[name] for name in requests}, self._model_defaults)
            self._document = {
                "openapi": "3.1.0",
                "info": {"title": "engine", "version": self._version},
                "paths": paths,
                "components": {
                    "schemas": schemas,
                    "securitySchemes": {
                        "bearer": {"type": "http", "scheme": "bearer"},
                        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                    },
                },
                "security": [{"bearer": []}] if self._needs_key else [{}, {"bearer": []}],
            }
        return self._document


def _with_overrides(schema: Any) -> Any:
    """A schema with the overrides of `field_types` moved to their fields."""
    if isinstance(schema, list):
        return [_with_overrides(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _with_overrides(value) for key, value in schema.items() if key != OVERRIDES}
    return plain | schema.get(OVERRIDES, {})


def _either(names: Sequence[str]) -> dict[str, Any]:
    """A rule that exactly one of these fields is present."""
    given = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]
    return {"oneOf": given} if given else {}


_QUERY: Final[Mapping[str, dict[str, Any]]] = {
    "after": {"description": "The id of the last one before the page.", "schema": {"type": "string"}},
    "after_id": {"description": "The id of the last one before the page.", "schema": {"type": "string"}},
    "before_id": {"description": "The id of the first one after the page.", "schema": {"type": "string"}},
    "limit": {"description": "The most of a page.", "schema": {"type": "integer", "minimum": 1}},
    "order": {"description": "By time.", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    "purpose": {"description": "Only files of it.", "schema": {"enum": ["batch", "batch_output"]}},
    "stream": {"description": "Send the events.", "schema": {"type": "boolean", "default": False}},
    "fail_on_no_slot": {
        "description": "1: 503 if no further request can run.",
        "schema": {"enum": ["0", "1"]},
    },
    "action": {
        "description": "What to do with its file.",
        "schema": {"enum": ["save", "restore", "erase"]},
    },
    "starting_after": {
        "description": "The number of the last event before the first one that is sent.",
        "schema": {"type": "integer", "minimum": 0},
    },
}


def _types_of(route: Route) -> Iterator[Any]:
    """The types of its JSON bodies."""
    yield from (each for each in (route.request, route.answer, route.events) if each is not None)


def _operation(route: Route, schema_of: Mapping[Any, Any], model: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": {"200": _success(route, schema_of)}
        | {str(code): _failure(code, route.path) for code in _fails(route)},
    }
    if route.request is not None:
        example = BODIES[route.method, route.path]
        content = {route.request_type: {"schema": schema_of[route.request], "example": example}}
        operation["requestBody"] = {"required": not route.bodiless, "content": content}
    if route.query:
        operation["parameters"] = [_QUERY[name] | {"name": name, "in": "query"} for name in route.query]
    if "{" in route.path:
        name = route.path[route.path.index("{") + 1 : route.path.index("}")]
        parameter: dict[str, Any] = {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
        }
        parameter["example"] = PATH_PARTS.get(name, model)
        operation["parameters"] = [parameter, *operation.get("parameters", ())]
    return operation


def _success(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    """A stream's schema describes each event: OpenAPI 3.1 cannot describe a sequence of events."""
    answer = {"type": "string"} if route.answer is None else schema_of[route.answer]
    content: dict[str, Any] = {route.media_type: {"schema": answer}}
    description = "success"
    if route.events is not None:
        content[route.stream_type] = {"schema": _stream(route, schema_of)}
        description += f"; with `stream`, {_STREAMS[route.stream_type].format(name=route.events.__name__)}"
    return {"description": description, "content": content}


def _stream(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = schema_of[route.events]
    if route.stream_type != "text/event-stream":
        return schema
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _fails(route: Route) -> list[int]:
    return sorted({*_EVERYWHERE, *(_WITH_BODY if route.request is not None else ()), *route.fails})


def _failure(status: int, path: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=shape_of(path).kind.__name__)}
    return {"description": _FAILURES[status], "content": {"application/json": {"schema": schema}}}
