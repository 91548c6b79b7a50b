"""`LogConfig`: what the engine logs, and where traces and reports on failures go."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from ..errors import ConfigError
from .setting_declaration import Alias

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What the engine logs; never prompt text."""

    log_level: Annotated[LogLevel, "Lowest severity that is logged."] = "info"
    log_format: Annotated[
        LogFormat,
        "text: one line of key=value per record, on a terminal a shorter one; json: one JSON object per record.",
    ] = "text"
    log_name: Annotated[
        str,
        "Name of this server in its log lines, before the process: NAME/scheduler. Servers of `engine fleet` have one.",
    ] = ""
    log_requests: Annotated[
        bool,
        "Log one line for each finished request: tokens, times, reason of the end; never text.",
        Alias("enable_log_requests", in_help=False),
        Alias("disable_log_requests", {True: False}, in_help=False),
    ] = False
    log_interval: Annotated[float, "Seconds between the step lines of the scheduler."] = 10.0
    decision_log: Annotated[
        str | None,
        "File for every decision of the scheduler; it contains token ids, so keep it private. With --dp each replica "
        "but the first has its own: FILE.replica1.",
    ] = None
    crash_dir: Annotated[
        str | None,
        "Folder for the report on a failure that ends the server (default: in the cache folder).",
        Alias("crash_dump_folder", in_help=False),
    ] = None

    otlp_endpoint: Annotated[
        str | None,
        "OpenTelemetry collector that gets a trace of each request over OTLP with HTTP, such as "
        "http://127.0.0.1:4318; needs the extra otel (default: that of OTEL_EXPORTER_OTLP_ENDPOINT).",
        Alias("otlp_traces_endpoint"),
    ] = None

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint is {self.otlp_endpoint!r}, but it must be an http:// or https:// URL; collectors "
                "listen for OTLP with HTTP on port 4318"
            )
        if not _NAME.fullmatch(self.log_name):
            raise ConfigError(
                f"log_name is {self.log_name!r}, but it must be at most 64 letters, digits, dots, dashes and "
                "underscores"
            )
        if not (math.isfinite(self.log_interval) and self.log_interval > 0):
            raise ConfigError(f"log_interval is {self.log_interval}, but it must be above 0")

    def decision_log_of(self, replica: int) -> str | None:
        """The decision log of one replica: the file itself for the first, `FILE.replica1` for the next."""
        if self.decision_log is None or replica == 0:
            return self.decision_log
        return f"{self.decision_log}.replica{replica}"
