"""`/openapi.json` and `/docs`, made from the route table and the request structs when first asked for.

The page is plain HTML without scripts, so that it works on machines that see no other.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from .errors import ErrorBody
from .exchange import Exchange
from .routes import Route

_REF: Final = "#/components/schemas/{name}"
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code,h2{font-family:ui-monospace,monospace}h2{font-size:1em;margin-top:2em}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.1em 1em .1em 0;vertical-align:top}"
)


class ApiDocs:
    """The description of an API, as JSON and as a page."""

    def __init__(self, routes: Sequence[Route], version: str) -> None:
        self._routes = routes
        self._version = version
        self._document: dict[str, Any] | None = None

    async def serve_json(self, exchange: Exchange) -> None:
        """The OpenAPI 3.1 document."""
        await exchange.send_json(self.document())

    async def serve_page(self, exchange: Exchange) -> None:
        """The page for people."""
        await exchange.send_bytes(self.page().encode(), b"text/html; charset=utf-8")

    def document(self) -> dict[str, Any]:
        """The OpenAPI 3.1 document."""
        if self._document is None:
            structs = [route.request for route in self._routes if route.request is not None]
            _, schemas = msgspec.json.schema_components([*structs, ErrorBody], ref_template=_REF)
            paths: dict[str, Any] = {}
            for route in self._routes:
                paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
            self._document = {
                "openapi": "3.1.0",
                "info": {"title": "engine", "version": self._version},
                "paths": paths,
                "components": {
                    "schemas": schemas,
                    "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
                },
                "security": [{}, {"bearer": []}],
            }
        return self._document

    def page(self) -> str:
        """The page for people."""
        document = self.document()
        schemas = document["components"]["schemas"]
        parts = [
            f"<!doctype html><meta charset=utf-8><title>engine API</title><style>{_STYLE}</style>",
            f"<h1>engine {html.escape(self._version)}</h1>",
            "<p>As a schema: <a href=/openapi.json>/openapi.json</a>. Errors are OpenAI error objects.</p>",
        ]
        for route in self._routes:
            parts.append(
                f"<h2>{route.method} {html.escape(route.path)}</h2><p>{html.escape(route.summary)}</p>"
            )
            if route.request is not None:
                parts.extend(_table(schemas[route.request.__name__]))
        return "".join(parts)


def _operation(route: Route) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorBody")}}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": {
            "200": {"description": "success"},
            "default": {"description": "OpenAI error object", "content": error},
        },
    }
    if route.request is not None:
        schema = {"$ref": _REF.format(name=route.request.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{" in route.path:
        name = route.path[route.path.index("{") + 1 : route.path.index("}")]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    yield "<table>"
    for name, field in schema["properties"].items():
        kind = "required" if name in required else "optional"
        cells = (f"<code>{html.escape(name)}</code>", html.escape(_type_of(field)), kind)
        yield "<tr>" + "".join(f"<td>{cell}" for cell in (*cells, html.escape(_about(field))))
    yield "</table>"


def _about(field: Mapping[str, Any]) -> str:
    """What is said of a field, also if that stands with one of its types."""
    options = (field, *field.get("anyOf", ()))
    return next((str(option["description"]) for option in options if "description" in option), "")


def _type_of(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_of(option) for option in field["anyOf"] if option.get("type") != "null")
    if "$ref" in field:
        return "object"
    kind = str(field.get("type", "any"))
    return f"{kind} of {_type_of(field['items'])}" if kind == "array" and "items" in field else kind
