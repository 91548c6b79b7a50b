"""The report about a failure: what is in it, where it is, and that it is never a failure itself."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import sys

import pytest

from engine.launch.child.crash_report import (
    KEPT_REPORTS,
    CrashReports,
    crash_dir,
    is_black_box,
    read_fatal_stacks,
    read_stacks,
)
from engine.runtime.config.engine_config import CacheConfig, EngineConfig
from engine.runtime.config.server_config import LogConfig, ServerConfig

LEAVE_STACKS = """
import os, pathlib, signal, sys
from engine.launch.child.crash_report import keep_stacks
keep_stacks(pathlib.Path(sys.argv[1]), "scheduler")
def somewhere():
    os.kill(os.getpid(), signal.SIGUSR1)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
somewhere()
"""


@dataclasses.dataclass
class Child:
    """What a report wants to know of a process."""

    label: str
    pid: int = 1
    exit_code: int | None = 0
    traceback: str = ""

    def describe_end(self) -> str:
        return f"{self.label} exited with code {self.exit_code}"


@pytest.fixture
def config(tmp_path):
    return EngineConfig(
        log=LogConfig(crash_dir=str(tmp_path / "crashes")),
        server=ServerConfig(api_key=("s3cret",), port=8123),
        cache=CacheConfig(kv_store="redis://:s3cret@localhost"),
    )


def write(config, tmp_path, *children, decisions=lambda folder: ["-0.1 s step=7"]):
    words = CrashReports(config, decisions, clock=lambda: 1e9).note("scheduler fell over", children, tmp_path)
    assert words.startswith("; report: ")
    return words.removeprefix("; report: ")


def test_it_has_the_cause_every_process_the_decisions_and_the_settings(config, tmp_path):
    (tmp_path / "fatal_detokenizer").write_text("Fatal Python error: Segmentation fault\n")
    (tmp_path / "stacks_tokenizer_manager").write_text("Current thread (most recent call first):\n")
    path = write(
        config,
        tmp_path,
        Child("scheduler", 11, 1, "Traceback (most recent call last):\nValueError: odd\n"),
        Child("detokenizer", 12, -11),
        Child("tokenizer_manager", 13),
        Child("model_runner_1", 14, None),
    )
    with open(path) as file:
        text = file.read()

    assert path == str(tmp_path / "crashes" / path.rpartition("/")[2])
    assert "crash-20010909T014640Z-" in path
    for part in (
        "cause: scheduler fell over\n",
        "scheduler (pid 11): scheduler exited with code 1\n\nTraceback (most recent call last):\nValueError: odd\n",
        "detokenizer (pid 12): detokenizer exited with code -11\n\nFatal Python error: Segmentation fault\n",
        "tokenizer_manager (pid 13): ended when it was told to\n",
        "where it was when the engine gave up:\nCurrent thread",
        "model_runner_1 (pid 14): did not end when it was told to\n",
        "-0.1 s step=7\n",
        "port: 8123\n",
        "api_key: (hidden)\n",
        "kv_store: (hidden)\n",
    ):
        assert part in text, part
    assert "s3cret" not in text


def test_two_reports_of_one_second_are_two_files(config, tmp_path):
    first, second, third = (write(config, tmp_path) for _ in range(3))
    assert (second, third) == (first.replace(".txt", "-2.txt"), first.replace(".txt", "-3.txt"))


def test_only_its_owner_can_read_it(config, tmp_path):
    mode = stat.S_IMODE(os.stat(write(config, tmp_path)).st_mode)
    assert mode == 0o600


def test_the_newest_are_kept_and_nothing_else_is_touched(config, tmp_path):
    folder = tmp_path / "crashes"
    folder.mkdir()
    (folder / "crash-notes.md").write_text("mine")
    for day in range(1, 29):
        (folder / f"crash-200001{day:02}T000000Z-1.txt").write_text("old")
    path = write(config, tmp_path)

    left = sorted(file.name for file in folder.iterdir())
    assert len(left) == KEPT_REPORTS + 1
    assert path.rpartition("/")[2] in left and "crash-notes.md" in left
    assert "crash-20000101T000000Z-1.txt" not in left


def test_decisions_that_cannot_be_read_do_not_cost_the_rest(config, tmp_path):
    def broken(_folder):
        raise RuntimeError("no such thing")

    with open(write(config, tmp_path, decisions=broken)) as file:
        assert "cannot be read: RuntimeError: no such thing" in file.read()


def test_a_report_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    config = EngineConfig(log=LogConfig(crash_dir=str(tmp_path / "file" / "below")))

    assert CrashReports(config, lambda folder: []).note("odd", [], tmp_path) == ""
    assert "see --crash-dir" in caplog.text


def test_without_a_setting_it_is_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path))
    assert crash_dir(None) == tmp_path / "crashes"


@pytest.mark.real_process
def test_a_process_leaves_its_stacks_when_it_is_asked_and_when_it_dies(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LEAVE_STACKS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGSEGV, "goes on\n", "")
    assert "in somewhere" in read_stacks(tmp_path, "scheduler")
    fatal = read_fatal_stacks(tmp_path, "scheduler")
    assert fatal.startswith("Fatal Python error: Segmentation fault") and "in somewhere" in fatal
    assert all(is_black_box(path.name) for path in tmp_path.iterdir())


def test_other_names_are_not_of_the_black_box():
    for name in ("decisions_2", "fatal_", "fatal_../x", "stacks_a b", "fatal_x.txt", "lock", ""):
        assert not is_black_box(name), name
