"""`/openapi.json` and `/docs`, made from the route table and the structs at the first request.

The page is plain HTML without scripts, so that it works on machines without access to the internet.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from .error_shapes import shape_of
from .exchange import Exchange
from .guards.auth import KEY_HEADER_PATHS, OPEN_PATHS
from .routes import Route
from .schema.field_types import OVERRIDES
from .schema.protocol import NativeSampling

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
}
_EVERYWHERE: Final = (400, 401, 403, 408, 431, 500, 503)
_WITH_BODY: Final = (413, 415, 429)
_STREAMS: Final = {
    "text/event-stream": "events whose data are each a {name}; in OpenAI's older APIs [DONE] follows",
    "application/x-ndjson": "lines that are each a {name}",
}
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code,h2{font-family:ui-monospace,monospace}h2{font-size:1em;margin-top:2em}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.1em 1em .1em 0;vertical-align:top}"
)


class ApiDocs:
    """The description of an API, as JSON and as a page."""

    def __init__(self, routes: Sequence[Route], version: str, *, needs_key: bool = False) -> None:
        self._routes = routes
        self._version = version
        self._needs_key = needs_key
        self._document: dict[str, Any] | None = None

    async def serve_json(self, exchange: Exchange) -> None:
        """The OpenAPI 3.1 document."""
        await exchange.send_json(self.document())

    async def serve_page(self, exchange: Exchange) -> None:
        """The HTML page."""
        await exchange.send_bytes(self.page().encode(), b"text/html; charset=utf-8")

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
            for route in self._routes:
                operation = _operation(route, schema_of)
                if self._needs_key and route.path in OPEN_PATHS:
                    operation["security"] = []
                if route.path in KEY_HEADER_PATHS:
                    keys: list[dict[str, Any]] = [{"bearer": []}, {"x-api-key": []}]
                    operation["security"] = keys if self._needs_key else [{}, *keys]
                paths.setdefault(route.path, {})[route.method.lower()] = operation
            self._document = {
                "openapi": "3.1.0",
                "info": {"title": "engine", "version": self._version},
                "paths": paths,
                "components": {
                    "schemas": _with_overrides(schemas),
                    "securitySchemes": {
                        "bearer": {"type": "http", "scheme": "bearer"},
                        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                    },
                },
                "security": [{"bearer": []}] if self._needs_key else [{}, {"bearer": []}],
            }
        return self._document

    def page(self) -> str:
        """The HTML page."""
        document = self.document()
        schemas = document["components"]["schemas"]
        parts = [
            f"<!doctype html><meta charset=utf-8><title>engine API</title><style>{_STYLE}</style>",
            f"<h1>engine {html.escape(self._version)}</h1>",
            "<p>As a schema: <a href=/openapi.json>/openapi.json</a>. "
            "Errors have the form of the API that a path belongs to.</p>",
        ]
        for route in self._routes:
            parts.append(
                f"<h2>{route.method} {html.escape(route.path)}</h2><p>{html.escape(route.summary)}</p>"
            )
            if route.request is not None:
                parts.extend(_table(schemas[route.request.__name__]))
        return "".join(parts)


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


def _types_of(route: Route) -> Iterator[Any]:
    """The types of its JSON bodies."""
    yield from (each for each in (route.request, route.answer, route.events) if each is not None)


def _operation(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": {"200": _success(route, schema_of)}
        | {str(code): _failure(code, route.path) for code in _fails(route)},
    }
    if route.request is not None:
        content = {"application/json": {"schema": schema_of[route.request]}}
        operation["requestBody"] = {"required": not route.bodiless, "content": content}
    if "{" in route.path:
        name = route.path[route.path.index("{") + 1 : route.path.index("}")]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
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


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    yield "<table>"
    for name, field in schema["properties"].items():
        kind = "required" if name in required else "optional"
        cells = (f"<code>{html.escape(name)}</code>", html.escape(_type_of(field)), kind)
        yield "<tr>" + "".join(f"<td>{cell}" for cell in (*cells, html.escape(_about(field))))
    yield "</table>"


def _about(field: Mapping[str, Any]) -> str:
    """The description of a field, or of one of its types."""
    options = (field, *field.get("anyOf", ()))
    return next((str(option["description"]) for option in options if "description" in option), "")


def _type_of(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_of(option) for option in field["anyOf"] if option.get("type") != "null")
    if "$ref" in field:
        return "object"
    kind = str(field.get("type", "any"))
    return f"{kind} of {_type_of(field['items'])}" if kind == "array" and "items" in field else kind
