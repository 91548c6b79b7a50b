"""`engine pull`, `list`, `rm`, `ps` as commands, against a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.cli import main as cli
from engine.cli.models import uptime_text
from engine.launch.child import socket_dir as server_record
from engine.launch.child.socket_dir import ServerRecord, SocketDir, write_record
from tests.fake_hub import TOKEN, FakeHub, commit_of

WEIGHTS = bytes(range(256)) * 8000
FILES = {"config.json": b'{"dtype": "bfloat16"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
DEADLINE_S = 60.0


class Commands:
    """Runs commands in new processes, because huggingface_hub reads its variables when it is imported."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub, self.home = hub, home
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "HF_"))
        }
        self.environment = inherited | hub.environment(home) | {"TMPDIR": str(home)}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "engine", *arguments],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err


@pytest.fixture
def processes() -> Iterator[Commands]:
    with FakeHub() as hub, tempfile.TemporaryDirectory(dir="/tmp", prefix="pull-") as home:
        hub.repos["org/tiny"].commit(FILES)
        yield Commands(hub, Path(home))


class CommandsHere(Commands):
    """Runs commands in this process with the constants of huggingface_hub set: a process takes a second to start."""

    def __init__(self, hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(hub, home)
        self._capsys = capsys

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        from huggingface_hub import constants

        variables = self.environment | environment
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("ENGINE_", "HF_"))]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            hf_home, cache = (Path(variables[name]) for name in ("HF_HOME", "ENGINE_CACHE_DIR"))
            self.hub.serve_this_process(hf_home, cache, patch)
            patch.setenv("HF_TOKEN", variables["HF_TOKEN"])
            patch.setattr(constants, "HF_HUB_OFFLINE", variables["HF_HUB_OFFLINE"] == "1")
            patch.setattr(tempfile, "tempdir", variables["TMPDIR"])
            patch.setattr(server_record, "_SHARED_TMP", self.home)
            code = cli.run(arguments)
        return code, *self._capsys.readouterr()


@pytest.fixture
def commands(processes: Commands, capsys: pytest.CaptureFixture[str]) -> CommandsHere:
    return CommandsHere(processes.hub, processes.home, capsys)


def test_processes_pull_and_list(processes: Commands) -> None:
    code, out, err = processes.run("pull", "org/tiny")
    assert (code, err.splitlines()[0]) == (0, "downloading org/tiny: 2.0 MiB")
    assert out.startswith("org/tiny: downloaded 2.0 MiB of 2.0 MiB, commit ")
    assert processes.run("list")[1].splitlines()[1].split()[:2] == ["org/tiny", "BF16"]


def test_pull_list_and_rm(commands: CommandsHere) -> None:
    code, out, err = commands.run("pull", "org/tiny")
    assert (code, err.splitlines()[0]) == (0, "downloading org/tiny: 2.0 MiB")
    assert sorted(line.split(":")[0].strip() for line in err.splitlines()[1:4]) == sorted(FILES)
    assert re.fullmatch(r"org/tiny: downloaded 2\.0 MiB of 2\.0 MiB, commit [0-9a-f]{12}: /\S+\n", out)

    assert commands.run("pull", "org/tiny")[1].startswith("org/tiny: up to date, 2.0 MiB")
    assert commands.run("pull", "--quiet", "org/tiny")[2] == ""

    code, out, _ = commands.run("list")
    assert [line.split() for line in out.splitlines()] == [
        ["NAME", "WEIGHTS", "SIZE", "COMMIT", "LAST", "USED"],
        ["org/tiny", "BF16", "2.0", "MiB", commit_of(FILES)[:12], "just", "now"],
    ]
    (row,) = json.loads(commands.run("list", "--json")[1])
    assert (row["name"], row["quantization"], row["complete"]) == ("org/tiny", "BF16", True)
    assert row["size_bytes"] == sum(map(len, FILES.values()))

    assert commands.run("rm", "org/tiny") == (0, "org/tiny: removed 3 files, 2.0 MiB are free now\n", "")
    assert commands.run("list")[1].startswith("There are no models on this machine")
    code, _, err = commands.run("rm", "org/tiny")
    assert (code, err) == (2, "engine: org/tiny: is not on this machine; `engine list` shows what is\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_download_and_the_next_pull_brings_the_rest(processes: Commands) -> None:
    hold = processes.hub.hold["model.safetensors"] = threading.Event()
    process = processes.start("pull", "org/tiny")
    assert processes.hub.started["model.safetensors"].wait(DEADLINE_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "incomplete" in processes.run("list")[1]

    hold.set()
    assert processes.run("pull", "org/tiny")[0] == 0
    assert list(processes.home.rglob("*.incomplete")) == []


def test_killed_processes_leave_no_lock(processes: Commands, commands: CommandsHere) -> None:
    hold = processes.hub.hold["model.safetensors"] = threading.Event()
    process = processes.start("pull", "org/tiny")
    assert processes.hub.started["model.safetensors"].wait(DEADLINE_S)
    process.kill()
    process.communicate()
    hold.set()
    assert commands.run("pull", "org/tiny")[0] == 0


def test_gated_models_and_the_token_of_the_environment(commands: CommandsHere) -> None:
    commands.hub.repos["org/gated"].commit(FILES)
    commands.hub.repos["org/gated"].gated = True
    code, _, err = commands.run("pull", "org/gated")
    assert (code, err.splitlines()[-1].partition(":")[0]) == (2, "engine")
    assert "access must be granted; accept the terms at" in err
    assert commands.run("pull", "org/gated", HF_TOKEN=TOKEN)[0] == 0


def test_quantizations_by_name(commands: CommandsHere) -> None:
    commands.hub.repos["org/gguf"].commit({"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8"})
    code, _, err = commands.run("pull", "org/gguf")
    assert (code, err) == (
        2,
        "engine: org/gguf: has several GGUF models; it has Q4_0, Q8_0: choose one, such as org/gguf:Q4_0\n",
    )
    assert commands.run("pull", "org/gguf:q8_0")[0] == 0
    assert commands.run("list")[1].splitlines()[1].split()[:2] == ["org/gguf:Q8_0", "Q8_0"]


def test_offline_names_what_is_there(commands: CommandsHere) -> None:
    assert commands.run("pull", "org/tiny")[0] == 0
    code, _, err = commands.run("pull", "org/other", HF_HUB_OFFLINE="1")
    assert code == 2
    assert "HF_HUB_OFFLINE is set" in err
    assert "on this machine are org/tiny" in err


def test_paths_and_mistyped_names(commands: CommandsHere, tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert commands.run("pull", str(tmp_path))[1] == f"{tmp_path} is on this machine: {tmp_path}\n"
    code, _, err = commands.run("pull", "smolm2")
    assert code == 2
    assert "smolm2: there is no such folder or .gguf file (did you mean smollm2" in err
    code, _, err = commands.run("rm", str(tmp_path))
    assert code == 2
    assert "removes models that were pulled, by name" in err


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the servers of a test note themselves; `tmp_path` is made before, in the usual folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setattr(server_record, "_SHARED_TMP", Path(path))
        yield Path(path)


def test_ps(servers: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["ps"]) == 0
    assert capsys.readouterr().out == "No server runs; `engine serve` starts one.\n"
    with SocketDir() as first, SocketDir() as second:
        started_s = time.time() - 125
        write_record(first.path, ServerRecord(os.getpid(), "tiny", "/t", "http://127.0.0.1:1", started_s))
        write_record(second.path, ServerRecord(os.getpid(), "big", "/b", "", time.time()))
        assert cli.run(["ps"]) == 0
        header, one, two = capsys.readouterr().out.splitlines()
        assert header.split() == ["MODEL", "ADDRESS", "PID", "MEMORY", "UPTIME"]
        assert one.split()[:3] == ["tiny", "http://127.0.0.1:1", str(os.getpid())]
        assert re.search(r" \d+(\.\d+)? [MG]iB +2:0\d$", one)
        assert two.split()[:2] == ["big", "starting"]
        assert cli.run(["ps", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(row["model"], row["url"]) for row in rows] == [("tiny", "http://127.0.0.1:1"), ("big", None)]
        assert rows[0]["memory_bytes"] > 0 and rows[0]["uptime_s"] >= 125


USED = {
    "org/tiny": ["org/tiny", "org/tiny@main"],
    "org/gguf:Q8_0": ["org/gguf", "org/gguf@main", "org/gguf:Q8_0", "org/gguf:q8_0"],
}
UNUSED = {"org/tiny": ["org/gguf"], "org/gguf:Q8_0": ["org/gguf:Q4_0", "org/tiny"]}


@pytest.fixture
def served(
    servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], FakeHub]]:
    """Pulls all models and notes a server of one of them."""
    from engine.models.source import resolve_source

    with FakeHub() as hub, SocketDir() as socket_dir:
        hub.repos["org/tiny"].commit(FILES)
        hub.repos["org/gguf"].commit({"m-Q4_0.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8"})
        hub.serve_this_process(tmp_path, tmp_path / "cache", monkeypatch)

        def note(model: str) -> FakeHub:
            paths = {
                name: resolve_source(name).path for name in ("org/tiny", "org/gguf:Q4_0", "org/gguf:Q8_0")
            }
            write_record(socket_dir.path, ServerRecord(4711, "served", paths[model], "", 0.0))
            return hub

        yield note


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("model", "name"), [(model, name) for model in USED for name in USED[model]])
def test_a_model_that_a_server_uses_stays_unless_forced(
    served: Callable[[str], FakeHub], capsys: pytest.CaptureFixture[str], model: str, name: str
) -> None:
    served(model)
    assert cli.run(["rm", name]) == 2
    assert capsys.readouterr().err == (
        f"engine: {name}: the server with process id 4711 uses it; stop that first, or pass --force\n"
    )
    assert cli.run(["rm", "--force", name]) == 0


@pytest.mark.parametrize(("model", "name"), [(model, name) for model in UNUSED for name in UNUSED[model]])
def test_a_model_beside_it_can_go(served: Callable[[str], FakeHub], model: str, name: str) -> None:
    served(model)
    assert cli.run(["rm", name]) == 0


def test_the_revision_that_a_server_uses_stays_after_a_newer_one_came(
    served: Callable[[str], FakeHub], capsys: pytest.CaptureFixture[str]
) -> None:
    hub = served("org/tiny")
    hub.repos["org/tiny"].commit(FILES | {"config.json": b"{}"})
    assert cli.run(["pull", "--quiet", "org/tiny"]) == 0
    assert cli.run(["rm", "org/tiny"]) == 2
    assert "the server with process id 4711 uses it" in capsys.readouterr().err
    assert cli.run(["rm", "org/tiny@main"]) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (187, "3:07"), (7389, "2:03:09"), (439_389, "5 d 2:03:09")],
)
def test_uptime(seconds: float, text: str) -> None:
    assert uptime_text(seconds) == text
