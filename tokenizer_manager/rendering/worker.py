"""`PageWorker`: renders Markdown and reads PDF files for the page in a process of its own, see `JobProcess`.

Regular expressions of lexers hold the GIL, and a hostile text can keep one busy for minutes.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from ...runtime.errors import RequestError
from ...runtime.transport.message_base import Message
from ..job_process import JobLostError, JobProcess, serve_jobs

if TYPE_CHECKING:
    from .markdown import Rendered

MAX_WAITING: Final = 32
CPU_LIMIT_S: Final = 3.0
_PDF_CPU_LIMIT_S: Final = 20.0
_MAX_PDF_CHARS: Final = 1_000_000
_MEMORY_BYTES: Final = 1 << 30  # of address space
_NO_PYPDF: Final = "this server cannot read PDF files; on its machine, run: pip install pypdf"


class RenderText(Message, frozen=True):
    """Render Markdown; see `render_markdown`."""

    text: str
    complete: bool


class ReadPdf(Message, frozen=True):
    """The text of a PDF file."""

    content: bytes


PageJob = RenderText | ReadPdf


class PageReply(Message, frozen=True):
    """The JSON of an answer; or an error, the text of which is for the visitor."""

    body: bytes = b""
    error: str = ""


class PageWorker:
    """The process, as the HTTP server sees it."""

    def __init__(self, limits_s: Mapping[type, float] | None = None) -> None:
        """Start nothing yet. `limits_s`: CPU time by the class of a job."""
        self._limits_s = limits_s or {RenderText: CPU_LIMIT_S, ReadPdf: _PDF_CPU_LIMIT_S}
        self._jobs = JobProcess(__name__, name="texts of the page", max_waiting=MAX_WAITING)

    async def run(self, job: PageJob) -> bytes:
        """The JSON of an answer.

        Raises:
            RequestError: the job is beyond a limit, or cannot be done.
            QueueFullError: too many jobs wait.
        """
        limit_s = self._limits_s[type(job)]
        try:
            reply = msgspec.msgpack.decode(
                await self._jobs.ask(msgspec.msgpack.encode(job), limit_s), type=PageReply
            )
        except JobLostError as error:
            raise RequestError(
                f"this takes more than {limit_s:g} s of CPU time, or too much memory",
                code="page_limit",
                status=422,
            ) from error
        if reply.error:
            raise RequestError(reply.error, code="page_unreadable", status=422)
        return reply.body

    def close(self) -> None:
        """End the process."""
        self._jobs.close()


# ---------------------------------------------------------------- the process


def main() -> None:
    """Answer jobs until the standard input is closed."""
    from .markdown import render_markdown  # only here: its libraries are large

    def answer(message: bytes) -> bytes:
        job: PageJob = msgspec.msgpack.decode(message, type=PageJob)
        reply = _render(job, render_markdown) if isinstance(job, RenderText) else _read_pdf(job)
        return msgspec.msgpack.encode(reply)

    logging.disable()  # pypdf reports each oddity of a file
    serve_jobs("engine: page", _MEMORY_BYTES, answer)


def _render(job: RenderText, render_markdown: Callable[..., Rendered]) -> PageReply:
    try:
        return PageReply(msgspec.json.encode(render_markdown(job.text, complete=job.complete)._asdict()))
    except RecursionError:
        return PageReply(error="the text is nested too deeply")


def _read_pdf(job: ReadPdf) -> PageReply:
    try:
        import pypdf
    except ImportError:
        return PageReply(error=_NO_PYPDF)
    parts: list[str] = []
    try:
        for page in pypdf.PdfReader(io.BytesIO(job.content)).pages:
            parts.append(page.extract_text())
            if sum(map(len, parts)) > _MAX_PDF_CHARS:
                break
    except Exception as error:  # of any class: the file comes from anywhere
        return PageReply(error=f"the PDF file cannot be read: {error}")
    text = "\n\n".join(parts)[:_MAX_PDF_CHARS]
    if not text.strip():
        return PageReply(error="the PDF file has no text; perhaps its pages are pictures")
    return PageReply(msgspec.json.encode({"text": text}))


if __name__ == "__main__":
    main()
