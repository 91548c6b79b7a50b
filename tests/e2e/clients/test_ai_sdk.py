"""The AI SDK (`ai` with three of its providers, by `ai_sdk.mjs`) with the default model.

The packages are installed into pytest's cache by the first run. Skipped where there is no Node, or no npm registry.
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

NODE, NPM = map(shutil.which, ("node", "npm"))

pytestmark = [
    pytest.mark.real_process,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        NODE is None or NPM is None, reason="there is no Node.js here (Debian: apt install npm)"
    ),
]

SCRIPT: Final = Path(__file__).with_name("ai_sdk.mjs")
PACKAGES: Final = {
    "ai": "6.0.326",
    "@ai-sdk/anthropic": "3.0.140",
    "@ai-sdk/openai": "3.0.141",
    "@ai-sdk/openai-compatible": "2.0.92",
    "zod": "4.6.7",
}


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    """A folder with the packages."""
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("ai-sdk")
    wanted = json.dumps({"private": True, "dependencies": PACKAGES})
    done = folder / "done"
    if not done.exists() or done.read_text() != wanted:
        (folder / "package.json").write_text(wanted)
        command = [str(NPM), "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0"]
        installed = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
        )
        if installed.returncode != 0:
            pytest.skip(f"npm cannot install the AI SDK: {installed.stderr.strip()[-200:]}")
        done.write_text(wanted)
    return folder


@pytest.fixture(scope="module")
def found(packages: Path, default_serve: EngineServe) -> dict[str, Any]:
    """What the script got."""
    script = shutil.copy(SCRIPT, packages)
    run = subprocess.run(
        [str(NODE), script, default_serve.url],
        cwd=packages,
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


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


@pytest.mark.parametrize("vendor", ["openai", "openai.chat", "anthropic", "compatible"])
def test_a_loop_of_each_provider_with_its_defaults(found: dict[str, Any], vendor: str):
    got = found["vendors"][vendor]

    assert got["text"]
    assert got["error"] is None
    for steps in got["steps"]:
        assert len(steps) == 2
        assert steps[0]["reason"] == "tool-calls"
        assert len(steps[0]["results"]) == 1
        assert "18 degrees in " in steps[0]["results"][0]


def test_an_error_has_its_status_and_text(found: dict[str, Any]):
    assert found["error"]["status"] == 400
    assert "max_tokens" in found["error"]["message"]
