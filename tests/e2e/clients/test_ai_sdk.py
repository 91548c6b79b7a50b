"""The AI SDK (`ai` with `@ai-sdk/openai-compatible`, by `ai_sdk.mjs`) with the default model, and the tool loops of its
three providers (`sdk_loops.mjs`), as they are by default, with a scripted model and each kind of chat template.

`make agents` installs the packages.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from ..serving import DEADLINE_S, EngineServe
from .schemas import PERSON, fits
from .scripted_server import TEMPLATES, scripted_server

PACKAGES: Final = Path(__file__).parents[3] / "build" / "agents" / "node_modules"

pytestmark = [
    pytest.mark.real_process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PACKAGES / "ai").exists(),
        reason=f"the AI SDK is not installed in {PACKAGES}: `make agents` installs it, from the npm registry",
    ),
]

ANSWER: Final = "The folder holds needle-x7."


def run(script: str, url: str, folder: Path) -> dict[str, Any]:
    """The JSON that a script prints; it finds the packages beside it."""
    (folder / "node_modules").symlink_to(PACKAGES.resolve())
    path = shutil.copy(Path(__file__).with_name(script), folder)
    done = subprocess.run(
        ["node", "--preserve-symlinks", "--preserve-symlinks-main", path, url],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, default_serve: EngineServe) -> dict[str, Any]:
    """The results of `ai_sdk.mjs`."""
    return run("ai_sdk.mjs", default_serve.url, tmp_path_factory.mktemp("ai-sdk"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_provider_runs_its_loop(template: str, tmp_path: Path):
    with scripted_server(TEMPLATES[template]) as url:
        loops = run("sdk_loops.mjs", url, tmp_path)
    assert [*loops] == ["openai", "openaiChat", "anthropic", "compatible"]
    for name, loop in loops.items():
        assert loop == {"steps": [1, 0], "text": ANSWER, "streamed": ANSWER, "later": ANSWER}, name


def test_objects(found: dict[str, Any]):
    assert fits(found["object"]["value"], PERSON)
    assert found["object"]["reason"] == "stop"
    assert found["object"]["warnings"] == []
    assert found["output"] == found["object"]["value"]


def test_a_streamed_object(found: dict[str, Any]):
    assert found["streamedObject"]["value"] == found["object"]["value"]
    assert found["streamedObject"]["numParts"] > 2


def test_a_forced_tool(found: dict[str, Any]):
    [call] = found["forced"]["calls"]
    city = call["input"]["city"]

    assert call == {"toolName": "getWeather", "input": {"city": city}}
    assert found["forced"]["results"] == [f"18 degrees in {city}"]
    assert found["forced"]["reason"] == "tool-calls"


def test_a_streamed_call(found: dict[str, Any]):
    streamed = found["streamedCalls"]

    assert streamed["calls"] == found["forced"]["calls"]
    assert json.loads(streamed["input"]) == streamed["calls"][0]["input"]
    assert streamed["reason"] == "tool-calls"
    assert {"tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result"} <= set(
        streamed["kinds"]
    )


def test_results_go_back(found: dict[str, Any]):
    assert found["steps"] == [{"reason": "tool-calls", "numCalls": 1}, {"reason": "stop", "numCalls": 0}]
    assert found["answer"]


def test_a_stream_is_the_answer(found: dict[str, Any]):
    text = found["text"]

    assert text["streamed"] == text["whole"] != ""
    assert text["reasons"][0] == text["reasons"][1]
    assert text["usages"][0] == text["usages"][1]
    assert text["usages"][0]["outputTokens"] > 0


def test_an_error_has_its_status_and_text(found: dict[str, Any]):
    assert found["error"]["status"] == 400
    assert "max_tokens" in found["error"]["message"]
