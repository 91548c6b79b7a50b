"""`EngineConfig`: every setting of the engine, in frozen groups by concern.

Field, type, default and help stand on one line; the command line, the YAML file and `--print-config` are made from
these fields, so a new setting is one new line here. Flag names are the field names with dashes; they are unique across
groups, and an `Alias` behind the help is another engine's name for the same thing. `"auto"` is replaced once, at start,
by `resolve` (see `resolve.py`); components take their group, never the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from ..errors import ConfigError
from ..model_files.quantization import Quantization
from .chaos_spec import parse_chaos
from .device_config import KernelConfig, ParallelConfig
from .request_limits import RequestLimits
from .server_config import OverloadMode, ServerConfig
from .setting_declaration import Alias, check_at_least, check_finite

Auto = Literal["auto"]
DType = Literal["auto", "bfloat16", "float32"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
ModelImpl = Literal["auto", "engine", "transformers"]
KVCacheDType = Literal["auto", "bfloat16", "float32", "fp8", "int8"]
SchedulePolicyName = Literal[
    "fcfs",
    "lpm",
    "dfs-weight",
    "lof",
    "random",
    "priority",
    "sjf",
    "srtf",
    "hrrn",
    "round-robin",
    "fair",
    "adaptive",
    "fifo-serial",
    "static",
]
StepPhases = Literal["mixed", "prefill-first", "decode-first"]
SpeculativeName = Literal["off", "ngram"]
PreemptionModeName = Literal["cost", "recompute", "swap"]
EstimatorName = Literal["ratio", "beta", "full", "none"]
LengthEstimate = Literal["max-tokens", "tenant-average"]
EvictionPolicyName = Literal["lru", "lfu", "fifo", "slru", "priority"]
PresetName = Literal["chat", "rag", "batch", "latency"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

DERIVED: Final = {"derived": True}
"""Metadata of a field that `resolve` fills in and nobody can set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, in what precision, on what device."""

    model: Annotated[
        str, "Folder in Hugging Face layout, .gguf file, hub name, or 'default' (SmolLM2-135M)."
    ] = "default"
    served_model_name: Annotated[
        str | None, "Name clients use for the model (default: taken from the model)."
    ] = None
    max_model_len: Annotated[
        int | Auto, "Tokens of one sequence, prompt and output together.", Alias("context_length")
    ] = "auto"
    len_is_estimate: bool = field(default=False, metadata=DERIVED)
    """Whether `max_model_len` was made for "auto", so that a device that is measured may choose a smaller one."""
    dtype: Annotated[DType, "Precision of weights and activations."] = "auto"
    load_format: Annotated[LoadFormat, "Weight files to read; 'dummy' makes random weights."] = "auto"
    model_impl: Annotated[
        ModelImpl, "Whose model code: ours, or transformers' (slower, knows every architecture)."
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        "Precision of the weights: int8, int4 (CPU) and fp8 (GPU) are made while loading, none dequantises what the "
        "files hold (default: as they say; what a GGUF file holds is kept on CPUs that multiply with it).",
    ] = None
    device: Annotated[Device, "Where the model runs."] = "auto"
    num_threads: Annotated[int | Auto, "CPU threads of the model runner."] = "auto"
    chat_template: Annotated[str | None, "File with a Jinja chat template that replaces the model's own."] = (
        None
    )
    seed: Annotated[
        int, "Seed of dummy weights, and of requests that bring none (0: draw one per request)."
    ] = 0

    def __post_init__(self) -> None:
        check_at_least("max_model_len", self.max_model_len, 2)
        check_at_least("num_threads", self.num_threads, 1)
        check_at_least("seed", self.seed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory: how much there is, in what pieces, and what outlives a request."""

    page_size: Annotated[
        int, "Tokens per KV page; a prefix is shared in whole pages.", Alias("block_size")
    ] = 16
    max_total_tokens: Annotated[int | Auto, "KV slots of the pool."] = "auto"
    mem_fraction: Annotated[
        float | Auto, "Share of the memory left after the weights that the KV pool may take."
    ] = "auto"
    pool_is_estimate: bool = field(default=False, metadata=DERIVED)
    """Whether `max_total_tokens` was made for "auto", so that a device that is measured may choose another."""
    kv_cache_dtype: Annotated[KVCacheDType, "Precision of the KV pool; auto: that of the model."] = "auto"
    radix_cache: Annotated[
        bool,
        "Keep the KV of finished requests and reuse common prefixes.",
        Alias("enable_prefix_caching"),
        Alias("disable_radix_cache", {True: False}),
    ] = True
    eviction_policy: Annotated[
        EvictionPolicyName,
        "Which cached prefixes go first when memory is needed.",
        Alias("radix_eviction_policy"),
    ] = "lru"
    pin_fraction: Annotated[
        float, "Share of the KV pool that pinned prefixes may take; running requests come first."
    ] = 0.25
    swap_space: Annotated[
        float | Auto, "GiB of host memory for the KV of requests that lost their place to others."
    ] = "auto"

    def __post_init__(self) -> None:
        check_at_least("page_size", self.page_size, 1)
        check_at_least("max_total_tokens", self.max_total_tokens, 2)
        if self.page_size > 4096:
            raise ConfigError(
                f"page_size is {self.page_size}, but it must lie in [1, 4096]; 1, 16 and 64 are usual"
            )
        if self.mem_fraction != "auto" and not 0.0 < self.mem_fraction <= 1.0:
            raise ConfigError(f"mem_fraction is {self.mem_fraction}, but it must lie in (0, 1]")
        if not 0.0 <= self.pin_fraction <= 1.0:
            raise ConfigError(f"pin_fraction is {self.pin_fraction}, but it must lie in [0, 1]")
        if self.swap_space != "auto" and not (math.isfinite(self.swap_space) and self.swap_space >= 0):
            raise ConfigError(f"swap_space is {self.swap_space}, but it must be 0 or more GiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What runs next, how much of it in one step, and how cautiously memory is promised."""

    preset: Annotated[
        PresetName | None, "Settings for a kind of load; every other way to set them wins over it."
    ] = None
    schedule_policy: Annotated[SchedulePolicyName, "Order of the waiting queue."] = "fcfs"
    policy_seed: Annotated[int, "Start of the random policy's order, and of --chaos."] = 0
    tenant_quantum: Annotated[
        int, "Round-robin: tokens that a tenant is served before it is the next one's turn."
    ] = 2048
    length_estimate: Annotated[
        LengthEstimate, "Where sjf and srtf take the length of an answer from that nobody knows yet."
    ] = "max-tokens"
    length_ageing: Annotated[
        float, "sjf and srtf: tokens of length that a second of waiting makes up for; 0: never."
    ] = 100.0
    priority_ageing: Annotated[
        float, "Seconds of waiting that count as one level of priority; 0: never, low ones may starve."
    ] = 10.0
    priority_preemption: Annotated[
        bool, "With the priority policy: urgent requests may take the place of running ones."
    ] = True
    priority_preemption_threshold: Annotated[
        int,
        "Levels of priority by which a request must exceed one whose place it takes.",
        Alias("priority_scheduling_preemption_threshold"),
    ] = 10
    static_batch_size: Annotated[int, "Static policy: requests of a batch."] = 8
    static_batch_wait: Annotated[
        float, "Static policy: seconds to wait for a full batch before a smaller one starts."
    ] = 1.0
    max_running_requests: Annotated[
        int | Auto, "Requests that may run at the same time.", Alias("max_num_seqs")
    ] = "auto"
    max_queued_requests: Annotated[int, "Requests that may wait; over it clients get 429."] = 4096
    max_queued_tokens: Annotated[int, "Tokens of the prompts that may wait; over it clients get 429."] = (
        16_777_216
    )
    overload: Annotated[
        OverloadMode,
        "What happens then: 429, where the least urgent goes first; or waiting before the queue.",
    ] = "refuse"
    queue_timeout: Annotated[
        float | None, "Seconds that a request may wait to be started (default: no limit)."
    ] = None
    request_timeout: Annotated[
        float | None, "Seconds from arrival to the last token of a request (default: no limit)."
    ] = None
    phases: Annotated[
        StepPhases,
        "Whether prompts and running requests share a step, and who comes first where they do not.",
        Alias("enable_mixed_chunk", {True: "mixed", False: "prefill-first"}),
    ] = "mixed"
    prefill_decode_interval: Annotated[
        int, "Prefill-first: decode steps between two prefill steps, while requests run."
    ] = 0
    max_prefill_steps_in_a_row: Annotated[
        int, "Prefill-first: prefill steps before the running must decode."
    ] = 8
    chunked_prefill_size: Annotated[
        int | Auto,
        "Prompt tokens of one step per chunk; -1: never cut a prompt.",
        Alias("enable_chunked_prefill", {True: "auto", False: -1}),
    ] = "auto"
    target_step_ms: Annotated[
        float | Auto,
        "Milliseconds that a step with decodes may take: chunks of prompts beside them are cut to fit, unless several "
        "wait; 0: as it comes.",
    ] = "auto"
    max_prefill_tokens: Annotated[int, "Prompt tokens of one step, all requests together."] = 16384
    max_num_batched_tokens: Annotated[
        int | None, "Tokens of one step, prompts and decodes together (default: only the limits on prompts)."
    ] = None
    max_num_partial_prefills: Annotated[
        int, "Prompts that may be in the middle of their chunks at the same time."
    ] = 1
    max_long_partial_prefills: Annotated[
        int, "How many of them may be long; the others' places are for short ones."
    ] = 1
    long_prefill_token_threshold: Annotated[
        int, "Tokens above which a prompt is long; 0: 4 % of the context, where several may be cut."
    ] = 0
    admission_estimator: Annotated[
        EstimatorName, "How much memory is kept for tokens that are not generated yet."
    ] = "ratio"
    schedule_conservativeness: Annotated[
        float, "Above 1: admit less and retract rarer; below 1: the reverse."
    ] = 1.0
    look_ahead: Annotated[
        int, "Requests tried in a pass behind one that lacks memory; 0: nobody overtakes it."
    ] = 8
    in_batch_prefix_caching: Annotated[
        bool, "Hold back requests whose beginning another one is computing, so that it is computed once."
    ] = True
    preemption_mode: Annotated[
        PreemptionModeName,
        "What becomes of the KV of a request that loses its place: computed again, kept on "
        "the host, or whatever costs less.",
    ] = "cost"
    max_loras_per_batch: Annotated[int, "Different adapters that may run at the same time."] = 8
    overlap: Annotated[
        bool | Auto,
        "Plan and launch a step while the one before still runs; an answer's end is seen one step late.",
        Alias("async_scheduling"),
        Alias("disable_overlap_schedule", {True: False}),
    ] = "auto"
    num_lookahead_tokens: Annotated[
        int,
        "KV slots kept ready per running request beyond its next token, for draft tokens.",
        Alias("num_lookahead_slots"),
    ] = 0
    speculative: Annotated[
        SpeculativeName,
        "Check guesses at the next tokens in one step: ngram takes them from the request's own text.",
    ] = "off"
    speculative_num_draft_tokens: Annotated[
        int,
        "With --speculative: guesses per request and step, at most; fewer where they do not pay.",
        Alias("num_speculative_tokens"),
    ] = 8
    decode_burst_ms: Annotated[
        float | Auto,
        "Milliseconds for which running requests may generate tokens in a row while nobody waits; clients get them "
        "together; 0: each by itself.",
    ] = "auto"
    chaos: Annotated[
        str | None,
        "For tests: faults on purpose; 'retract=0.5:500' retracts with this probability, so often; 'oom=0.1:20' "
        "treats steps as if the device had no memory for them; 'slow=0.01' has every step take at least so many "
        "seconds; 'kill=7' has prompts with this token kill their process.",
    ] = None

    def __post_init__(self) -> None:
        for name in (
            "tenant_quantum",
            "static_batch_size",
            "max_running_requests",
            "max_queued_requests",
            "max_queued_tokens",
            "max_prefill_tokens",
            "max_prefill_steps_in_a_row",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "max_loras_per_batch",
            "speculative_num_draft_tokens",
        ):
            check_at_least(name, getattr(self, name), 1)
        for name in (
            "policy_seed",
            "priority_preemption_threshold",
            "prefill_decode_interval",
            "long_prefill_token_threshold",
            "look_ahead",
            "num_lookahead_tokens",
        ):
            check_at_least(name, getattr(self, name), 0)
        for name in ("length_ageing", "priority_ageing", "static_batch_wait"):
            check_finite(name, getattr(self, name), 0.0, open_end=False)
        for name in ("target_step_ms", "decode_burst_ms"):
            if getattr(self, name) != "auto":
                check_finite(name, getattr(self, name), 0.0, open_end=False)
        for name in ("queue_timeout", "request_timeout"):
            if getattr(self, name) is not None:
                check_finite(name, getattr(self, name), 0.0, open_end=True)
        if self.chunked_prefill_size != -1:
            check_at_least("chunked_prefill_size", self.chunked_prefill_size, 1)
        if self.max_num_batched_tokens is not None:
            check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ConfigError(
                f"max_long_partial_prefills is {self.max_long_partial_prefills}, but it must not exceed "
                f"max_num_partial_prefills ({self.max_num_partial_prefills})"
            )
        check_finite("schedule_conservativeness", self.schedule_conservativeness, 0.0, open_end=True)
        parse_chaos(self.chaos)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What the engine says while it runs; never prompt text."""

    log_level: Annotated[LogLevel, "Least severity that is logged."] = "info"
    log_format: Annotated[LogFormat, "A line of key=value per record, or a JSON object."] = "text"
    log_interval: Annotated[float, "Seconds between the scheduler's step lines."] = 10.0
    decision_log: Annotated[
        str | None, "File for every decision of the scheduler; it holds token ids, so keep it private."
    ] = None
    crash_dir: Annotated[
        str | None, "Folder for the report on a failure that ends the server  [default: in the cache folder]"
    ] = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.log_interval) and self.log_interval > 0):
            raise ConfigError(f"log_interval is {self.log_interval}, but it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings, by concern."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    log: LogConfig = field(default_factory=LogConfig)
