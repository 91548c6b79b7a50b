"""What `gpu/check.py` says of wrong answers and of programs that it needs: a check must be able to fail."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WITH_TRANSFORMERS = {"packaging", "pygments"}  # where that is, these are


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("path")
    (folder / "benchmarks").symlink_to(BENCHMARKS, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("benchmarks.gpu.check")


@pytest.fixture
def report(check: ModuleType) -> Any:
    return check.Report("cpu", tiny=True)


def failures(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lines = [line[3:] for line in capsys.readouterr().out.splitlines() if line.startswith("@@ ")]
    return [message["failed"] for message in map(json.loads, lines) if "failed" in message]


@pytest.mark.parametrize(
    ("tokens", "text", "differs"),
    [
        ([7, 8, 9], "abc", False),
        ([7, 4, 1], "axy", False),  # as good but for rounding; then everything may differ
        ([7, 5, 9], "ayc", True),  # clearly worse
        ([7, 3, 9], "azc", True),  # not among the best
        ([7, 8, 9], "ab", True),
    ],
)
def test_two_answers_differ_if_one_was_clearly_better(
    check: ModuleType, tokens: list[int], text: str, differs: bool
) -> None:
    tops = [{7: -0.1}, {8: -1.0, 4: -1.2, 5: -1.3}, {9: -0.1}]
    one = check.Answer([7, 8, 9], tops, "abc")
    assert check.differs(one, check.Answer(tokens, tops, text)) is differs


# ---------------------------------------------------------------- a server


class Server(ThreadingHTTPServer):
    """Answers each prompt with its own tokens; `wrong` is a prompt whose first answer is another."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wrong: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def tokens_for(self, prompt: list[int]) -> list[int]:
        first = sum(prompt) % 100
        if prompt == self.wrong:
            self.wrong = []
            first += 1000
        return [first + n for n in range(16)]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        reply = b"{}"
        if self.path == "/generate":
            tokens = self.server.tokens_for(body["input_ids"])
            parts = [tokens[:5], tokens[5:], []] if body.get("stream") else [tokens]
            chunks = [json.dumps(chunk_of(part)) for part in parts]
            reply = chunks[0].encode()
            if body.get("stream"):
                reply = "".join(f"data: {event}\n\n" for event in (*chunks, "[DONE]")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def chunk_of(tokens: list[int]) -> dict[str, Any]:
    own = [(-0.5, token, "") for token in tokens]
    meta = {"output_token_logprobs": own, "output_top_logprobs": [[row] for row in own]} if tokens else {}
    return {"text": "x" * len(tokens), "output_ids": tokens, "meta_info": meta}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("client", [0, 7])
def test_one_wrong_answer_of_any_client_is_found(
    check: ModuleType, report: Any, server: Server, client: int
) -> None:
    check._ask_server(report, server.url)

    server.wrong = check.prompts_of([5, 40, 200, 90] * 2)[client]
    with pytest.raises(AssertionError, match=rf"1 of 8 answers differ, first of client {client}: \[1\d+, "):
        check._ask_server(report, server.url)


# ---------------------------------------------------------------- what it needs


def test_a_sanitizer_without_words_still_fails_with_a_reason(
    check: ModuleType,
    report: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    binary = tmp_path / "compute-sanitizer"
    binary.write_text("#!/bin/sh\nexit 3\n")
    binary.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SystemExit):
        check.sanitizer(report)

    assert failures(capsys) == ["compute-sanitizer ended with 3: no output"]


def test_kernels_without_their_tests_packages_are_not_passed(
    check: ModuleType, report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu.kernel_checks.TEST_PACKAGES", ("pytest", "no_such_package"))
    with pytest.raises(SystemExit):
        check.kernels(report)
    assert failures(capsys) == [
        "the tests need no_such_package: make gpu-bundle, or pip install them into that Python"
    ]


def test_the_bundle_has_the_tests_packages_and_all_that_these_need(check: ModuleType) -> None:
    bundle = importlib.import_module("benchmarks.gpu.bundle")
    packages = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis"]
    lines = [line for package in packages for line in requires(package) or () if applies(line)]
    needed = {line.split(";")[0].strip() for line in lines}
    names = {name.split(">")[0].split("<")[0].split("=")[0].strip().lower() for name in needed}
    assert {"pluggy", "execnet", "sortedcontainers"} <= names
    assert {*packages, *names} - WITH_TRANSFORMERS <= {wheel.partition("<")[0] for wheel in bundle.WHEELS}


def applies(requirement: str) -> bool:
    """On Linux, with Python 3.11 or newer, and without extras."""
    return (
        "extra ==" not in requirement and "win32" not in requirement and "python_version <" not in requirement
    )
