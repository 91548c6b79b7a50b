"""`docs/embeddings.md`: its examples run, against the real MiniLM; the port is replaced by a free one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.models.hub.built_in.fetch import cached_model
from engine.models.hub.built_in.models import DEFAULT_MODEL, MINILM
from tests.e2e.serving import EngineServe

from .conftest import DOCS

pytestmark = [pytest.mark.model, pytest.mark.real_process, pytest.mark.timeout(300)]

TEXT = (DOCS / "embeddings.md").read_text()
ADDRESS = "http://127.0.0.1:30000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def requests() -> list[str]:
    return [block.removeprefix("$ ") for block in blocks("console") if block.startswith("$ curl")]


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServe]:
    if cached_model(MINILM) is None:
        pytest.skip("minilm is not in the cache; `engine pull minilm` downloads it")
    with EngineServe("minilm") as engine:
        yield engine.wait_until_ready()


def run(command: list[str] | str, folder: Path, stdin: str = "", **options: Any) -> str:
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=folder, timeout=120, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    stdout: str = done.stdout
    return stdout


@pytest.mark.parametrize("command", [each for each in requests() if "/v1/decisions" in each])
def test_a_decision(command, tmp_path):
    if cached_model(DEFAULT_MODEL) is None:
        pytest.skip("the default model is not in the cache; `engine pull` downloads it")
    with EngineServe() as engine:
        url = engine.wait_until_ready().url
        answers = json.loads(run(command.replace(ADDRESS, url), tmp_path, shell=True))["answers"]
        assert engine.stop() == 0, engine.log
    assert [answer["type"] for answer in answers] == ["predicate", "choice", "score"]
    assert all(answer["label_mass"] > 0.01 for answer in answers)


@pytest.mark.parametrize("command", [each for each in requests() if "/v1/decisions" not in each])
def test_a_request(server, command, tmp_path):
    answer = json.loads(run(command.replace(ADDRESS, server.url), tmp_path, shell=True))
    assert "error" not in answer
    assert answer["model"] == server.model


def test_the_figures_of_the_rerank_example(server, tmp_path):
    command = next(command for command in requests() if "rerank" in command)
    [result] = json.loads(run(command.replace(ADDRESS, server.url), tmp_path, shell=True))["results"]
    shown = next(json.loads(block) for block in blocks("json") if "rerank-" in block)
    assert result["document"] == shown["results"][0]["document"]
    assert result["relevance_score"] == pytest.approx(shown["results"][0]["relevance_score"], abs=0.01)


@pytest.mark.parametrize("program", blocks("python"))
def test_a_program(server, program, tmp_path):
    for module in ("langchain_openai",):
        if module in program:
            pytest.importorskip(module)
    assert run([sys.executable, "-c", program.replace(ADDRESS, server.url)], tmp_path)


def test_the_commands(server, tmp_path):
    program = tmp_path / "engine"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m engine "$@"\n')
    program.chmod(0o755)
    (tmp_path / "lines.txt").write_text("a cat\na kitten\n")
    (tmp_path / "articles.txt").write_text("Send the form to change a password.\nBread needs salt.\n")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(server.tmp)}
    first = blocks("console")[0]
    for command in re.findall(r"^\$ (engine (?:embed|rerank) [^#\n]*)", first, re.MULTILINE):
        run(command, tmp_path, shell=True, env=environment)
    assert (tmp_path / "vectors.npy").stat().st_size > 2 * 384 * 4
