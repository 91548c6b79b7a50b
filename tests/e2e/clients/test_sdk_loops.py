"""Tool loops of the AI SDK with its providers of OpenAI, Anthropic and compatible servers, as they are by default."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from ..serving import DEADLINE_S
from .scripted_server import TEMPLATES, scripted_server

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

PACKAGES: Final = Path(__file__).parents[3] / "build" / "agents"
SCRIPT: Final = Path(__file__).with_name("sdk_loops.mjs")
ANSWER: Final = "The folder holds needle-x7."


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_provider_runs_its_loop(template: str, tmp_path: Path):
    if not (PACKAGES / "node_modules" / "ai").exists():
        pytest.skip(
            f"the AI SDK is not installed in {PACKAGES}: `make agents` installs it, from the npm registry"
        )
    (tmp_path / "node_modules").symlink_to(PACKAGES.resolve() / "node_modules")
    script = shutil.copy(SCRIPT, tmp_path)
    with scripted_server(TEMPLATES[template]) as url:
        run = subprocess.run(
            ["node", "--preserve-symlinks", "--preserve-symlinks-main", script, url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    for name, found in json.loads(run.stdout.splitlines()[-1]).items():
        assert found == {"steps": [1, 0], "text": ANSWER, "streamed": ANSWER, "later": ANSWER}, name
