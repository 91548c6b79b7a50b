"""`engine top` as a command: one poll, wrong inputs, and a view that outlives its server."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from engine.cli import main as cli
from engine.cli.top.command import polls
from engine.cli.top.snapshot import Client, Snapshot, Unreachable
from engine.runtime.errors import EngineError

from .conftest import URL, answers


class Server:
    """Answers like an engine, or as it is told."""

    def __init__(self) -> None:
        info, listed = answers()
        self.pages: dict[str, tuple[int, Any]] = {"/server_info": (200, info), "/v1/requests": (200, listed)}
        self.keys: list[str | None] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.keys.append(self.headers["Authorization"])
                status, page = server.pages.get(self.path, (404, {"error": {"message": "no such path"}}))
                body = page if isinstance(page, bytes) else json.dumps(page).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: Any) -> None:
                pass

        self._http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture(autouse=True)
def titles(monkeypatch) -> list[str]:
    """Those that the process has given itself."""
    given: list[str] = []
    monkeypatch.setattr("setproctitle.setproctitle", given.append)
    return given


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    for name in ("ENGINE_API_KEY", "ENGINE_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.close()


def test_one_look_as_text(capsys, server):
    assert cli.run(["top", server.url, "--once"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"engine  tiny at {server.url}")
    assert "KV memory is short (need 4,176, have 3,904)" in out


@pytest.mark.parametrize("form", ["argument", "option", "without a scheme"])
def test_one_look_as_json(capsys, server, form):
    where = {
        "argument": [server.url],
        "option": ["--url", server.url],
        "without a scheme": [server.url.removeprefix("http://")],
    }[form]
    assert cli.run(["top", *where, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_requests"] == 3


def test_the_key_is_sent_and_the_admins_comes_first(server, monkeypatch, capsys):
    cli.run(["top", server.url, "--once"])
    monkeypatch.setenv("ENGINE_API_KEY", "client")
    cli.run(["top", server.url, "--once"])
    monkeypatch.setenv("ENGINE_ADMIN_API_KEY", "admin")
    cli.run(["top", server.url, "--once"])
    cli.run(["top", server.url, "--once", "--api-key", "given"])
    assert server.keys[::2] == [None, "Bearer client", "Bearer admin", "Bearer given"]


def says(capsys, *arguments):
    """Exit code, and the one line that is said."""
    code = cli.run(["top", *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("engine: ") and captured.err.count("\n") == 1
    return code, captured.err


def test_a_key_on_the_command_line_does_not_stay_in_the_list_of_processes(server, titles):
    assert cli.run(["top", server.url, "--once"]) == 0
    assert titles == []
    assert cli.run(["top", server.url, "--once", "--api-key", "secret"]) == 0
    assert titles == ["engine: top"]


def test_a_key_may_have_any_characters(server):
    assert cli.run(["top", server.url, "--once", "--api-key", "ключ"]) == 0
    assert server.keys[-1].encode("latin-1").decode() == "Bearer ключ"


def test_no_server(capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code, line = says(capsys, f"http://127.0.0.1:{port}", "--once")
    assert code == 3
    assert f"no server answers at http://127.0.0.1:{port} (Connection refused); start one with" in line


def test_a_wrong_key_and_one_that_is_not_the_admins(capsys, server):
    server.pages["/server_info"] = (401, {"error": {"message": "the API key is wrong"}})
    code, line = says(capsys, server.url, "--once")
    assert code != 0 and "--api-key" in line
    assert line.endswith("the server wants an API key; pass --api-key or set ENGINE_API_KEY\n")
    assert "check --api-key" in says(capsys, server.url, "--once", "--api-key", "sk")[1]
    message = (
        "/v1/requests affects all requests, and this needs the admin key; send the admin key as `Authorization: "
        "Bearer <key>`"
    )
    server.pages["/server_info"] = (200, answers()[0])
    server.pages["/v1/requests"] = (403, {"error": {"message": message, "code": "admin_key_required"}})
    code, line = says(capsys, server.url, "--once")
    assert code == 2 and "Bearer" not in line
    assert line.endswith("; pass it with --api-key or set ENGINE_ADMIN_API_KEY\n")


def test_another_server_and_an_older_engine(capsys, server):
    del server.pages["/v1/requests"]
    assert "has no /v1/requests; is it an engine of this version?" in says(capsys, server.url, "--once")[1]
    for page in (b"<html>", b"[1]", b'"x"', b"\xff"):
        server.pages["/server_info"] = (200, page)
        assert "is no JSON object" in says(capsys, server.url, "--once")[1]
    server.pages["/server_info"] = (200, {"model": "x"})
    server.pages["/v1/requests"] = (200, {})
    assert "not an engine's of this version" in says(capsys, server.url, "--once")[1]
    server.pages["/server_info"] = (500, {"error": {"message": "it broke"}})
    assert "the server failed: it broke" in says(capsys, server.url, "--once")[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ftp://x", "--once"], "must look like http://127.0.0.1:30000"),
        (["http://a:b", "--once"], "--url is 'http://a:b', which is no URL"),
        (["http://a", "--url", "http://b", "--once"], "the URL is given twice"),
        (["--json"], "--json prints one snapshot; add --once"),
        (["--interval", "0", "--once"], "--interval is 0, but it must be 0.1 seconds or more"),
        (["--interval", "nan", "--once"], "--interval is nan"),
        (["--interval", "inf", "--once"], "--interval is inf"),
        ([], "standard output is no terminal to draw on; use --once"),
    ],
)
def test_wrong_inputs_are_one_line_with_a_way_out(capsys, arguments, text):
    code, line = says(capsys, *arguments)
    assert code == 2
    assert text in line


def test_a_server_that_goes_away_is_waited_for():
    before = Snapshot.from_answers(URL, *answers())
    after = Snapshot.from_answers(URL, *answers(sent_s=101.0, generation_tokens_total=50))
    restarted = Snapshot.from_answers(URL, *answers(sent_s=3.0))
    script: list[Any] = [before, after, after, Unreachable("gone"), Unreachable("gone"), restarted]

    def poll():
        answer = script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shown = list(islice(polls(poll), 6))
    assert [each.note for each in shown] == ["", "", "", "gone", "gone", ""]
    assert [each.rates is not None for each in shown] == [False, True, True, False, False, False]
    assert shown[1].rates == shown[2].rates  # the same report twice
    assert shown[4].snapshot == after


def test_a_server_that_refuses_ends_the_view():
    script = [Snapshot.from_answers(URL, *answers())]

    def poll():
        if not script:
            raise EngineError("the API key is wrong")
        return script.pop()

    each = polls(poll)
    next(each)
    with pytest.raises(EngineError, match="the API key is wrong"):
        next(each)


def test_a_server_that_is_shutting_down_is_one_that_may_come_back(server):
    server.pages["/server_info"] = (503, {"error": {"message": "the server is shutting down"}})
    with Client(server.url, None) as client, pytest.raises(Unreachable, match="shutting down"):
        client.poll()
