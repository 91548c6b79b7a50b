"""Vectors and scores from a server, of this engine or of another one."""

from __future__ import annotations

import base64
import http.server
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine.cli import main as cli
from engine.cli import server_client
from engine.cli.embed import backend as backends
from engine.cli.embed.backend import ServerBackend, in_parts
from engine.cli.embed.files import Texts
from engine.cli.exit_codes import ExitCode
from engine.launch.child.socket_dir import ServerRecord
from engine.runtime.errors import ConfigError, RequestError, ServerError

Answer = tuple[int, Any]


class ScriptedServer:
    """Vectors tell the length of their text; scores, that of the document."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = [{"id": "tiny", "task": "embed"}]
        self.answer: Callable[[str, dict[str, Any]], Answer] = self.usual
        self.url = ""
        self.retry_after = "0"

    def usual(self, path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/embeddings":
            vectors = [np.array([len(text), 1.0], "<f4") for text in body["input"]]
            coded = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
            rows = [{"index": n, "embedding": each} for n, each in enumerate(coded)]
            return 200, {"data": rows[::-1]}
        scores = [(len(text), n) for n, text in enumerate(body["documents"])]
        rows = [{"index": n, "relevance_score": score} for score, n in sorted(scores, reverse=True)]
        return 200, {"results": rows}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": script.models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.bodies.append(body)
            self.reply(*script.answer(self.path, body))

        def reply(self, status: int, document: object) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header("retry-after", script.retry_after)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        script.url = f"http://127.0.0.1:{listening.server_address[1]}"
        yield script
        listening.shutdown()


def connect(server: ScriptedServer, wanted: Any = "embed", **more: Any) -> ServerBackend:
    return ServerBackend(f"{server.url}/v1", **{"api_key": None, "model": None, "wanted": wanted} | more)


def texts_of(texts: list[str]) -> Texts:
    return Texts(texts, [f"line {n}" for n in range(len(texts))], list(range(len(texts))))


def test_vectors_keep_the_order_of_the_texts(server):
    texts = ["x" * (n % 50 + 1) for n in range(200)]
    parts = list(in_parts(backend := connect(server), texts_of(texts), backend.embed))
    vectors = np.concatenate([vectors for _part, vectors in parts])
    assert vectors[:, 0].tolist() == [len(text) for text in texts]
    assert sum(len(body["input"]) for body in server.bodies) == 200
    assert server.bodies[0].keys() == {"model", "input", "encoding_format"}, (
        "other servers refuse what they lack"
    )


def test_options_are_sent_if_they_are_given(server):
    connect(server).embed(
        ["a"], dimensions=8, normalize=False, prompt_name="q", input_type="query", truncate=True
    )
    body = server.bodies[0]
    assert (body["dimensions"], body["normalize"], body["truncate_prompt_tokens"]) == (8, False, -1)
    assert (body["prompt_name"], body["input_type"]) == ("q", "query")


def test_vectors_as_numbers_are_taken_too(server):
    server.answer = lambda _path, body: (200, {"data": [{"index": 0, "embedding": [0.5, 1]}]})
    vectors = connect(server).embed(["a"])
    assert vectors.tolist() == [[0.5, 1.0]] and vectors.dtype == np.float32


def test_scores_have_the_numbers_of_all_documents(server):
    documents = ["x" * n for n in range(1, 71)]
    backend = connect(server, "score")
    parts = list(in_parts(backend, texts_of(documents), lambda some: backend.rerank("q", some)))
    scored = {part.start + each.index: each.score for part, found in parts for each in found}
    assert scored == {n: n + 1.0 for n in range(70)}


def test_a_refusal_tells_where_its_part_begins(server):
    def refuse(path: str, body: dict[str, Any]) -> Answer:
        if "bad" in body["input"]:
            return 400, {"error": {"message": "input[3] has 9 tokens"}}
        answer: Answer = server.usual(path, body)
        return answer

    server.answer = refuse
    with pytest.raises(RequestError, match=r"^line 67 has 9 tokens$"):
        list(in_parts(backend := connect(server), texts_of(["a"] * 67 + ["bad"]), backend.embed))


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"data": 5},
        {"data": []},
        {"data": [{"index": 7, "embedding": "AAAA"}]},
        {"data": [{"index": 0, "embedding": "!"}]},
        {"data": [{"index": 0, "embedding": ["x"]}]},
    ],
)
def test_an_answer_of_another_form_is_an_error_of_the_server(server, document):
    server.answer = lambda _path, _body: (200, document)
    with pytest.raises(ServerError, match="check --url"):
        connect(server).embed(["a"])


@pytest.mark.real_process
@pytest.mark.parametrize("is_busy", [False, True], ids=["it computes", "its queue is full"])
def test_ctrl_c_does_not_wait_for_the_server(server, tmp_path, is_busy):
    asked, is_over = threading.Event(), threading.Event()

    def keep_waiting(_path: str, _body: dict[str, Any]) -> Answer:
        asked.set()
        if not is_busy:
            is_over.wait(60)
        return 429, {"error": {"message": "5 wait"}}

    server.answer, server.retry_after = keep_waiting, "30"
    (tmp_path / "in.txt").write_text("text\n" * 100)
    command = ["embed", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.csv"), "--url", server.url]
    process = subprocess.Popen([sys.executable, "-m", "engine", *command], stderr=subprocess.PIPE)
    assert asked.wait(60)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == b""
    is_over.set()
    assert process.returncode == ExitCode.INTERRUPTED
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(server, status):
    def full_at_first(path: str, body: dict[str, Any]) -> Answer:
        full = len(server.bodies) <= 3
        answer: Answer = (status, {"error": {"message": "5 wait"}}) if full else server.usual(path, body)
        return answer

    server.answer = full_at_first
    vectors = connect(server).embed(["a"])
    assert vectors.tolist() == [[1.0, 1.0]] and len(server.bodies) == 4
    server.answer = lambda _path, _body: (status, {"error": {"message": "5 wait"}})
    with pytest.raises(RequestError if status == 429 else ServerError, match="5 wait"):
        connect(server).embed(["a"])


def test_a_failure_of_the_server_is_told(server):
    server.answer = lambda _path, _body: (500, {"error": {"message": "it burns"}})
    with pytest.raises(ServerError, match="the server failed: it burns"):
        connect(server).embed(["a"])


def test_a_model_that_cannot_do_it_is_refused_before_anything_is_sent(server):
    server.models = [{"id": "llama", "task": "generate"}]
    with pytest.raises(RequestError, match="llama at .* generates text; name the server of an embedder"):
        connect(server)
    server.models = [{"id": "ranker", "task": "score"}]
    with pytest.raises(RequestError, match="scores texts"):
        connect(server)
    assert connect(server, "score").model == "ranker"
    server.models = [{"id": "unknown"}]
    assert connect(server).model == "unknown"
    with pytest.raises(RequestError, match="has no model 'other'; it serves unknown"):
        connect(server, model="other")


# ---------------------------------------------------------------- which server


@pytest.fixture
def in_process(monkeypatch):
    def start(*_args: object) -> None:
        raise ConfigError("a model is loaded here")

    monkeypatch.setattr(backends, "_load", start)


@pytest.fixture
def running(monkeypatch):
    def run(*urls: str) -> None:
        records = [ServerRecord(i + 1, "m", "/m", url, float(i)) for i, url in enumerate(urls)]
        monkeypatch.setattr(server_client, "running_servers", lambda: records)

    run()
    return run


def embed(tmp_path, *arguments: str) -> int:
    (tmp_path / "lines").write_text("a\nbb\n")
    return cli.run(["embed", str(tmp_path / "lines"), "-o", str(tmp_path / "out.npy"), *arguments])


def test_a_server_that_runs_is_asked(server, running, in_process, tmp_path, capsys):
    running("http://127.0.0.1:9", server.url, "")
    assert embed(tmp_path) == 0
    assert np.load(tmp_path / "out.npy").tolist() == [[1.0, 1.0], [2.0, 1.0]]
    assert f"asking tiny at {server.url}, the newest of 2 servers" in capsys.readouterr().err


def test_a_server_that_generates_is_passed_over_in_silence(server, running, in_process, tmp_path, capsys):
    server.models = [{"id": "llama", "task": "generate"}]
    running(server.url)
    assert embed(tmp_path) == 2
    assert capsys.readouterr().err == "engine: a model is loaded here\n"


@pytest.mark.parametrize("arguments", [("--no-attach",), ("--model", "minilm"), ("--dtype", "float32")])
def test_what_names_a_model_loads_it(server, running, in_process, tmp_path, capsys, arguments):
    running(server.url)
    assert embed(tmp_path, *arguments) == 2
    assert "a model is loaded here" in capsys.readouterr().err


def test_a_file_that_was_not_completed_is_removed(server, running, tmp_path, capsys):
    server.answer = lambda _path, _body: (400, {"error": {"message": "input[1] has 9 tokens"}})
    assert embed(tmp_path, "--url", server.url) == 2
    assert capsys.readouterr().err == f"engine: line 2 of {tmp_path / 'lines'} has 9 tokens\n"
    assert not (tmp_path / "out.npy").exists()


def test_documents_are_printed_by_relevance(server, running, tmp_path, capsys):
    (tmp_path / "lines").write_text("a\n\nlong\tone\nbb\n")
    command = ["rerank", "q", str(tmp_path / "lines"), "--url", server.url, "--skip-empty"]
    assert cli.run(command) == 0
    assert capsys.readouterr().out == "8.000000\t3\tlong one\n2.000000\t4\tbb\n1.000000\t1\ta\n"
    assert cli.run([*command, "--top-n", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "index": 1,
        "line": 3,
        "score": 8.0,
        "document": "long\tone",
    }
    assert cli.run([*command, "--top-n", "0"]) == 2
    assert cli.run(["rerank", " ", str(tmp_path / "lines")]) == 2
