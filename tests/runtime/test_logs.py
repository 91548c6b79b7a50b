from __future__ import annotations

import logging
import re
import sys
from typing import Any

import pytest

from engine.runtime.logs import KeyValueFormatter


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


def test_a_traceback_follows_its_line(formatter):
    try:
        raise ValueError("odd")
    except ValueError:
        text = formatter.format(record("failed", exc_info=sys.exc_info()))

    first, second, *_, last = text.splitlines()
    assert first.endswith(" failed")
    assert (second, last) == ("Traceback (most recent call last):", "ValueError: odd")
