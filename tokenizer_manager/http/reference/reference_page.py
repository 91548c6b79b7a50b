"""`render_reference`: the API's OpenAPI document as a page that works without scripts: contents, fields, examples.

Nothing is taken from elsewhere than the document, so the page and `/openapi.json` say the same.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

_GROUPS: Final = {
    "OpenAI": re.compile(r"/v1/(chat/|completions|responses|models)"),
    "Anthropic": re.compile(r"/v1/messages"),
    "Ollama": re.compile(r"/api/|/$"),
    "The engine's own": re.compile(r"/"),
}
"""Heading -> the paths below it; the first that matches."""
_LARGE: Final = 2**31 - 1  # a bound that is there only so that a value fits into a message
_PREFIX: Final = "#/components/schemas/"


def render_reference(document: Mapping[str, Any], url: str) -> tuple[str, str]:
    """The page, and the content policy to send with it.

    Args:
        document: of the API.
        url: of the server, for the examples.
    """
    style = (importlib.resources.files(__package__) / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return "".join(_page(document, url, style)), policy


def _page(document: Mapping[str, Any], url: str, style: str) -> Iterator[str]:
    operations = list(_operations(document))
    version = html.escape(document["info"]["version"])
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>engine API</title><style>{style}</style></head><body>"
        '<a class="skip" href="#top">Skip to the endpoints</a>'
    )
    yield from _contents(operations)
    yield f'<main id="top"><h1>engine API <small>{version}</small></h1>'
    yield (
        '<p>The same as a schema: <a href="openapi.json">openapi.json</a> (OpenAPI 3.1). Errors have the form of the '
        "API that a path belongs to. A field that is left out, or null, has its default.</p>"
    )
    if {} not in document["security"]:
        yield "<p>This server requires an API key: <code>Authorization: Bearer $ENGINE_API_KEY</code>.</p>"
    group = ""
    for name, method, path, operation in operations:
        if name != group:
            yield f"<h2>{html.escape(name)}</h2>"
            group = name
        yield from _endpoint(document, url, method, path, operation)
    yield "</main></body></html>"


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Group, method, path and operation of each endpoint, group by group."""
    for group in _GROUPS:
        for path, item in document["paths"].items():
            if next(name for name, pattern in _GROUPS.items() if pattern.match(path)) == group:
                for method, operation in item.items():
                    yield group, method.upper(), path, operation


def _contents(operations: list[tuple[str, str, str, Mapping[str, Any]]]) -> Iterator[str]:
    yield '<nav aria-label="Contents"><p><a href="./">Chat</a></p>'
    group = ""
    for name, method, path, _ in operations:
        if name != group:
            yield f"{'</ul>' if group else ''}<h2>{html.escape(name)}</h2><ul>"
            group = name
        yield (
            f'<li><a href="#{_anchor(method, path)}"><span>{method}</span> <code>{html.escape(path)}</code></a></li>'
        )
    yield "</ul></nav>"


def _endpoint(
    document: Mapping[str, Any],
    url: str,
    method: str,
    path: str,
    operation: Mapping[str, Any],
) -> Iterator[str]:
    anchor, schemas = _anchor(method, path), document["components"]["schemas"]
    yield (
        f'<section aria-labelledby="{anchor}"><h3 id="{anchor}"><a href="#{anchor}"><span>{method}</span> '
        f"<code>{html.escape(path)}</code></a></h3><p>{html.escape(operation['summary'])}</p>"
    )
    _, body = _body_of(operation)
    yield f'<pre tabindex="0"><code>{html.escape(curl(document, url, method, path))}</code></pre>'
    if query := _parameters_in(operation, "query"):
        yield from _fields(
            {
                "properties": {
                    each["name"]: each["schema"] | {"description": each["description"]} for each in query
                }
            }
        )
    if body is not None:
        name = body["schema"].get("$ref", "").removeprefix(_PREFIX)
        schema = schemas.get(name, body["schema"])
        yield from _fields(schema)
        for field, nested in _nested(schema, schemas):
            yield f"<h4><code>{html.escape(field)}</code></h4>"
            yield from _fields(nested)
    yield from _responses(operation)
    yield "</section>"


def _body_of(operation: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """The media type of the body, and its description; None without a body."""
    return next(iter(operation.get("requestBody", {}).get("content", {}).items()), ("", None))


def _parameters_in(operation: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """The parameters in the path, or in the query after it."""
    return [each for each in operation.get("parameters", ()) if each["in"] == where]


def curl(document: Mapping[str, Any], url: str, method: str, path: str) -> str:
    """An example of a call, as a command for a shell."""
    operation = document["paths"][path][method.lower()]
    for parameter in _parameters_in(operation, "path"):
        path = path.replace(f"{{{parameter['name']}}}", str(parameter["example"]))
    media_type, content = _body_of(operation)
    words = ["curl"]
    if content is not None and content.get("example", {}).get("stream"):
        words.append("-N")
    if method != ("GET" if content is None else "POST"):  # which curl takes
        words += ["-X", method]
    words.append(shlex.quote(url + path))
    lines = [" ".join(words)]
    security = operation.get("security", document["security"])
    if security and {} not in security:
        lines.append('-H "Authorization: Bearer $ENGINE_API_KEY"')
    if content is not None and media_type == "multipart/form-data":
        lines += [f"-F {name}={shlex.quote(value)}" for name, value in content["example"].items()]
    elif content is not None:
        lines.append("-H 'Content-Type: application/json'")
        lines.append(f"-d {shlex.quote(json.dumps(content['example']))}")
    return " \\\n  ".join(lines)


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    properties = schema.get("properties", {})
    if not properties:
        return
    yield (
        '<div class="wide" tabindex="0" role="region" aria-label="Fields"><table><thead><tr><th scope="col">Field</th>'
        '<th scope="col">Type</th><th scope="col">Default</th><th scope="col">Range</th><th scope="col">Meaning</th>'
        "</tr></thead><tbody>"
    )
    for name in sorted(properties, key=lambda name: name not in required):
        field = properties[name]
        default = field.get("default")
        value = "<b>required</b>" if name in required else "" if default is None else _code(default)
        cells = (
            html.escape(_type_of(field)),
            value,
            html.escape(_range_of(field)),
            html.escape(_about(field)),
        )
        yield f'<tr><th scope="row"><code>{html.escape(name)}</code></th>'
        yield "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"


def _nested(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of a request that are objects with fields of their own."""
    for name, field in schema.get("properties", {}).items():
        for option in (field, *field.get("anyOf", ())):
            if "$ref" in option:
                yield name, schemas[option["$ref"].removeprefix(_PREFIX)]


def _responses(operation: Mapping[str, Any]) -> Iterator[str]:
    yield "<details><summary>Responses</summary><dl>"
    for status, response in operation["responses"].items():
        kinds = ", ".join(response["content"])
        yield f"<dt>{html.escape(status)}</dt><dd>{html.escape(response['description'])} ({html.escape(kinds)})</dd>"
    yield "</dl></details>"


def _about(field: Mapping[str, Any]) -> str:
    """The description of a field, or of one of its types."""
    options = (field, *field.get("anyOf", ()))
    return next((str(option["description"]) for option in options if "description" in option), "")


def _type_of(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        names = [_type_of(option) for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "enum" in field:
        return "string"
    if "$ref" in field:
        return "object"
    kind = str(field.get("type", "any"))
    return f"{kind} of {_type_of(field['items'])}" if kind == "array" and "items" in field else kind


def _range_of(field: Mapping[str, Any]) -> str:
    """Describe the allowed values, in words."""
    words = [_range_of(option) for option in field.get("anyOf", ())]
    if "enum" in field:
        words.append(", ".join(str(value) for value in field["enum"] if value is not None))
    low, above, high = field.get("minimum"), field.get("exclusiveMinimum"), field.get("maximum")
    parts = []
    if above is not None:
        parts.append(f"above {above:g}")
    elif low is not None and low > -_LARGE:
        parts.append(f"{'from' if high is not None and high < _LARGE else 'at least'} {low:g}")
    if high is not None and high < _LARGE:
        parts.append(f"{'to' if parts and above is None else 'at most'} {high:g}")
    words.append(", ".join(parts) if above is not None else " ".join(parts))
    if (length := field.get("maxLength")) is not None:
        words.append(f"at most {length:,} characters")
    return "; ".join(dict.fromkeys(filter(None, words)))


def _code(value: object) -> str:
    return f"<code>{html.escape(json.dumps(value))}</code>"


def _anchor(method: str, path: str) -> str:
    return f"{method}{re.sub(r'[^a-z0-9_]+', '-', path)}".lower().rstrip("-")
