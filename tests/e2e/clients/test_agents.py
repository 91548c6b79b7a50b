"""Coding agents as people start them, headless, against a server with a scripted model: they list a folder, twice.
`engine launch` starts three of them.

Each runs its own loop: it sends its tools, runs the call on this machine, sends the result back and prints the answer.
The second run goes on with the first one's session, so that its history holds calls, results and an earlier answer.
`make agents` installs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from engine.cli.launch import AGENTS as LAUNCHED
from engine.launch.child.socket_dir import ServerRecord, SocketDir, write_record

from ..serving import DEADLINE_S, engine_command
from .scripted_server import TEMPLATES, scripted_server

pytestmark = [pytest.mark.real_process, pytest.mark.slow]

BUILD: Final = Path(__file__).parents[3] / "build"
AGENTS: Final = BUILD / "agents" / "node_modules" / ".bin"
AIDER: Final = BUILD / "aider" / "bin" / "aider"
FILE: Final = "needle-x7.txt"


class Agent(NamedTuple):
    """A coding agent.

    Attributes:
        command: its words with a question; the second list goes on with the last session.
        variables: of its environment, by the server's URL.
        files: its settings below the home folder, by the server's URL.
    """

    command: tuple[list[str], list[str]]
    variables: Callable[[str], dict[str, str]] = lambda url: {}
    files: Callable[[str], dict[str, str]] = lambda url: {}


def _opencode(url: str) -> str:
    options = {"baseURL": f"{url}/v1", "apiKey": "unused"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"any": {"name": "any"}}}
    return json.dumps({"provider": {"engine": provider}, "model": "engine/any", "autoupdate": False})


_CODEX: Final = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
_CLAUDE: Final = ["-p", "list the files", "--allowedTools", "Bash", "--tools", "Bash,Read"]
_QWEN: Final = ["--auth-type", "openai", "--yolo", "-p", "list the files"]

BY_NAME: Final = {
    "claude": Agent(
        (_CLAUDE, ["-c", *_CLAUDE]),
        variables=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "unused",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    ),
    "codex": Agent(
        (["exec", *_CODEX, "list the files"], ["exec", "resume", "--last", *_CODEX, "list the files"]),
        files=lambda url: {
            ".codex/config.toml": 'model = "any"\nmodel_provider = "engine"\n[model_providers.engine]\n'
            f'name = "engine"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        },
    ),
    "opencode": Agent(
        (["run", "list the files"], ["run", "-c", "list the files"]),
        files=lambda url: {".config/opencode/opencode.json": _opencode(url)},
    ),
    "qwen": Agent(
        (_QWEN, ["--continue", *_QWEN]),
        variables=lambda url: {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "unused",
            "OPENAI_MODEL": "any",
        },
    ),
}


@pytest.fixture(params=TEMPLATES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server with each kind of template."""
    with scripted_server(TEMPLATES[request.param]) as address:
        yield address


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder, with the folder that the agent works in."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / FILE).write_text("hay\n")
    return tmp_path


def run(home: Path, command: list[str], variables: dict[str, str]) -> str:
    """The output of a command, with nothing of the caller's settings."""
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=home / "work",
        env=inherited | {"HOME": str(home), "TMPDIR": str(home)} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", BY_NAME)
def test_an_agent_calls_its_shell_and_goes_on_with_the_session(name: str, url: str, home: Path):
    if not (AGENTS / name).exists():
        pytest.skip(f"{name} is not installed in {AGENTS}: `make agents` installs it, from the npm registry")
    agent = BY_NAME[name]
    for path, text in agent.files(url).items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)

    for words in agent.command:
        printed = run(home, [str(AGENTS / name), *words], agent.variables(url))
        assert printed.strip().endswith("The folder holds needle-x7."), printed


@pytest.mark.parametrize("name", LAUNCHED)
def test_engine_launch_starts_an_agent_that_has_no_files(name: str, home: Path, monkeypatch):
    if not (AGENTS / name).exists():
        pytest.skip(f"{name} is not installed in {AGENTS}: `make agents` installs it, from the npm registry")
    monkeypatch.setenv("PATH", f"{AGENTS}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", None)
    variables = {**BY_NAME[name].variables(""), "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, scripted_server(TEMPLATES["any_order"]) as url:
        monkeypatch.setenv("TMPDIR", folder)
        with SocketDir() as sockets:
            # The newest one, whatever else runs here.
            write_record(sockets.path, ServerRecord(os.getpid(), "any", "/any", url, 1e12))
            for words in BY_NAME[name].command:
                command = engine_command("launch", name, "--", *words)
                printed = run(home, command, variables | {"TMPDIR": folder})
                assert printed.strip().endswith("The folder holds needle-x7."), printed


def test_aider_writes_what_the_model_answers(url: str, home: Path):
    if not AIDER.exists():
        pytest.skip(
            f"aider is not installed in {AIDER.parent}: `make agents` installs it, from the package index"
        )
    words = [
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--no-show-model-warnings",
        "--analytics-disable",
    ]
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "unused"}

    printed = run(
        home,
        [str(AIDER), "--model", "openai/any", *words, "--edit-format", "whole", "--message", "greet", FILE],
        variables,
    )

    assert (home / "work" / FILE).read_text() == "hello\n", printed
