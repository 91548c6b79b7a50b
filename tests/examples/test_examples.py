"""The files of `examples/`, run as a reader runs them: scripts against a real server, the notebook, the settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from engine.runtime.config.config_sources import from_yaml_file, merge
from tests.e2e.serving import DEADLINE_S, EngineServe, engine_command, engine_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "a-key"
pytestmark = pytest.mark.real_process


@pytest.fixture(scope="module")
def model(small_llama: Path) -> Path:
    return small_llama


@pytest.fixture(scope="module")
def serve(model: Path) -> Iterator[EngineServe]:
    with EngineServe(str(model), "--dtype", "float32", "--api-key", KEY) as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert "Traceback" not in engine.log


def run(tmp: Path, *command: str | Path, **environment: str) -> list[str]:
    """The lines that a command prints; it must succeed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        cwd=tmp,
        env=engine_environment(tmp) | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def script(tmp: Path, name: str, *arguments: str | Path) -> list[str]:
    return run(tmp, sys.executable, EXAMPLES / name, *arguments)


def client(tmp: Path, serve: EngineServe, name: str, *arguments: str) -> list[str]:
    return script(tmp, name, "--url", serve.url, "--api-key", KEY, *arguments)


@pytest.mark.slow
def test_chat(tmp_path, serve):
    lines = client(tmp_path, serve, "chat.py")

    assert [line for line in lines if line.startswith("> ")] == [
        "> Name three rivers in Europe.",
        "> Which of them is the longest?",
    ]
    counts = [re.fullmatch(r"  (\d+) tokens, (\d+) of them cached", line) for line in lines]
    (first, _), (second, cached) = ((int(each[1]), int(each[2])) for each in counts if each)
    assert 0 < cached < second
    assert first < second


@pytest.mark.slow
def test_structured(tmp_path, serve):
    *_, person, verdict = client(tmp_path, serve, "structured.py")

    found = json.loads(person)
    assert set(found) == {"name", "age", "languages"}
    assert 0 <= found["age"] <= 120
    assert set(found["languages"]) <= {"de", "en", "fr", "ja"}
    assert verdict in ("yes", "no")


@pytest.mark.slow
def test_tools(tmp_path, serve):
    first, *_ = client(tmp_path, serve, "tools.py")

    assert re.fullmatch(r"temperature\(\{'city': '(Bern|Oslo|Rome)'\}\) = [\d.]+", first), first


@pytest.mark.slow
def test_many_requests(tmp_path, serve):
    *answers, last = client(tmp_path, serve, "many_requests.py", "--num", "40")

    assert sorted(int(line.partition(":")[0]) for line in answers) == list(range(40))
    assert re.fullmatch(r"40 answers, \d+ tokens in [\d.]+ s: \d+ tokens/s", last)


@pytest.mark.slow
def test_curl(tmp_path, serve):
    lines = run(tmp_path, "sh", EXAMPLES / "curl.sh", serve.url, ENGINE_API_KEY=KEY)

    parts = "\n".join(lines).split("\n# ")
    assert len(parts) == 5
    bodies = [part.partition("\n")[2] for part in parts]
    assert json.loads(bodies[0])["data"][0]["id"] == serve.model
    assert json.loads(bodies[1])["choices"][0]["message"]["role"] == "assistant"
    assert bodies[2].rstrip().endswith("data: [DONE]")
    color = json.loads(json.loads(bodies[3])["choices"][0]["message"]["content"])
    assert color["color"] in ("red", "green", "blue")
    assert json.loads(bodies[4])["count"] > 0


@pytest.mark.slow
def test_batch(tmp_path, model):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": f"p{i}", "prompt": f"one two {i}"}) for i in range(5)))
    lines = script(tmp_path, "batch.py", prompts, "--model", model, "--max-tokens", "6")

    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(5)]
    assert all(row["finish_reason"] in ("stop", "length") for row in rows)


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell(tmp_path, model):
    """As a kernel runs it: one namespace, and the value of a cell's last line is shown."""
    program = tmp_path / "cells.py"
    program.write_text("\n".join(cells()).replace("LLM()", f"LLM({str(model)!r}, dtype='float32')"))
    lines = run(tmp_path, sys.executable, program)

    assert "True" in lines  # the same answer from the cache
    assert len([line for line in lines if line.startswith(("'", '"'))]) >= 8


@pytest.mark.parametrize("path", sorted((EXAMPLES / "settings").glob("*.yaml")), ids=lambda path: path.name)
def test_settings_are_taken(path, tmp_path):
    merged = merge(from_yaml_file(path))
    given = yaml.safe_load(path.read_text())

    origins = {name for name, origin in merged.origins.items() if origin.startswith(str(path))}
    assert origins == set(given)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["laptop.yaml", "documents.yaml", "overnight.yaml"])
def test_a_server_starts_with_the_settings(name, tmp_path, model):
    """Those that need no file of keys."""
    lines = run(
        tmp_path,
        *engine_command("serve", str(model), "--config", str(EXAMPLES / "settings" / name)),
        *("--max-model-len", "2048", "--print-config"),
        HOME=os.environ.get("HOME", "/"),
    )
    assert any("preset" in line for line in lines)


def test_the_readme_lists_every_example():
    linked = set(re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text()))
    present = {
        path.name for path in EXAMPLES.iterdir() if path.name != "README.md" and path.name[0] not in "._"
    }
    assert linked == present
