"""`EngineConfig`: every setting of the engine, in frozen groups by concern.

Field, type, default and help stand on one line; the command line, the YAML file and `--print-config` are made from
these fields, so a new setting is one new line here. Flag names are the field names with dashes; they are unique across
groups. `"auto"` is replaced once, at start, by `resolve` (see `resolve.py`); components take their group, never the
whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from .errors import ConfigError

Auto = Literal["auto"]
DType = Literal["auto", "bfloat16", "float32"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
SchedulePolicyName = Literal["fcfs", "lpm"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, in what precision, on what device."""

    model: Annotated[
        str, "Folder in Hugging Face layout, .gguf file, hub name, or 'default' (SmolLM2-135M)."
    ] = "default"
    served_model_name: Annotated[
        str | None, "Name clients use for the model (default: taken from the model)."
    ] = None
    max_model_len: Annotated[int | Auto, "Tokens of one sequence, prompt and output together."] = "auto"
    dtype: Annotated[DType, "Precision of weights and activations."] = "auto"
    load_format: Annotated[LoadFormat, "Weight files to read; 'dummy' makes random weights."] = "auto"
    device: Annotated[Device, "Where the model runs."] = "auto"
    num_threads: Annotated[int | Auto, "CPU threads of the model runner."] = "auto"
    chat_template: Annotated[str | None, "File with a Jinja chat template that replaces the model's own."] = (
        None
    )
    seed: Annotated[
        int, "Seed of dummy weights, and of requests that bring none (0: draw one per request)."
    ] = 0

    def __post_init__(self) -> None:
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("num_threads", self.num_threads, 1)
        _at_least("seed", self.seed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory: how much there is, in what pieces, and what outlives a request."""

    page_size: Annotated[int, "Tokens per KV page; a prefix is shared in whole pages."] = 16
    max_total_tokens: Annotated[int | Auto, "KV slots of the pool."] = "auto"
    mem_fraction: Annotated[
        float | Auto, "Share of the memory left after the weights that the KV pool may take."
    ] = "auto"
    radix_cache: Annotated[bool, "Keep the KV of finished requests and reuse common prefixes."] = True

    def __post_init__(self) -> None:
        _at_least("page_size", self.page_size, 1)
        _at_least("max_total_tokens", self.max_total_tokens, 2)
        if self.page_size > 4096:
            raise ConfigError(
                f"page_size is {self.page_size}, but it must lie in [1, 4096]; 1, 16 and 64 are usual"
            )
        if self.mem_fraction != "auto" and not 0.0 < self.mem_fraction <= 1.0:
            raise ConfigError(f"mem_fraction is {self.mem_fraction}, but it must lie in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What runs next, how much of it in one step, and how cautiously memory is promised."""

    schedule_policy: Annotated[
        SchedulePolicyName, "Order of the waiting queue: arrival, or longest cached prefix first."
    ] = "fcfs"
    max_running_requests: Annotated[int | Auto, "Requests that may run at the same time."] = "auto"
    max_queued_requests: Annotated[int, "Requests that may wait; over it clients get 429."] = 4096
    chunked_prefill_size: Annotated[
        int | Auto, "Prompt tokens of one step per chunk; -1: never cut a prompt."
    ] = "auto"
    max_prefill_tokens: Annotated[int, "Prompt tokens of one step, all requests together."] = 16384
    mixed_chunk: Annotated[bool, "Running requests decode along with prefill chunks in the same step."] = True
    max_prefill_steps_in_a_row: Annotated[
        int, "Without mixed-chunk: prefill steps before the running must decode."
    ] = 8
    schedule_conservativeness: Annotated[
        float, "Above 1: admit less and retract rarer; below 1: the reverse."
    ] = 1.0

    def __post_init__(self) -> None:
        _at_least("max_running_requests", self.max_running_requests, 1)
        _at_least("max_queued_requests", self.max_queued_requests, 1)
        _at_least("max_prefill_tokens", self.max_prefill_tokens, 1)
        _at_least("max_prefill_steps_in_a_row", self.max_prefill_steps_in_a_row, 1)
        if self.chunked_prefill_size != -1:
            _at_least("chunked_prefill_size", self.chunked_prefill_size, 1)
        if not (math.isfinite(self.schedule_conservativeness) and self.schedule_conservativeness > 0):
            raise ConfigError(
                f"schedule_conservativeness is {self.schedule_conservativeness}, but it must be above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side, and how long processes may be silent."""

    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 takes a free one."] = 30000
    api_key: Annotated[str | None, "Clients must send it as a bearer token (or set ENGINE_API_KEY)."] = None
    max_body_mb: Annotated[float, "Largest request body; over it clients get 413."] = 16.0
    strict: Annotated[bool, "Refuse request fields that nobody knows, instead of warning about them."] = False
    drain_timeout: Annotated[float, "Seconds that running requests get to finish after SIGTERM."] = 30.0
    startup_timeout: Annotated[float, "Seconds that the processes may take to become ready."] = 600.0
    watchdog_timeout: Annotated[
        float, "Seconds without a heartbeat after which a process counts as hung."
    ] = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, but it must lie in [0, 65535]")
        for name in ("max_body_mb", "drain_timeout", "startup_timeout", "watchdog_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}, but it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What the engine says while it runs; never prompt text."""

    log_level: Annotated[LogLevel, "Least severity that is logged."] = "info"
    log_interval: Annotated[float, "Seconds between the scheduler's step lines."] = 10.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.log_interval) and self.log_interval > 0):
            raise ConfigError(f"log_interval is {self.log_interval}, but it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings, by concern."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)


def _at_least(name: str, value: int | str, low: int) -> None:
    if isinstance(value, int) and value < low:
        raise ConfigError(f"{name} is {value}, but it must be at least {low}")
