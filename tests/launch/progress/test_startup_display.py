"""What a start shows: lines in a log, a bar in a terminal, and nothing where nothing takes long."""

from __future__ import annotations

import importlib.util
import io
import sys
from types import ModuleType

import pytest
from rich.console import Console

from engine.launch import startup_display as download_view
from engine.launch.startup_display import (
    COMPILE_STEP,
    DownloadBar,
    DownloadLines,
    StartupDisplay,
    shows_live,
    size_text,
)
from engine.models.hub.pull import DownloadState

MIB = 1 << 20
STATES = (
    DownloadState("begin", "org/tiny", 1 * MIB, 4 * MIB),
    DownloadState("part", "org/tiny", 2 * MIB, 4 * MIB, "model.safetensors", 3 * MIB),
    DownloadState("note", "org/tiny", 2 * MIB, 4 * MIB, "model.safetensors", note="continuing at byte 7"),
    DownloadState("file", "org/tiny", 4 * MIB, 4 * MIB, "model.safetensors", 3 * MIB),
    DownloadState("end", "org/tiny", 4 * MIB, 4 * MIB),
)
LINES = [
    "downloading org/tiny: 4.0 MiB, of which 1.0 MiB are there",
    "  continuing at byte 7",
    "  model.safetensors: 3.0 MiB",
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_per_file_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with StartupDisplay() as display:
        display.step("model files")
        for state in STATES:
            display.download(state)
        display.step("load weights")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == LINES
    assert lines[3].startswith("downloaded 3.0 MiB in ")
    assert len(lines) == 4
    assert [name for name, _ in display.steps] == ["model files", "load weights"]


def test_the_rate_is_that_of_what_was_downloaded(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([10.0, 12.0])
    view = DownloadLines(clock=lambda: next(times))
    for state in STATES:
        view.show(state)
    assert capsys.readouterr().err.splitlines()[-1] == "downloaded 3.0 MiB in 2.0 s, 1.5 MiB/s"


def test_the_compilation_is_told_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with StartupDisplay(only_slow=True) as display:
        for name in ("model files", COMPILE_STEP, "load weights"):
            display.step(name)
    assert capsys.readouterr().err == f"{COMPILE_STEP}; this takes some 20 s\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with StartupDisplay(quiet=True) as display:
        display.step(COMPILE_STEP)
        for state in STATES:
            display.download(state)
    assert stderr.getvalue() == ""


def test_a_terminal_has_a_spinner_then_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with StartupDisplay() as display:
        display.step("model files")
        for state in STATES:
            display.download(state)
        display.step("load weights")
    shown = stderr.getvalue()
    for text in (
        "model files",
        "downloading org/tiny",
        "continuing at byte 7",
        "4.0/4.0 MiB",
        "load weights",
    ):
        assert text in shown


def test_a_fast_start_of_llm_shows_nothing_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with StartupDisplay(only_slow=True) as display:
        display.step("model files")
        display.step("load weights")
    assert stderr.getvalue() == ""


def test_a_name_with_brackets_is_no_markup() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    bar = DownloadBar(console)
    bar.show(DownloadState("begin", "[red]x", 0, 4))
    bar.show(DownloadState("note", "[red]x", 0, 4, note="[bold]note"))
    bar.stop()
    assert isinstance(console.file, io.StringIO)
    assert "[red]x" in console.file.getvalue()
    assert "[bold]note" in console.file.getvalue()


@pytest.mark.parametrize(
    ("in_kernel", "widgets", "live"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_notebook_has_a_bar_if_it_has_widgets(
    monkeypatch: pytest.MonkeyPatch, in_kernel: bool, widgets: bool, live: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if in_kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    found = object() if widgets else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: found)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert download_view.shows_live is shows_live
    assert shows_live() is live


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (3 * MIB, "3.0 MiB"), (1 << 31, "2.00 GiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
