"""The bar for work that turns out to be long."""

from __future__ import annotations

import io
from typing import Any

import pytest

from engine.cli import console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr("engine.cli.console.time.monotonic", lambda: now_s[0])
    return now_s


def written(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> io.StringIO:
    import rich.console

    stderr, make = io.StringIO(), rich.console.Console

    def fake(**options: Any) -> Any:
        return make(file=stderr, force_terminal=is_terminal, width=80)

    monkeypatch.setattr(rich.console, "Console", fake)
    return stderr


def test_short_work_shows_nothing(monkeypatch, clock):
    stderr = written(monkeypatch, is_terminal=True)
    with console.late_progress() as progress:
        progress("simulating", 5, 10)
    assert stderr.getvalue() == ""


def test_long_work_shows_its_share(monkeypatch, clock):
    stderr = written(monkeypatch, is_terminal=True)
    with console.late_progress() as progress:
        progress("simulating", 1, 10)
        clock[0] = 1.5
        progress("simulating", 5, 10)
    assert "simulating" in stderr.getvalue()
    assert "50%" in stderr.getvalue()
    before = stderr.getvalue()
    progress("simulating", 6, 10)  # late
    assert stderr.getvalue() == before


def test_a_pipe_gets_no_bar_where_colors_are_forced(monkeypatch, clock, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.late_progress() as progress:
        clock[0] = 9.0
        progress("simulating", 5, 10)
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_no_bar(monkeypatch, clock):
    stderr = written(monkeypatch, is_terminal=False)
    with console.late_progress() as progress:
        clock[0] = 9.0
        progress("simulating", 5, 10)
    assert stderr.getvalue() == ""
