from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest

from engine.runtime.config.server_config import LogConfig
from engine.runtime.errors import ConfigError
from engine.runtime.logs import (
    JsonFormatter,
    KeyValueFormatter,
    TerminalFormatter,
    _formatter,
    configure_logging,
)


@pytest.fixture
def formatter() -> KeyValueFormatter:
    return KeyValueFormatter("scheduler")


def record(message: str, *args: object, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord(
        "engine.scheduler.event_loop", logging.INFO, "file.py", 1, message, args, exc_info
    )


def test_a_record_is_one_line_of_keys(formatter):
    line = formatter.format(record("rid=%s tokens=%d", "r1", 3))

    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info process=scheduler "
        r"logger=scheduler\.event_loop rid=r1 tokens=3",
        line,
    )


def test_a_line_break_in_a_value_cannot_forge_a_line(formatter):
    line = formatter.format(record("user=%s", "x\n2026 level=error"))

    assert "\n" not in line
    assert line.endswith(r"user=x\n2026 level=error")


def test_a_value_cannot_tell_the_terminal_anything(formatter):
    line = formatter.format(record("user=%s", "\x1b[2J\x9b\x85\u2028\ud800 naïve \\n"))

    assert line.endswith(r"user=\x1b[2J\x9b\x85\u2028\ud800 naïve \n")


def test_a_traceback_follows_its_line(formatter):
    try:
        raise ValueError("odd")
    except ValueError:
        text = formatter.format(record("failed", exc_info=sys.exc_info()))

    first, second, *_, last = text.splitlines()
    assert first.endswith(" failed")
    assert (second, last) == ("Traceback (most recent call last):", "ValueError: odd")


class TestJson:
    """`--log-format json`."""

    @staticmethod
    def parse(message: object, *args: object, exc_info: Any = None) -> dict[str, Any]:
        line = JsonFormatter("scheduler").format(record(message, *args, exc_info=exc_info))  # type: ignore[arg-type]
        assert "\n" not in line
        found: dict[str, Any] = json.loads(
            line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
        )
        return found

    def test_a_record_is_one_object_with_what_it_is_about(self):
        found = self.parse("failed rid=%s tokens=%d after=%.2f %s (100 %%)", "r1", 3, 0.5, "more")

        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
        assert found == {
            "level": "info",
            "process": "scheduler",
            "logger": "scheduler.event_loop",
            "message": "failed rid=r1 tokens=3 after=0.50 more (100 %)",
            "rid": "r1",
            "tokens": 3,
            "after": 0.5,
        }

    def test_values_cannot_forge_fields(self):
        found = self.parse("user=%s level=%s", 'x","rid":"y\n\ud800', "error")

        assert found["user"] == 'x","rid":"y\n\ud800'
        assert found["level"] == "info"
        assert "rid" not in found

    def test_what_json_has_not_is_text(self):
        found = self.parse("a=%s b=%s c=%s d=%s", float("nan"), float("-inf"), ["x"], None)

        assert [found[name] for name in "abcd"] == ["nan", "-inf", "['x']", None]

    def test_messages_that_are_no_format_strings(self):
        assert self.parse(ValueError("odd"))["message"] == "odd"
        assert self.parse("x=%(x)s", {"x": 1})["message"] == "x=1"
        assert self.parse("width=%*d", 3, 7)["message"] == "width=  7"

    def test_a_traceback_stays_with_its_record(self):
        try:
            raise ValueError("odd")
        except ValueError:
            found = self.parse("failed", exc_info=sys.exc_info())

        assert found["traceback"].endswith("ValueError: odd")


@pytest.mark.parametrize(("log_format", "first"), [("text", "2"), ("json", "{")])
def test_the_setting_chooses_the_form(log_format, first, capsys):
    before = logging.root.handlers[:]
    try:
        configure_logging(LogConfig(log_format=log_format), "tester")
        logging.getLogger("engine.somewhere").info("hello")
        assert capsys.readouterr().err.startswith(first)
    finally:
        logging.root.handlers[:] = before


def test_a_server_has_a_name_before_its_processes(capsys):
    before = logging.root.handlers[:]
    try:
        configure_logging(LogConfig(log_name="west-3"), "scheduler")
        logging.getLogger("engine.somewhere").info("hello")
        assert " process=west-3/scheduler " in capsys.readouterr().err
    finally:
        logging.root.handlers[:] = before
    for name in ("a b", "x" * 65, "a/b"):
        with pytest.raises(ConfigError, match="log_name is .*, but it must be at most 64 letters"):
            LogConfig(log_name=name)


def test_on_a_terminal_a_line_is_short(monkeypatch):
    formatter = TerminalFormatter("scheduler")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d scheduler: rid=r1 tokens=3", formatter.format(record("rid=%s tokens=%d", "r1", 3))
    )
    warning = record("low\nmemory")
    warning.levelno, warning.levelname = logging.WARNING, "WARNING"
    assert formatter.format(warning).endswith(r" scheduler: warning: low\nmemory")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("id=chatcmpl-" + "0123456789abcdef" * 2 + " tokens=3", "id=chatcmpl-01234567 tokens=3"),
        ("request_id=01234567-89ab-4cde-8f01-23456789abcd", "request_id=01234567"),
        (
            "id=cmpl-" + "a1b2c3d4" * 4 + " finish=stop request_id=" + "a1b2c3d4" * 4,
            "id=cmpl-a1b2c3d4 finish=stop",
        ),
        ("id=cmpl-" + "a1b2c3d4" * 4 + " request_id=mine", "id=cmpl-a1b2c3d4 request_id=mine"),
        ("request id=mine-1 path=/v1/chat/completions", "request id=mine-1 path=/v1/chat/completions"),
        (
            "model=SmolLM2-135M-Instruct port=30000 commit=abcdef0",
            "model=SmolLM2-135M-Instruct port=30000 commit=abcdef0",
        ),
    ],
)
def test_a_terminal_has_short_ids_and_files_the_whole_ones(formatter, message, shown):
    assert TerminalFormatter("scheduler").format(record(message)).endswith(f" scheduler: {shown}")
    assert formatter.format(record(message)).endswith(f" {message}")


@pytest.mark.parametrize(
    ("process", "message", "shown"),
    [
        ("http", "request id=a status=200 n=1", "request id=a status=200 n=1"),
        ("server-1/http", "request id=a status=200 n=1", "server-1: request id=a status=200 n=1"),
        ("http", "request id=a status=200 n=1 end=" + "x" * 80, "request id=a n=1 end=" + "x" * 80),
        ("http", "request id=a status=200 n=1 end=" + "x" * 89, "request id=a end=" + "x" * 83 + "…"),
    ],
)
def test_a_line_of_a_request_fits_a_terminal(process, message, shown):
    fitted = record(message)
    fitted.less = ("status", "n", "other")
    line = TerminalFormatter(process).format(fitted)
    assert line[9:] == shown
    assert len(line) <= 110
    assert KeyValueFormatter(process).format(fitted).endswith(message)


@pytest.mark.parametrize(
    ("term", "no_color", "colors"), [("xterm", "", True), ("dumb", "", False), ("xterm", "1", False)]
)
def test_levels_have_colors_on_a_terminal_that_has_them(monkeypatch, term, no_color, colors):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    made = _formatter(LogConfig(), "scheduler", on_terminal=True)
    error, info = record("broken"), record("fine")
    error.levelno, error.levelname = logging.ERROR, "ERROR"
    assert made.format(error).endswith(
        " scheduler: \x1b[31merror: \x1b[0mbroken" if colors else " scheduler: error: broken"
    )
    assert made.format(info).endswith(" scheduler: fine")


@pytest.mark.parametrize(
    ("log_format", "on_terminal", "kind"),
    [
        ("text", True, TerminalFormatter),
        ("text", False, KeyValueFormatter),
        ("json", True, JsonFormatter),
        ("json", False, JsonFormatter),
    ],
)
def test_only_text_has_a_form_for_terminals(monkeypatch, log_format, on_terminal, kind):
    before = logging.root.handlers[:]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal, raising=False)
    try:
        configure_logging(LogConfig(log_format=log_format), "tester")
        (handler,) = logging.root.handlers
        assert type(handler.formatter) is kind
    finally:
        logging.root.handlers[:] = before
