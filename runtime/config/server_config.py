"""Two groups of `EngineConfig`: `ServerConfig` (connections, access, timeouts), `LogConfig` (logs, traces, reports)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from ..errors import ConfigError
from .kv_event_settings import parse_kv_events
from .setting_declaration import Alias, check_at_least, check_finite

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
_TIME: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])")
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Contents of the engine's logs; never prompt text."""

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


OverloadMode = Literal["refuse", "queue"]
TransferBackendName = Literal["local", "nixl", "mooncake"]

_POSITIVE: Final = (
    "max_body_mb",
    "max_header_kb",
    "header_timeout",
    "body_timeout",
    "send_timeout",
    "keep_alive_timeout",
    "drain_timeout",
    "startup_timeout",
    "watchdog_timeout",
    "state_max_gb",
    "max_file_mb",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server and the timeouts of processes."""

    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 takes a free one."] = 30000
    api_key: Annotated[
        tuple[str, ...],
        "API key that clients send as a bearer token (or set ENGINE_API_KEY); may be repeated.",
    ] = ()
    api_key_file: Annotated[str | None, "File with more API keys, one per line; # starts a comment."] = None
    admin_api_key: Annotated[
        str | None,
        "Key of the administrative endpoints, such as flushing the cache (or set "
        "ENGINE_ADMIN_API_KEY). Without it they work on a loopback address only.",
    ] = None
    isolate_tenants: Annotated[
        bool,
        "A separate prefix cache for each API key, so that timing does not reveal prompts of other tenants.",
    ] = False
    cors_origin: Annotated[
        tuple[str, ...],
        "Origin that may call the API from a browser, such as https://example.org, or * for any; may "
        "be repeated.",
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...],
        "Host name that a server without keys accepts on a loopback address, besides localhost and IP"
        " addresses; * for any; may be repeated.",
    ] = ()
    page: Annotated[
        bool, "Serve a page with a chat and the live requests at /, for browsers; its files need no key."
    ] = True
    ssl_certfile: Annotated[
        str | None, "Certificate chain (PEM) for HTTPS.", Alias("ssl_cert_file", in_help=False)
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        "Private key (PEM) of the certificate, if it is not in --ssl-certfile.",
        Alias("ssl_key_file", in_help=False),
    ] = None
    max_body_mb: Annotated[float, "Largest request body in MiB; larger ones get 413."] = 16.0
    max_header_kb: Annotated[
        float, "Largest request head in KiB, all headers together; larger ones get 431."
    ] = 64.0
    max_connections: Annotated[int, "Most open connections; further ones get 503."] = 16384
    header_timeout: Annotated[
        float,
        "Seconds to receive the head of a request, counted from the start of a new connection for"
        " its first request.",
    ] = 30.0
    body_timeout: Annotated[float, "Seconds to receive the body of a request; then 408."] = 120.0
    send_timeout: Annotated[
        float, "Seconds that a client may leave a response unread before the request is aborted."
    ] = 60.0
    keep_alive_timeout: Annotated[float, "Seconds that a connection may be idle between two requests."] = 75.0
    kv_events: Annotated[
        str | None,
        "ZMQ address that notifies routers of what the prefix cache holds, such as tcp://127.0.0.1:5557, or the JSON "
        "object of vLLM's option. The events contain the token ids of prompts.",
        Alias("kv_events_config"),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        "ZMQ address at which subscribers of --kv-events ask for messages that they have missed.",
    ] = None
    bootstrap_port: Annotated[
        int,
        "With --disaggregation-mode prefill: the port (TCP, on --host) at which decode engines claim prompts.",
        Alias("disaggregation_bootstrap_port"),
    ] = 8998
    transfer_backend: Annotated[
        TransferBackendName,
        "With --disaggregation-mode: what moves KV, the same on both sides: the connection between the engines itself "
        "(local), NIXL or Mooncake.",
        Alias("disaggregation_transfer_backend"),
    ] = "local"
    state_dir: Annotated[
        str | None,
        "Folder for what clients store: files, batches and responses. It contains their texts, so only this user may "
        "read it. Without it those endpoints answer 404.",
    ] = None
    state_max_gb: Annotated[
        float, "Most GiB in --state-dir; the clients of one API key may have half of it."
    ] = 10.0
    response_retention: Annotated[
        str,
        "Time after its last use after which a chain of stored responses is deleted: a number and s, m, h or d. Those "
        "used least recently are deleted before, where --state-max-gb is reached.",
    ] = "30d"
    max_file_mb: Annotated[float, "Largest file of /v1/files in MiB; larger ones get 413."] = 200.0
    strict: Annotated[bool, "Refuse unknown request fields instead of warning about them."] = False
    drain_timeout: Annotated[
        float,
        "Seconds that running requests may take to finish after SIGTERM.",
        Alias("shutdown_timeout", in_help=False),
    ] = 30.0
    startup_timeout: Annotated[float, "Seconds that the processes may take to become ready."] = 600.0
    watchdog_timeout: Annotated[
        float, "Seconds without a heartbeat after which a process counts as hung."
    ] = 60.0
    max_restarts: Annotated[
        int, "Restarts of failed processes within five minutes before the server ends; 0: none."
    ] = 3
    standby_scheduler: Annotated[
        bool,
        "Hold a second scheduler process that has imported torch, so that a restart is faster; takes 160 MB.",
    ] = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, but it must lie in [0, 65535]")
        if not 0 <= self.bootstrap_port <= 65535:
            raise ConfigError(f"bootstrap_port is {self.bootstrap_port}, but it must lie in [1, 65535]")
        for name in _POSITIVE:
            check_finite(name, getattr(self, name), 0.0, open_end=True)
        if not self.response_retention_s > 0:
            raise ConfigError(
                f"response_retention is {self.response_retention!r}, but it must be a number above 0 and s, m, h or d, "
                "such as 30d"
            )
        check_at_least("max_connections", self.max_connections, 1)
        check_at_least("max_restarts", self.max_restarts, 0)
        if self.isolate_tenants and not self.needs_key:
            raise ConfigError(
                "isolate_tenants is True, but it distinguishes tenants by their API keys; set api_key"
            )
        if parse_kv_events(self.kv_events, self.kv_events_replay) is not None and self.isolate_tenants:
            raise ConfigError(
                f"kv_events is {self.kv_events!r}, but with isolate_tenants each prefix is private to its API key, so "
                "that there is nothing to publish; leave one of them out"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is set, but there is no certificate; set ssl_certfile too")
        for origin in self.cors_origin:
            if origin != "*" and not _is_origin(origin):
                raise ConfigError(
                    f"cors_origin is {origin!r}, but it must be * or scheme://host[:port] without a path"
                )

        for host in self.allowed_host:
            if not host or (host != "*" and set(host) & set("/?#@:* ")):
                raise ConfigError(
                    f"allowed_host is {host!r}, but it must be * or a name without scheme and port"
                )

    @property
    def response_retention_s(self) -> float:
        """`response_retention` in seconds; 0: it is no time."""
        return duration_s(self.response_retention)

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.api_key) or self.api_key_file is not None


def duration_s(text: str) -> float:
    """Seconds of `90s`, `12h` or `30d`; 0: it is no time."""
    matched = _TIME.fullmatch(text)
    return float(matched[1]) * _UNITS_S[matched[2]] if matched else 0.0


def _is_origin(text: str) -> bool:
    """Whether a browser could send this as `Origin`."""
    scheme, separator, host = text.partition("://")
    return bool(scheme and separator and host) and not set(host) & set("/?#@ ") and text == text.lower()
