"""Logs: one line per record on standard error, `key=value`, with its process. Never prompt text.

    2026-01-31T12:00:00.123Z level=info process=scheduler logger=scheduler.event_loop step running=3 queue=0

All processes write to the same standard error; a line is one `write`, so lines do not mix.
"""

from __future__ import annotations

import logging
import sys
import time

from .config import LogConfig

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PACKAGE = __name__.split(".", 1)[0]


class KeyValueFormatter(logging.Formatter):
    """Time (UTC), level, process and logger as keys, then the message with its line breaks escaped.

    A traceback follows its line as it is.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One record as text, without the final line break."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        name = record.name.removeprefix(f"{_PACKAGE}.")
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = (
            f"{seconds}.{int(record.msecs):03d}Z level={record.levelname.lower()} process={self._process} "
            f"logger={name} {message}"
        )
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def configure_logging(config: LogConfig, process: str) -> None:
    """Send the engine's records, and warnings of libraries, to standard error.

    Args:
        config: the least severity of our own records; libraries are heard from WARNING up.
        process: name of this process, in every line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(_PACKAGE).setLevel(_LEVELS[config.log_level])
