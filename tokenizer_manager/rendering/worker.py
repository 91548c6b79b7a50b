"""`PageWorker`: a process that renders Markdown and reads PDF files for the page, under limits of time and memory.

Regular expressions of lexers hold the GIL, and a hostile text can keep one busy for minutes. In the tokenizer manager
all streams would wait for it; this process is ended by the kernel instead, and the next request starts another one. It
is started by the first request, holds no state, and answers one request after the other over its standard streams:
`main` is its side.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Final

import msgspec
import setproctitle

from ...launch.child.child import die_with
from ...runtime.errors import QueueFullError, RequestError
from ...runtime.transport.message_base import Message

if TYPE_CHECKING:
    from .markdown import Rendered

MAX_WAITING: Final = 32
CPU_LIMIT_S: Final = 3.0
_PDF_CPU_LIMIT_S: Final = 20.0
_MAX_PDF_CHARS: Final = 1_000_000
_MEMORY_BYTES: Final = 1 << 30  # of address space
_NICENESS: Final = 10
_LENGTH: Final = struct.Struct("<I")
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page")
        self._process: subprocess.Popen[bytes] | None = None
        self._num_waiting = 0

    async def run(self, job: PageJob) -> bytes:
        """The JSON of an answer.

        Raises:
            RequestError: the job is beyond a limit, or cannot be done.
            QueueFullError: too many jobs wait.
        """
        if self._num_waiting >= MAX_WAITING:
            raise QueueFullError(
                f"{self._num_waiting} other texts of the page wait to be rendered; retry later", 1
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, job)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _ask(self, job: PageJob) -> bytes:
        """Send a job and wait for its reply; on the thread."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # closes its streams
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None
        limit_s = self._limits_s[type(job)]
        try:
            _write(process.stdin, struct.pack("<d", limit_s) + msgspec.msgpack.encode(job))
            reply = msgspec.msgpack.decode(_read(process.stdout), type=PageReply)
        except (OSError, EOFError) as error:
            self._end()
            raise RequestError(
                f"this takes more than {limit_s:g} s of CPU time, or too much memory",
                code="page_limit",
                status=422,
            ) from error
        if reply.error:
            raise RequestError(reply.error, code="page_unreadable", status=422)
        return reply.body

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(_LENGTH.pack(len(content)) + content)
    file.flush()


def _read(file: IO[bytes]) -> bytes:
    """The next message.

    Raises:
        EOFError: the other side has closed.
    """
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    content: bytes = file.read(_LENGTH.unpack(head)[0])
    return content


# ---------------------------------------------------------------- the process


def main() -> None:
    """Answer jobs until the standard input is closed."""
    from .markdown import render_markdown  # only here: its libraries are large

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the parent ends this process
    die_with(int(sys.argv[1]))
    setproctitle.setproctitle("engine: page")
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()  # pypdf reports each oddity of a file
    jobs, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    with contextlib.suppress(EOFError):
        while True:
            message = _read(jobs)
            [limit_s] = struct.unpack_from("<d", message)
            job: PageJob = msgspec.msgpack.decode(message[8:], type=PageJob)
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
            try:
                reply = _render(job, render_markdown) if isinstance(job, RenderText) else _read_pdf(job)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0.0)
            _write(replies, msgspec.msgpack.encode(reply))


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
