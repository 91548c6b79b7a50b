"""Logs: one line per record on standard error, with its process. Never prompt text.

Two forms, `--log-format`, and a short one of the first for terminals:

    2026-01-31T12:00:00.123Z level=info process=scheduler logger=scheduler.event_loop step running=3 queue=0
    12:00:00 scheduler: step running=3 queue=0
    {"time":"2026-01-31T12:00:00.123Z","level":"info","process":"scheduler",...,"running":3,"queue":0}

All processes write to the same standard error; a line is one `write`, so lines do not mix. Format strings name their
arguments as `rid=%s`; the JSON form takes its keys from these names, so no message is parsed.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import time
from dataclasses import replace
from typing import Final

from .config.engine_config import EngineConfig
from .config.server_config import LogConfig, LogLevel

_LEVELS: Final[dict[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PACKAGE = __name__.split(".", 1)[0]
_PLACE: Final = re.compile(r"(?:\b(\w+)=)?%(%|[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?[a-zA-Z])")

_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Line breaks of all kinds, control characters, and halves of surrogate pairs, which cannot be written."""


_LONG_ID: Final = re.compile(
    r"\b((?:[a-z]+[-_])?[0-9a-f]{8})(?:[0-9a-f]{8,}|(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b"
)
_BOTH_IDS: Final = re.compile(r".*\bid=(\S+).*( request_id=(\S+))$")
_COLUMNS: Final = 110
_COLORS: Final = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
_RESET: Final = "\x1b[0m"


class KeyValueFormatter(logging.Formatter):
    """Time (UTC), level, process and logger as keys, then the message with control characters escaped.

    A traceback follows its line as it is.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One record as text, without the final line break."""
        line = self._line(record, _safe_message(record))
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line

    def _line(self, record: logging.LogRecord, message: str) -> str:
        return (
            f"{_time_text(record)} level={record.levelname.lower()} process={self._process} "
            f"logger={_logger_name(record)} {message}"
        )


class TerminalFormatter(KeyValueFormatter):
    """For a person at a terminal: local time and process, then the message; the level where it is not INFO.

    Ids that the server made are cut to their first eight digits; files and pipes have them whole. A record with `less`
    (`extra={"less": names}`) is fitted into `_COLUMNS`, without its process: the fields with these names go one by one.
    """

    def __init__(self, process: str, *, colors: bool = False) -> None:
        super().__init__(process)
        self._colors = colors

    def _line(self, record: logging.LogRecord, message: str) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        if level and self._colors:
            level = f"{_COLORS.get(record.levelno, '')}{level}{_RESET}"
        message, less = _shortened(message), getattr(record, "less", None)
        if less is None:
            return f"{when} {self._process}: {level}{message}"
        server = self._process.rpartition("/")[0]
        line = f"{when} {server and server + ': '}{level}{message}"
        for name in less:
            if len(line) <= _COLUMNS:
                break
            line = re.sub(rf" {name}=\S+", "", line, count=1)
        return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 1]}…"


class JsonFormatter(logging.Formatter):
    """One JSON object per record: `time`, `level`, `process`, `logger`, `message`, then the named arguments.

    A message `failed rid=%s status=%d` adds the keys `rid` and `status`. A traceback is the key `traceback`, so
    that it stays with its record.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One record as an object in ASCII, without the final line break."""
        fixed: dict[str, object] = {
            "time": _time_text(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": _logger_name(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fixed["traceback"] = self.formatException(record.exc_info)
        fields = {name: value for name, value in _named_values(record).items() if name not in fixed}
        return json.dumps(fixed | fields, separators=(",", ":"), default=str)


def configure_logging(config: LogConfig, process: str) -> None:
    """Send the engine's records, and warnings of libraries, to standard error.

    Args:
        config: the form, and the least severity of the engine's own records; libraries are logged from WARNING up.
        process: name of this process, in every line, after the server's.
    """
    if config.log_name:
        process = f"{config.log_name}/{process}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(config, process, on_terminal=sys.stderr.isatty()))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    set_log_level(config.log_level)


def set_log_level(level: LogLevel) -> None:
    """Log the engine's own records from this severity up."""
    logging.getLogger(_PACKAGE).setLevel(_LEVELS[level])


def with_log_level(config: EngineConfig, level: LogLevel) -> EngineConfig:
    """The same settings with another least severity to log."""
    return replace(config, log=replace(config.log, log_level=level))


def _formatter(config: LogConfig, process: str, *, on_terminal: bool) -> logging.Formatter:
    if config.log_format == "json":
        return JsonFormatter(process)
    if not on_terminal:
        return KeyValueFormatter(process)
    colors = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return TerminalFormatter(process, colors=colors)


def _shortened(message: str) -> str:
    """A message with short ids; a request id that says nothing beside the id of the answer is left out."""
    message = _LONG_ID.sub(r"\1", message)
    ids = _BOTH_IDS.match(message)
    return message[: ids.start(2)] if ids and ids[1].endswith(ids[3]) else message


def _safe_message(record: logging.LogRecord) -> str:
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), record.getMessage())


def _time_text(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _logger_name(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{_PACKAGE}.")


def _named_values(record: logging.LogRecord) -> dict[str, object]:
    """The arguments that follow a `name=` in the format string; numbers stay numbers."""
    if not isinstance(record.args, tuple):
        return {}
    names = _names_of(str(record.msg))
    if len(names) != len(record.args):  # `%*d` takes two: rare, and the message text has the values
        return {}
    return {name: _plain(value) for name, value in zip(names, record.args, strict=True) if name}


@functools.lru_cache(maxsize=512)
def _names_of(template: str) -> tuple[str, ...]:
    """For each placeholder of a format string the name before it, or ""."""
    return tuple(name or "" for name, place in _PLACE.findall(template) if place != "%")


def _plain(value: object) -> object:
    """A value as JSON has it: a float that JSON lacks, such as NaN, becomes text like every other type."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and value - value == 0:
        return value
    return str(value)
