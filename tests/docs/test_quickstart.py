"""`docs/quickstart.md`: every command of it is run, against the default model; the port is replaced by a free one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.runtime.config.environment import variable_of

from .conftest import DOCS

TEXT = (DOCS / "quickstart.md").read_text()
PORT = "30000"
DEADLINE_S = 240.0
NOT_RUN = {
    "make venv && source .venv/bin/activate": "it makes an environment, which CI does with the same target"
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Each with its continued lines."""
    found = [
        each.strip() for block in blocks("console") for each in re.split(r"^\$ ", block, flags=re.MULTILINE)
    ]
    return [each for each in found if each]


def is_server(command: str) -> bool:
    return bool(re.match(r"(\w+=\S+ )*engine serve", command)) and "--print-config" not in command


class Reader:
    """Does what the page says, in order, in an environment where `engine` is this checkout's."""

    def __init__(self, tmp: Path) -> None:
        program = tmp / "bin" / "engine"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m engine "$@"\n')
        program.chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name != "ENGINE_API_KEY"}
        self.environment = inherited | {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "2",
            variable_of("model"): "default",  # servers of other tests are not attached to
        }
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = str(probe.getsockname()[1])
        self.tmp = tmp
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command.replace(PORT, self.port)],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.tmp,
            env=self.environment,
            timeout=DEADLINE_S,
        )
        # `head` may end before the command that it reads from
        assert done.returncode == 0 or (done.returncode == 141 and "| head" in command), (
            done.stdout + done.stderr
        )
        return done.stdout

    def serve(self, command: str) -> None:
        """Replace the server."""
        self.stop()
        log = self.tmp / "log"
        with log.open("wb") as file:
            self._server = subprocess.Popen(
                ["bash", "-c", f"{command} --port {self.port}"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment,
                cwd=self.tmp,
            )
        deadline_s = time.monotonic() + DEADLINE_S
        while b"Stop with Ctrl-C." not in log.read_bytes():
            assert time.monotonic() < deadline_s, log.read_text()
            assert self._server.poll() is None, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(0.05)

    def stop(self) -> None:
        """Stop the server as a service manager does."""
        if self._server is not None:
            self._server.terminate()
            assert self._server.wait(DEADLINE_S) == 0
            self._server = None


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    server = reader._server
    if server is not None:
        server.kill()
        server.wait()


def test_the_page_is_short():
    assert TEXT.count("\n") <= 150
    assert max(map(len, TEXT.splitlines())) <= 120


def test_its_sections_are_the_four_kinds_of_readers():
    headings = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert headings == ["At home", "In a notebook", "A platform team", "Operations"]


def test_its_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", TEXT):
        assert (DOCS / target).exists(), target


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.real_process
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_command_works(reader):
    assert set(commands()) >= NOT_RUN.keys()
    outputs: dict[str, str] = {}
    for command in commands():
        if command in NOT_RUN:
            continue
        if is_server(command):
            reader.serve(command)
            assert httpx.get(f"http://127.0.0.1:{reader.port}/health").status_code == 200
        else:
            outputs[command] = reader.run(command)
    reader.stop()

    assert all(output.strip() for command, output in outputs.items() if "log_level" not in command)
    errors = {command: output for command, output in outputs.items() if '"error"' in output}
    assert errors == {}


@pytest.mark.slow
@pytest.mark.model
def test_the_program_of_the_notebook_works(reader):
    [program] = blocks("python")
    path = reader.tmp / "program.py"
    path.write_text(program)

    assert reader.run(f"{sys.executable} {path}").strip()
