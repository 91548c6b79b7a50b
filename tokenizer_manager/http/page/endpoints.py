"""`POST /page/render` and `POST /page/pdf`: what the page asks of its own server; no part of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from ....runtime.errors import RequestError
from ...rendering.worker import PageJob, ReadPdf, RenderText
from ..exchange import Exchange
from ..schema.values import convert
from ..services import Services

_MAX_TEXT_CHARS: Final = 1_000_000


class _RenderBody(msgspec.Struct, forbid_unknown_fields=True):
    """A text that is complete, or still grows."""

    text: str
    complete: bool = True


async def render(exchange: Exchange, services: Services) -> None:
    """The blocks of an answer's Markdown as elements."""
    body = convert(await services.read_object(exchange), _RenderBody)
    if len(body.text) > _MAX_TEXT_CHARS:
        raise RequestError(
            f"text has {len(body.text):,} characters, the page renders at most {_MAX_TEXT_CHARS:,}",
            param="text",
            code="page_limit",
            status=413,
        )
    await _answer(exchange, services, RenderText(body.text, body.complete))


async def read_pdf(exchange: Exchange, services: Services) -> None:
    """The text of a PDF file, which is the body."""
    with services.body_budget.reserve() as reservation:
        content = await exchange.body(int(services.config.server.max_body_mb * 2**20), reservation)
        await _answer(exchange, services, ReadPdf(content))


async def _answer(exchange: Exchange, services: Services, job: PageJob) -> None:
    async with exchange.abort_on_disconnect():
        answer = await services.page_worker.run(job)
        await exchange.send_bytes(answer, b"application/json")


PAGE_ENDPOINTS: Final[Mapping[str, Callable[[Exchange, Services], Awaitable[None]]]] = {
    "/page/render": render,
    "/page/pdf": read_pdf,
}
