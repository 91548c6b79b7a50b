"""`POST /page/render` and `POST /page/pdf`: what the page asks of its own server, with its guards and limits."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from typing import Any

import pytest

from engine.runtime.errors import RequestError
from engine.tokenizer_manager import job_process
from engine.tokenizer_manager.rendering import worker
from engine.tokenizer_manager.rendering.markdown import render_markdown
from engine.tokenizer_manager.rendering.worker import PageWorker, RenderText
from tests.tokenizer_manager.conftest import Serve

SLOW = "\\[" * 60_000  # the parser tries each place up to the end
OBJECTS = (
    "<< /Type /Catalog /Pages 2 0 R >>",
    "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
    "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
    "<< /Length {} >> stream\n{}\nendstream",
    "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
)


def pdf(content: str) -> bytes:
    """A PDF file of one page."""
    text, places = "%PDF-1.4\n", []
    for number, each in enumerate(OBJECTS, 1):
        places.append(len(text))
        text += f"{number} 0 obj {each.format(len(content), content) if number == 4 else each} endobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    table = f"xref\n0 6\n0000000000 65535 f \n{table}trailer << /Root 1 0 R /Size 6 >>"
    return f"{text}{table}\nstartxref\n{len(text)}\n%%EOF\n".encode()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that have been started."""
    processes: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return processes


def test_markdown_is_rendered_as_elements(serve: Serve):
    reply = serve().client.post("/page/render", json={"text": "# Hi\n\n**a** `<b>`"})
    assert reply.json() == {
        "blocks": [["h3", {}, "Hi"], ["p", {}, "", ["strong", {}, "a"], " ", ["code", {}, "<b>"]]],
        "num_lines": 3,
    }


@pytest.mark.parametrize(
    ("text", "num_blocks", "num_lines"),
    [
        ("", 0, 0),
        ("one", 0, 0),
        ("one\n\ntwo", 1, 1),
        ("one\n\n```\ncode\n\nmore", 1, 1),
        ("one\n\n```\ncode\n```\nlast", 2, 5),
        ("one[^1]\n\ntwo\n\n[^1]: note", 1, 1),
    ],
)
def test_the_block_that_still_grows_is_left_out(text, num_blocks, num_lines):
    rendered = render_markdown(text, complete=False)
    assert (len(rendered.blocks), rendered.num_lines) == (num_blocks, num_lines)


@pytest.mark.parametrize(
    ("source", "is_math"),
    [
        ("$x$", True),
        ("$$x$$", True),
        (r"\(x\)", True),
        (r"\[x\]", True),
        (r"\[x\] and more", True),
        ("a\n$$\nx\n+ y\n$$\nb", True),
        (r"$\begin{aligned} a &= b \\ c &= d \end{aligned}$", True),
        ("a $$ x $$ b", True),
        ("- item\n  $$\n  x\n  $$", True),
        ("> \\[\n> x\n> \\]", True),
        ("\\begin{align*}\na &= b\n\\end{align*}", True),
        ("```math\nx\n```", True),
        ("costs $5 and $6", False),
        ("US$5 and US$6, $20,000-$30,000", False),
        ("$ x $", False),
        (r"\$x\$", False),
        ("`$x$`", False),
    ],
)
def test_the_forms_of_math(source, is_math):
    blocks = render_markdown(source, complete=True).blocks
    assert str(blocks).count("'math'") == is_math
    assert "'>'" not in str(blocks)
    assert "and more" not in source or "and more" in str(blocks)


def test_a_text_that_takes_too_long_is_refused_and_the_next_one_rendered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "CPU_LIMIT_S", 0.2)
    client = serve().client
    refused = client.post("/page/render", json={"text": SLOW})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "page_limit")
    assert client.post("/page/render", json={"text": "x"}).json()["blocks"] == [["p", {}, "x"]]


def test_the_limit_is_cpu_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_process, "MAX_WALL", 1e4)
    own = PageWorker({RenderText: 0.05})
    with pytest.raises(RequestError, match=r"more than 0\.05 s of CPU time"):
        asyncio.run(own.run(RenderText(SLOW, True)))
    own.close()


def test_one_process_from_the_first_text_on(started):
    own = PageWorker()
    assert started == []
    for _ in range(2):
        asyncio.run(own.run(RenderText("x", True)))
    [first] = started
    assert resource.prlimit(first.pid, resource.RLIMIT_AS) == (1 << 30, 1 << 30)
    first.kill()
    first.wait()
    assert b'"x"' in asyncio.run(own.run(RenderText("x", True)))
    assert len(started) == 2
    assert first.stdin.closed and first.stdout.closed
    own.close()
    assert started[1].poll() is not None


def test_the_process_ends_with_the_server(serve: Serve, started):
    served = serve()
    assert started == []
    served.client.post("/page/render", json={"text": "x"})
    [process] = started
    served.services.close()
    assert process.poll() is not None


def test_a_text_is_refused_while_too_many_wait(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "MAX_WAITING", 0)
    reply = serve().client.post("/page/render", json={"text": "x"})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(
    ("body", "status"),
    [({"text": 1}, 400), ({"text": "x", "html": True}, 400), ([], 400), ({"text": "x" * 1_000_001}, 413)],
)
def test_a_body_that_is_no_text_is_refused(serve: Serve, body: Any, status):
    assert serve().client.post("/page/render", json=body).status_code == status


def test_the_guards_of_the_api_hold(serve: Serve):
    keyed = serve(api_key=("k",)).client
    for path in ("/page/render", "/page/pdf"):
        assert keyed.post(path, json={"text": "x"}).status_code == 401
    assert (
        keyed.post("/page/render", json={"text": "x"}, headers={"Authorization": "Bearer k"}).status_code
        == 200
    )
    elsewhere = serve().client.post(
        "/page/render", json={"text": "x"}, headers={"Origin": "http://evil.example"}
    )
    assert elsewhere.status_code == 403
    assert serve(page=False).client.post("/page/render", json={"text": "x"}).status_code == 404


def test_the_text_of_a_pdf_file_is_read(serve: Serve):
    client = serve().client
    hello = pdf("BT /F1 12 Tf 20 100 Td (Hello from a PDF) Tj ET")
    assert client.post("/page/pdf", content=hello).json() == {"text": "Hello from a PDF"}
    for content, why in ((b"no pdf", "cannot be read"), (pdf(""), "has no text")):
        reply = client.post("/page/pdf", content=content)
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "page_unreadable")
        assert why in reply.json()["error"]["message"]
