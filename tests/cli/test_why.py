"""`engine why`: the question to a server on loopback, to a file, and what is said when neither answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main as cli
from engine.cli import server_client
from engine.cli.server_client import server_url
from engine.launch.child.socket_dir import ServerRecord
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import FinishKind
from engine.scheduler.journal.log_writer import LogWriter, header_of
from engine.scheduler.records.decision_log import Arrived, Finished, PassRecord, Settled
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict

FOUND = {
    "id": "chatcmpl-1",
    "found": True,
    "sentence": "chatcmpl-1-0 waited 1.000 s in 9 passes.",
    "columns": ["after", "what"],
    "rows": [["0.000 s", "came"], ["1.000 s", "started [0]"]],
}


def test_without_a_url_it_is_the_newest_server_of_the_user(monkeypatch):
    records = [
        ServerRecord(1, "a", "/a", "http://127.0.0.1:1", 1.0),
        ServerRecord(2, "b", "/b", "http://127.0.0.1:2", 2.0),
    ]
    monkeypatch.setattr(
        server_client, "running_servers", lambda: [*records, ServerRecord(3, "c", "/c", "", 3.0)]
    )
    assert server_url(None) == "http://127.0.0.1:2"
    assert server_url("http://other:3") == "http://other:3"
    monkeypatch.setattr(server_client, "running_servers", list)
    assert server_url(None) == "http://127.0.0.1:30000"


class Server:
    """Answers every GET with `status` and `body`."""

    def __init__(self) -> None:
        self.status, self.body = 200, b""
        self.requests: list[tuple[str, str | None]] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append((self.path, self.headers["Authorization"]))
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(server.body)))
                self.end_headers()
                self.wfile.write(server.body)

            def log_message(self, *_args: Any) -> None:
                pass

        self._http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answers(self, body: object, status: int = 200) -> None:
        self.status, self.body = status, json.dumps(body).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "decisions.log"
    capacity = Capacity(512, 64, 16, 8, 97)
    for start_s in (10.0, 50.0):
        header = header_of(EngineConfig(), capacity, frozenset({0}), wall_s=1e9, now_s=start_s)
        writer = LogWriter(path, header)
        rid = f"r{start_s:.0f}"
        writer.add(Arrived(start_s, rid, 20, 5))
        admitted = Verdict(rid, AddReqResult.CONTINUE, Reason.ADMITTED, 4, 16, 5, 25, 100)
        writer.add(PassRecord(start_s + 0.5, 1, verdicts=[admitted]))
        writer.add(Settled(start_s + 1, 1, left=[Finished(rid, FinishKind.STOP, 5)]))
        writer.close()
    return path


def test_a_server_is_asked_by_the_id_of_the_answer(server, capsys, monkeypatch):
    monkeypatch.delenv("ENGINE_API_KEY", raising=False)
    server.answers(FOUND)

    code = cli.run(["why", "chatcmpl-1", "--url", server.url])

    assert code == 0
    assert server.requests == [("/v1/requests/chatcmpl-1/why", None)]
    assert capsys.readouterr().out.splitlines() == [
        "chatcmpl-1-0 waited 1.000 s in 9 passes.",
        "after\twhat",
        "0.000 s\tcame",
        "1.000 s\tstarted [0]",
    ]


def test_the_key_and_odd_ids_arrive_unharmed(server, monkeypatch):
    monkeypatch.setenv("ENGINE_API_KEY", "from-env")
    server.answers(FOUND)

    cli.run(["why", "a/b c", "--url", f"{server.url}/v1"])
    cli.run(["why", "x", "--url", server.url, "--api-key", "given"])

    assert server.requests == [
        ("/v1/requests/a%2Fb%20c/why", "Bearer from-env"),
        ("/v1/requests/x/why", "Bearer given"),
    ]


def test_on_a_terminal_there_is_a_table(server, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    server.answers(FOUND)

    cli.run(["why", "chatcmpl-1", "--url", server.url])

    out = capsys.readouterr().out
    assert "┃" in out
    assert "started [0]" in out


def test_a_request_that_is_not_known(server, capsys):
    error = {"message": "Nothing is known of x.", "type": "invalid_request_error", "param": None}
    server.answers({"error": {**error, "code": "request_not_found"}}, 404)

    assert cli.run(["why", "x", "--url", server.url]) == 4
    assert capsys.readouterr().err == "engine: Nothing is known of x.\n"


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        (404, {"detail": "Not Found"}, "does not explain requests; is it an engine of this version?", 3),
        (401, {"error": {"message": "no"}}, "the server wants an API key; pass --api-key", 2),
        (500, {"error": {"message": "the scheduler is gone"}}, "the server failed: the scheduler is gone", 3),
        (
            503,
            {"error": {"message": "the model is loading, for 3 s so far", "code": "loading_model"}},
            "the server is not ready: the model is loading, for 3 s so far",
            3,
        ),
        (200, ["a list"], "gave an answer that is no explanation; check --url", 3),
    ],
)
def test_other_answers_are_one_line(server, capsys, status, body, message, code):
    server.answers(body, status)

    assert cli.run(["why", "x", "--url", server.url]) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_without_a_server_there_is_a_way_out(server, capsys):
    server.close()

    assert cli.run(["why", "x", "--url", server.url]) == 3
    assert (
        f"no server answers at {server.url} (Connection refused); name it with --url, or read its decision log"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize("rid", ["r10", "r50"])
def test_a_file_is_asked_in_all_its_runs(log, capsys, rid):
    assert cli.run(["why", rid, "--log", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{rid} was started in the first pass after it came")
    assert "0.500 s\tstep 1\tstarted\tadmitted: 4 cached, 16 computed\t25\t100\n" in out


def test_a_file_that_does_not_know(log, capsys):
    assert cli.run(["why", "r11", "--log", str(log)]) == 4
    assert "Nothing is known of r11" in capsys.readouterr().err


def test_a_damaged_file_is_read_as_far_as_it_goes(log, capsys):
    log.write_bytes(log.read_bytes()[:-2])

    assert cli.run(["why", "r50", "--log", str(log)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("r50 was started")
    assert "engine: note: " in captured.err and "the file ends inside a record" in captured.err


def test_a_file_that_is_none(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("notes")

    assert cli.run(["why", "x", "--log", str(path)]) == 2
    assert capsys.readouterr().err == f"engine: {path} is not a decision log; --decision-log FILE makes one\n"


def test_a_file_and_a_server_at_once_is_a_mistake(log, capsys):
    assert cli.run(["why", "x", "--log", str(log), "--url", "http://127.0.0.1:1"]) == 2
    assert "pass one of them" in capsys.readouterr().err
