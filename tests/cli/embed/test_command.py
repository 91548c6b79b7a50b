"""`engine embed` and `engine rerank` as programs, with the model in their process."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.cli import main as cli
from tests.embedders import MAX_LEN, SIZE, make_embedder

ENGINE = [sys.executable, "-m", "engine.cli.main"]
LINES = b"the quick brown fox\na cat\nstock market\n"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = make_embedder(tmp_path_factory.mktemp("models") / "tiny-bert")
    return ["--model", str(folder), "--num-threads", "1", "--dtype", "float32"]


def run(*arguments: str, stdin: bytes = LINES) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*ENGINE, *arguments], input=stdin, capture_output=True, timeout=100, check=False)


@pytest.fixture
def run_here(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command in this process, which has what a new one would first import: exit code, output, errors."""

    def run_one(*arguments: str, stdin: bytes = LINES) -> tuple[int, str, str]:
        (tmp_path / "stdin").write_bytes(stdin)
        with open(tmp_path / "stdin", encoding="utf-8") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", file)
            code = cli.run(list(arguments))
        out, error = capfdbinary.readouterr()
        return code, out.decode(errors="replace"), error.decode()

    threads = torch.get_num_threads()
    yield run_one
    torch.set_num_threads(threads)


def test_lines_in_vectors_out(options):
    done = run("embed", *options)
    assert (done.returncode, done.stderr) == (0, b"")
    vectors = np.load(io.BytesIO(done.stdout))
    assert vectors.shape == (3, SIZE)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


@pytest.mark.slow
def test_documents_are_sorted(options):
    done = run("rerank", "a cat", *options)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.splitlines()[0].split(b"\t")[1:] == [b"2", b"a cat"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (
            (),
            b"a\n" + b"one " * MAX_LEN,
            f"line 2 of standard input has {MAX_LEN + 2} tokens and the model takes",
        ),
        (
            ("--dimensions", "8"),
            LINES,
            "dimensions is 8, but the model was trained for vectors of 48 numbers only",
        ),
        (("--input-type", "title"), LINES, "input_type is 'title'"),
    ],
)
def test_what_the_model_refuses(run_here, options, arguments, stdin, message):
    code, out, error = run_here("embed", *options, *arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert error.startswith(f"engine: {message}") and error.count("\n") == 1
    assert "the server" not in error


def test_a_model_that_generates_is_refused_unless_it_is_asked_to(run_here, tiny_model: Path):
    code, _, error = run_here("embed", "--model", str(tiny_model))
    assert code == 2
    assert error.endswith(
        "generates text and makes no vectors; name an embedder with --model, or pass --task embed\n"
    )
    code, out, _ = run_here("embed", "--model", str(tiny_model), "--task", "embed", "--num-threads", "1")
    assert code == 0 and out


def test_a_chat_with_an_embedder_is_refused_in_a_sentence(run_here, options):
    code, out, error = run_here("chat", "hello", *options, stdin=b"")
    assert (code, out) == (2, "")
    assert error == (
        "engine: tiny-bert makes vectors of texts and cannot chat; use `engine embed` with it, or chat with another "
        "model\n"
    )


@pytest.mark.slow
def test_a_reader_that_closes_its_pipe_ends_it(options):
    command = subprocess.Popen(
        [*ENGINE, "embed", *options, "--format", "jsonl"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None and command.stdin is not None
    command.stdout.close()
    command.stdin.write(LINES * 2000)
    command.stdin.close()
    assert command.stderr is not None
    with command.stderr:
        assert command.stderr.read() == b""
    assert command.wait(60) == 141


@pytest.mark.slow
def test_a_terminal_shows_a_table_and_refuses_binary(options):
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "wb") as stdout:
        done = subprocess.run(
            [*ENGINE, "embed", *options],
            input=LINES,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
        )
        shown = os.read(controller, 65536).decode()
        refused = subprocess.run(
            [*ENGINE, "embed", "--format", "npy", *options],
            input=LINES,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=100,
            check=False,
        )
    os.close(controller)
    assert done.returncode == 0 and "3 vectors of 48 numbers" in shown and "similarity" in shown
    assert refused.returncode == 2 and b"standard output is a terminal" in refused.stderr
