"""`engine batch` on a running server: order, resumption, refusals, busy and lost servers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main as cli
from engine.cli.batch import run as run_module
from engine.cli.batch.answers import Answers, digest_of
from engine.cli.batch.run import LineSender, read_lines
from engine.runtime.errors import ServerError
from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import say_all

COMPLETIONS = "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    fields = {"prompt": "hi"} if url == COMPLETIONS else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields | body}


class Files:
    """The files of one command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.partial, self.errors = folder / "out.jsonl.partial", folder / "errors.jsonl"

    def write(self, lines: list[dict[str, Any]]) -> None:
        self.input.write_text("".join(json.dumps(each) + "\n" for each in lines))

    def run(self, *options: str, url: str = "http://127.0.0.1:9") -> int:
        words = ["batch", str(self.input), "-o", str(self.output)]
        return cli.run([*words, *(["--url", url] if url else []), *options])

    def results(self, path: Path | None = None) -> list[dict[str, Any]]:
        return [json.loads(each) for each in (path or self.output).read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def ids(results: list[dict[str, Any]]) -> list[str]:
    return [each["custom_id"] for each in results]


def sent(served: Served) -> int:
    return int(served.engine.generate.qsize())


def test_results_are_those_of_the_endpoints_in_the_order_of_the_input(serve: Serve, files: Files, capsys):
    served = serve(say_all("x"))
    files.write(
        [
            line("a"),
            line("b", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]),
            line("c", temperature=9),
            line("d", "/v1/responses", input="hi"),
        ]
    )

    code = files.run(url=served.url)

    results = files.results()
    assert code == 1
    assert ids(results) == ["a", "b", "c", "d"]
    assert [each["response"]["status_code"] for each in results] == [200, 200, 400, 200]
    assert results[0]["response"]["body"]["choices"][0]["text"] == "x"
    assert results[2]["response"]["body"]["error"]["param"] == "temperature"
    assert results[0]["response"]["request_id"] == results[0]["id"]
    assert all(served.engine.next_request().background for _ in range(3))
    assert not files.partial.exists()
    assert "4 lines answered, 1 error among them" in capsys.readouterr().err


def test_errors_can_have_a_file_of_their_own(serve: Serve, files: Files):
    served = serve(say_all("x"))
    files.write([line("a", temperature=9), line("b")])

    assert files.run("--errors", str(files.errors), url=served.url) == 1

    assert ids(files.results()) == ["b"]
    assert ids(files.results(files.errors)) == ["a"]


def test_without_an_error_the_code_is_0_and_no_file_of_errors_is_written(serve: Serve, files: Files, capsys):
    served = serve(say_all("x"))
    files.write([line("a")])

    assert files.run("--errors", str(files.errors), "-q", url=served.url) == 0

    assert not files.errors.exists()
    assert capsys.readouterr() == ("", "")


def test_the_options_of_vllm_name_the_same_files(serve: Serve, files: Files):
    served = serve(say_all("x"))
    files.write([line("a")])

    words = ["batch", "-i", str(files.input), "-o", str(files.output)]

    assert cli.run([*words, "--url", served.url]) == 0
    assert ids(files.results()) == ["a"]


def test_lines_that_begin_alike_are_sent_one_after_another(serve: Serve, files: Files, monkeypatch):
    served = serve(say_all("x"))
    monkeypatch.setattr(run_module, "_MOST_AT_ONCE", 1)
    lines = [line(f"{n}{p}", prompt=f"{p}" * 200, max_tokens=p + 1) for n in range(3) for p in range(2)]
    files.write(lines)

    assert files.run(url=served.url) == 0

    order = [served.engine.next_request().sampling.max_new_tokens for _ in lines]
    assert order in ([1, 1, 1, 2, 2, 2], [2, 2, 2, 1, 1, 1])
    assert ids(files.results()) == ids(lines)


def begin(files: Files, *lines: bytes) -> None:
    """Leave the results of a run that has ended early."""
    with Answers(files.output, None, digest_of(files.input)) as answers:
        for each in lines:
            answers.add(each)


def result(custom_id: str, status: int = 200) -> bytes:
    response = {"status_code": status, "request_id": "r", "body": {"kept": True}}
    return (
        json.dumps({"id": "r", "custom_id": custom_id, "response": response, "error": None}).encode() + b"\n"
    )


@pytest.mark.parametrize(
    "torn", [b"", b'{"id": "r", "custom_id": "c", "resp', result("c")[:-1], b"\0\0\0\n" + result("c")]
)
def test_a_run_goes_on_where_another_one_was_killed(serve: Serve, files: Files, torn: bytes):
    served = serve(say_all("x"))
    files.write([line(each) for each in "abcde"])
    begin(files, result("d"), result("a", 500))
    with files.partial.open("ab") as file:
        file.write(torn)

    assert files.run(url=served.url) == 1

    results = files.results()
    assert ids(results) == list("abcde")
    assert [each["response"]["body"].get("kept", False) for each in results] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert sent(served) == 3


def test_complete_results_need_no_server(files: Files):
    files.write([line("a")])
    begin(files, result("a"))

    assert files.run() == 0
    assert ids(files.results()) == ["a"]


def test_a_run_that_cannot_be_begun_says_why(files: Files, capsys):
    def refused(*options: str) -> str:
        code = files.run(*options)
        assert code == 2
        return str(capsys.readouterr().err)

    files.write([line("a"), line("a"), {"custom_id": "b"}])
    assert "line 2: custom_id is" in (text := refused()) and "line 3: method" in text
    files.write([line("a", "/v1/audio/speech")])
    assert "it must be one of /v1/chat/completions" in refused()
    files.write([line("a")])
    files.output.write_text("precious")
    assert f"{files.output} exists already" in refused()
    files.output.unlink()
    files.errors.write_text("precious")
    assert f"--errors {files.errors} exists already" in refused("--errors", str(files.errors))
    assert "are both" in refused("--errors", str(files.output))
    assert "no use for 'other.jsonl'" in refused("other.jsonl")
    assert "has no effect on a server that runs already" in refused("--", "--max-model-len", "9")
    begin(files, result("a"))
    files.write([line("b")])
    assert "has results of another input" in refused()
    files.partial.unlink()
    begin(files)
    with files.partial.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another command writes" in refused()
    files.input.unlink()
    assert "cannot be read" in refused()
    assert cli.run(["batch", "-o", str(files.output)]) == 2
    assert "IN is missing" in capsys.readouterr().err


class Scripted:
    """A server of another kind, which answers as its list says, then with `{}`."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes, dict[str, str]]] = []
        self.bodies: list[dict[str, Any]] = []
        self.url = ""


@pytest.fixture
def other() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(404, b"", {})

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.reply(*(script.answers.pop(0) if script.answers else (200, b"{}", {})))

        def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        script.url = f"http://127.0.0.1:{listening.server_address[1]}"
        yield script
        listening.shutdown()


def send(files: Files, url: str, model: str | None = None) -> None:
    digest, lines = digest_of(files.input), read_lines(files.input)
    with Answers(files.output, None, digest) as answers:
        sender = LineSender(url, api_key="k", model=model, retry_s=0.0)
        asyncio.run(sender.send_all(files.input, lines, answers, digest, lambda _: None))
        answers.finish([each.custom_id for each in lines])


def test_a_busy_server_gets_a_line_again_and_other_answers_are_results(files: Files, other: Scripted):
    files.write([line("a", temperature=0.5)])
    now = {"retry-after": "0"}
    other.answers = [(429, b"", now), (503, b"", now), (429, b"", now), (502, b"<html>", {})]

    send(files, other.url, model="m")

    [only] = files.results()
    assert only["response"]["status_code"] == 502
    assert only["response"]["body"] == {"error": {"message": "<html>"}}
    assert len(other.bodies) == 4
    assert other.bodies[0] == {"prompt": "hi", "temperature": 0.5, "service_tier": "flex", "model": "m"}


def test_fields_that_a_line_has_stay(files: Files, other: Scripted):
    bodies: list[dict[str, Any]] = [{"service_tier": "default", "store": True, "input": "hi", "model": "own"}]
    files.write([line("a", "/v1/responses", **bodies[0])])

    send(files, other.url)

    assert other.bodies == bodies


def test_a_server_that_does_not_answer_ends_the_run_and_results_stay(
    files: Files, other: Scripted, monkeypatch
):
    files.write([line("a"), line("b")])
    begin(files, result("b"))
    with pytest.raises(ServerError, match="start the same command again to go on"):
        send(files, "http://127.0.0.1:9")
    monkeypatch.setattr(run_module, "_PATIENCE_S", -1.0)
    other.answers = [(429, b"", {})]
    with pytest.raises(ServerError, match="was busy"):
        send(files, other.url)

    send(files, other.url)

    assert ids(files.results()) == ["a", "b"]
    assert len(other.bodies) == 2


def test_without_a_server_one_is_started_with_the_options_after_the_dashes(
    serve: Serve, files: Files, monkeypatch
):
    served = serve(say_all("x"))
    started: list[list[str]] = []

    @contextlib.contextmanager
    def started_server(
        arguments: list[str], _environment: Any, *, note: Callable[[str], None]
    ) -> Iterator[str]:
        started.append(arguments)
        yield served.url

    monkeypatch.setattr("engine.cli.batch.command.started_server", started_server)
    files.write([line("a", model="gpt-x")])

    code = files.run("--model", "m", "--", "--max-model-len", "64", url="")

    assert started == [
        [
            *("--served-model-name", "*", "--host", "127.0.0.1", "--port", "0"),
            "--model",
            "m",
            "--max-model-len",
            "64",
        ]
    ]
    assert code == 1  # this fake server serves only one name
    assert files.results()[0]["response"]["status_code"] == 404
