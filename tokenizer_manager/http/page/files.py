"""`PageFiles`: the page at `/` and the files it loads, which are the same for every server and hold no data of it.

A browser cannot send a key when it opens a page, so the files need none; what they show comes from the API, with the
key that the user enters. Programs that get `/` do not ask for HTML and receive what they received before there was a
page.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

import msgspec

from ....runtime.text import LOOP
from ..exchange import Exchange

CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No inline script or style, nothing from elsewhere, and no text that becomes markup (trusted types)."""

_FOLDER: Final = "/page/"
_INDEX: Final = "index.html"
_FACTS: Final = "/page/facts.js"
"""Made of constants that the page shares with other parts."""
_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_OPEN: Final = frozenset({"/docs", "/openapi.json"})
"""Pages that describe the API; of the server, they have the name of the model and its sampling defaults."""


class PageFile(NamedTuple):
    """One file, as it is sent."""

    content: bytes
    content_type: bytes


class PageFiles:
    """The files by path; read once, by the first request for one."""

    def __init__(self, *, enabled: bool) -> None:
        """With `enabled` False there is no page, and no path is open because of it."""
        self._enabled = enabled
        self._files: dict[str, PageFile] | None = None

    def find(self, exchange: Exchange) -> PageFile | None:
        """The file that answers a request; None if it is not for the page."""
        path = exchange.path
        if not self._enabled or exchange.method not in ("GET", "HEAD"):
            return None
        if path != "/" and not path.startswith(_FOLDER):
            return None
        if path == "/" and not accepts_html(exchange.headers):
            return None
        if self._files is None:
            self._files = dict(_files_in(importlib.resources.files(__package__) / "web", _FOLDER))
            facts = f"export const LOOP = {msgspec.json.encode(LOOP._asdict()).decode()};\n"
            self._files[_FACTS] = PageFile(facts.encode(), _TYPES["js"])
        return self._files.get(_FOLDER + _INDEX if path == "/" else path)

    def opens(self, exchange: Exchange) -> bool:
        """Whether a browser may load this path without a key, as it follows a link of the page."""
        return (
            self._enabled
            and exchange.method in ("GET", "HEAD")
            and exchange.path in _OPEN
            and accepts_html(exchange.headers)
        )

    async def send(self, exchange: Exchange, file: PageFile) -> None:
        """Answer with a file."""
        headers = security_headers(CONTENT_POLICY)
        await exchange.send_bytes(file.content, file.content_type, headers=headers)


def security_headers(content_policy: str) -> list[tuple[bytes, bytes]]:
    """The headers of a page that a browser shows."""
    return [
        (b"content-security-policy", content_policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cache-control", b"no-cache"),
        (b"vary", b"accept"),
    ]


def accepts_html(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client names HTML among what it accepts; `*/*`, which programs send, does not."""
    for part in headers.get(b"accept", b"").lower().split(b","):
        media_type, *parameters = (each.strip() for each in part.split(b";"))
        if media_type == b"text/html":
            return not any(_is_zero(parameter) for parameter in parameters)
    return False


def _is_zero(parameter: bytes) -> bool:
    name, _, value = parameter.partition(b"=")
    return name.strip() == b"q" and not value.strip().strip(b"0.")


def _files_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, PageFile]]:
    """Each file under a folder with its path."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files_in(entry, f"{prefix}{entry.name}/")
        elif (content_type := _TYPES.get(entry.name.rpartition(".")[2])) is not None:
            yield prefix + entry.name, PageFile(entry.read_bytes(), content_type)
