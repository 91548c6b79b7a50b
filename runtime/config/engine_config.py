"""`EngineConfig`: every setting of the engine, in frozen groups by concern.

Field, type, default and help are one line; the command line, the YAML file and `--print-config` are made from these
fields, so a new setting is one new line here. Flag names are the field names with dashes; they are unique across
groups, and an `Alias` after the help is another engine's name for the same setting. `"auto"` is replaced once, at
start, by `resolve` (see `resolve.py`); a component takes its group, not the whole configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from ..errors import ConfigError
from ..sampling_defaults import SamplingDefaultsName
from .adapter_config import AdapterConfig
from .answer_config import AnswerConfig, RequestLimits
from .chaos_spec import parse_chaos
from .device_config import KernelConfig, ParallelConfig
from .kv_store_address import parse_kv_store
from .media_config import MediaConfig
from .model_choice import PoolingType, Quantization, TaskChoice, TaskName
from .peer_drafts import spec_type, speculative_algorithm, speculative_config
from .peer_tiers import (
    hicache_storage_backend,
    hicache_storage_prefetch_policy,
    hicache_write_policy,
    kv_transfer_config,
)
from .server_config import LogConfig, OverloadMode, ServerConfig
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
SpeculativeName = Literal["off", "ngram", "suffix", "draft", "eagle3", "mtp", "auto"]
DisaggregationMode = Literal["null", "prefill", "decode", "both"]
PreemptionModeName = Literal["cost", "recompute", "swap"]
EstimatorName = Literal["ratio", "beta", "full", "none"]
LengthEstimate = Literal["max-tokens", "tenant-average"]
EvictionPolicyName = Literal["lru", "lfu", "fifo", "slru", "priority"]
KVWriteName = Literal["selective", "through", "evicted"]
_MAX_FETCH_MS: Final = 600_000
PresetName = Literal["chat", "rag", "agents", "batch", "latency"]

DERIVED: Final = {"derived": True}
"""Metadata of a field that `resolve` fills in and that is not a setting."""


ANY_NAME: Final = "*"
"""As `served_model_name`: requests may name any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Weights, precision and device."""

    model: Annotated[
        str,
        "Folder in Hugging Face layout, .gguf file, org/repo, org/repo:Q4_K_M, or 'default' (SmolLM2-135M).",
        Alias("model_path", in_help=False),
    ] = "default"
    task: Annotated[
        TaskName,
        "What the model does: generate text, embed texts as vectors, or score texts and pairs of texts.",
    ] = "auto"
    pooling: Annotated[
        PoolingType | None,
        "Tokens with the hidden states that become a vector: the first (cls), the last, or the mean of all "
        "(default: as the model's files say). For embed.",
    ] = None
    matryoshka: Annotated[
        bool, "Give vectors of any shorter length that a request asks for; the model must be trained for it."
    ] = False
    served_model_name: Annotated[
        str | None,
        "Name of the model in the API (default: derived from the model); * accepts any name in requests.",
        Alias("alias", in_help=False),
    ] = None
    max_model_len: Annotated[
        int | Auto,
        "Longest sequence in tokens, prompt and output together.",
        Alias("context_length"),
        Alias("ctx_size", in_help=False),
    ] = "auto"
    len_is_estimate: bool = field(default=False, metadata=DERIVED)
    """Whether `max_model_len` was computed for "auto", so that a measured device may choose a smaller value."""
    dtype: Annotated[DType, "Data type of weights and activations."] = "auto"
    load_format: Annotated[
        LoadFormat,
        "Format of the weight files; 'dummy' makes random weights, plain ones in place of GGUF and mxfp4 blocks.",
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        "Model implementation: the engine's own, or that of transformers (slower, more architectures).",
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        "Format of the weights: int8, int4 (CPU) and fp8 (GPU) quantize while loading; none "
        "dequantizes the files (default: the format of the files; GGUF blocks stay quantized on CPUs "
        "with kernels for them).",
    ] = None
    language_model_only: Annotated[
        bool,
        "Serve only the text of a multimodal model, without images: the memory of its towers is saved.",
    ] = False
    mmproj: Annotated[
        str | None,
        "GGUF file with the tower of a GGUF model, for images "
        "(default: the *mmproj*.gguf in the model's folder or repository, if there is one).",
    ] = None
    device: Annotated[Device, "Device that the model runs on."] = "auto"
    num_threads: Annotated[
        int | Auto, "CPU threads of the model runner.", Alias("threads", in_help=False)
    ] = "auto"
    chat_template: Annotated[
        str | None,
        "Name of one of the model's chat templates, or a file with a Jinja chat template "
        "(default: the model's default template).",
        Alias("chat_template_file", in_help=False),
    ] = None
    sampling_defaults: Annotated[
        SamplingDefaultsName,
        "Sampling parameters of requests without their own: those of the model's files, or OpenAI's "
        "(temperature 1, nothing filtered).",
    ] = "model"
    seed: Annotated[
        int,
        "Seed of dummy weights, and of requests without a seed (0: a random one per request).",
        Alias("random_seed", in_help=False),
    ] = 0

    def __post_init__(self) -> None:
        check_at_least("max_model_len", self.max_model_len, 2)
        if self.mmproj is not None and self.language_model_only:
            raise ConfigError(
                f"mmproj is {self.mmproj}, the tower of a model, but --language-model-only leaves towers out; drop one "
                "of them"
            )
        if not self.model.strip():
            raise ConfigError("model is empty; give a model, or leave it out for the default one")
        check_at_least("num_threads", self.num_threads, 1)
        check_at_least("seed", self.seed, 0)

    @property
    def task_choice(self) -> TaskChoice:
        """The task that the user asks for, for the readers of model files."""
        return TaskChoice(self.task, self.pooling, self.matryoshka, self.language_model_only)

    @property
    def takes_any_name(self) -> bool:
        """Whether requests may name any model."""
        return self.served_model_name == ANY_NAME

    def name_in_api(self, own_name: str) -> str:
        """The model's name in the API; `own_name` if no other one is set."""
        return own_name if self.served_model_name is None or self.takes_any_name else self.served_model_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory: its size, its page size, and what stays cached after a request has finished."""

    page_size: Annotated[
        int, "Tokens per KV page; a prefix is shared in whole pages.", Alias("block_size")
    ] = 16
    max_total_tokens: Annotated[int | Auto, "Size of the KV pool in tokens."] = "auto"
    mem_fraction: Annotated[
        float | Auto, "Share of the memory that remains after the weights to use for the KV pool."
    ] = "auto"
    pool_is_estimate: bool = field(default=False, metadata=DERIVED)
    """Whether `max_total_tokens` was computed for "auto", so that a measured device may choose another value."""
    kv_cache_dtype: Annotated[KVCacheDType, "Data type of the KV pool; auto: that of the model."] = "auto"
    radix_cache: Annotated[
        bool,
        "Keep the KV of finished requests and reuse common prefixes.",
        Alias("enable_prefix_caching"),
        Alias("disable_radix_cache", {True: False}),
    ] = True
    eviction_policy: Annotated[
        EvictionPolicyName,
        "Order in which cached prefixes are evicted.",
        Alias("radix_eviction_policy"),
    ] = "lru"
    pin_fraction: Annotated[
        float, "Largest share of the KV pool for pinned prefixes; running requests take precedence."
    ] = 0.25
    kv_disk: Annotated[
        str | None,
        "Folder that keeps the KV of prompts on disk, also after a restart; it holds what users wrote.",
        Alias("hicache_storage_backend", translate=hicache_storage_backend, in_help=False),
        Alias("kv_transfer_config", translate=kv_transfer_config, in_help=False),
    ] = None
    kv_disk_size: Annotated[
        float, "With --kv-disk: GiB that the folder may take; never more than half of the free space."
    ] = 8.0
    kv_store: Annotated[
        str | None,
        "Server that keeps the KV of prompts, also for other engines: redis://[user:password@]host:port/db with Redis "
        "or Valkey, mooncake://master:port.",
    ] = None
    kv_store_key: Annotated[
        str | None,
        "With --kv-store: file with a key of 32 bytes or more, with which everything that is kept there is encrypted.",
    ] = None
    kv_write: Annotated[
        KVWriteName,
        "With --kv-disk or --kv-store: store what a second request uses, and the rest while no request runs "
        "(selective); each prompt at its end (through); or what is about to be evicted (evicted).",
        Alias("hicache_write_policy", translate=hicache_write_policy, in_help=False),
    ] = "selective"
    kv_fetch: Annotated[
        str,
        "With --kv-disk or --kv-store: load a prompt if that is estimated to be faster than computing it, for at most "
        "twice the estimate (timeout) or MS milliseconds (timeout:MS), or until it could start (best_effort); "
        "or all that is found, however long it takes (wait).",
        Alias("hicache_storage_prefetch_policy", translate=hicache_storage_prefetch_policy, in_help=False),
    ] = "timeout"
    kv_persist_salted: Annotated[
        bool,
        "With --kv-disk or --kv-store: store and look up the prompts of requests with a cache_salt, too.",
    ] = False
    kv_host_size: Annotated[
        float,
        "Host memory in GiB for KV that the KV pool of a GPU evicts; it is copied back when a prompt needs it.",
        Alias("kv_offloading_size"),
    ] = 0.0
    swap_space: Annotated[float | Auto, "Host memory in GiB for the KV of requests that are swapped out."] = (
        "auto"
    )
    mm_encoder_cache_tokens: Annotated[
        int | Auto,
        "Tokens of images that stay computed for prompts: those of running requests, and of earlier ones.",
    ] = "auto"

    @property
    def kv_tier(self) -> str:
        """The name of the prefix cache's tier that outlives the process; "" if there is none."""
        return "disk" if self.kv_disk is not None else "store" if self.kv_store is not None else ""

    @property
    def kv_tier_place(self) -> str:
        """The folder, or the server without its password."""
        return self.kv_disk or (str(parse_kv_store(self.kv_store)) if self.kv_store else "")

    def kv_fetch_rule(self) -> tuple[str, float | None]:
        """The kind of `kv_fetch`, and the seconds of `timeout:MS`.

        Raises:
            ConfigError: there is no such kind, or no such time.
        """
        kind, colon, number = self.kv_fetch.partition(":")
        if kind not in ("best_effort", "wait", "timeout") or (colon and kind != "timeout"):
            raise ConfigError(
                f"kv_fetch is {self.kv_fetch!r}, but it must be best_effort, wait, timeout or timeout:MS"
            )
        is_number = number.isascii() and number.isdigit() and len(number) <= len(str(_MAX_FETCH_MS))
        if colon and not (is_number and 0 < int(number) <= _MAX_FETCH_MS):
            raise ConfigError(
                f"kv_fetch is {self.kv_fetch!r}, but the time must be a number of milliseconds in [1, {_MAX_FETCH_MS}]"
            )
        return kind, int(number) / 1000 if colon else None

    def __post_init__(self) -> None:
        check_at_least("page_size", self.page_size, 1)
        check_at_least("max_total_tokens", self.max_total_tokens, 2)
        check_at_least("mm_encoder_cache_tokens", self.mm_encoder_cache_tokens, 0)
        if self.page_size > 4096:
            raise ConfigError(
                f"page_size is {self.page_size}, but it must lie in [1, 4096]; 1, 16 and 64 are usual"
            )
        if self.mem_fraction != "auto" and not 0.0 < self.mem_fraction <= 1.0:
            raise ConfigError(f"mem_fraction is {self.mem_fraction}, but it must lie in (0, 1]")
        if not 0.0 <= self.pin_fraction <= 1.0:
            raise ConfigError(f"pin_fraction is {self.pin_fraction}, but it must lie in [0, 1]")
        if not (math.isfinite(self.kv_disk_size) and self.kv_disk_size > 0):
            raise ConfigError(f"kv_disk_size is {self.kv_disk_size}, but it must be a number of GiB above 0")
        self.kv_fetch_rule()
        if self.kv_tier and not self.radix_cache:
            raise ConfigError(
                f"kv_{self.kv_tier} is set without the prefix cache, but the {self.kv_tier} keeps what the prefix "
                f"cache has; leave --no-radix-cache out, or --kv-{self.kv_tier}"
            )
        self._check_store()
        if not (math.isfinite(self.kv_host_size) and self.kv_host_size >= 0):
            raise ConfigError(f"kv_host_size is {self.kv_host_size}, but it must be 0 or more GiB")
        if self.kv_host_size and not self.radix_cache:
            raise ConfigError(
                f"kv_host_size is {self.kv_host_size:g} without the prefix cache, but the host keeps what the prefix "
                "cache evicts; leave --no-radix-cache out, or --kv-host-size"
            )
        if self.swap_space != "auto" and not (math.isfinite(self.swap_space) and self.swap_space >= 0):
            raise ConfigError(f"swap_space is {self.swap_space}, but it must be 0 or more GiB")

    def _check_store(self) -> None:
        if self.kv_store is None:
            if self.kv_store_key is not None:
                raise ConfigError(
                    "kv_store_key is set without kv_store; leave it out, or give --kv-store URL"
                )
            return
        address = parse_kv_store(self.kv_store)
        if self.kv_disk is not None:
            raise ConfigError(
                f"kv_disk is {self.kv_disk} and kv_store is {address}, but a prompt is kept in one place; leave "
                "--kv-disk out if other servers are to find it, else --kv-store"
            )
        if not address.is_local and self.kv_store_key is None:
            raise ConfigError(
                f"kv_store is {address}, another machine, which can read the prompts from what is kept there; encrypt "
                "it with --kv-store-key FILE, and make the file once for all servers: head -c 32 /dev/urandom > FILE"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Order and size of the steps, and how cautiously KV memory is reserved."""

    preset: Annotated[
        PresetName | None,
        "Values of several settings for a kind of load; every other source of a value wins.",
    ] = None
    schedule_policy: Annotated[SchedulePolicyName, "Order of the waiting queue."] = "fcfs"
    policy_seed: Annotated[int, "Seed of the random policy and of --chaos."] = 0
    tenant_quantum: Annotated[
        int, "round-robin policy: tokens served to one tenant before the turn of the next."
    ] = 2048
    length_estimate: Annotated[
        LengthEstimate, "sjf and srtf policies: source of the expected output length."
    ] = "max-tokens"
    length_ageing: Annotated[
        float, "sjf and srtf policies: tokens of length that one second of waiting offsets; 0: no ageing."
    ] = 100.0
    priority_ageing: Annotated[
        float, "Seconds of waiting that raise the priority by one level; 0: no ageing, low levels may starve."
    ] = 10.0
    priority_preemption: Annotated[bool, "priority policy: urgent requests may preempt running ones."] = True
    priority_preemption_threshold: Annotated[
        int,
        "Levels of priority by which a request must exceed a running one to preempt it.",
        Alias("priority_scheduling_preemption_threshold"),
    ] = 10
    static_batch_size: Annotated[int, "static policy: requests in a batch."] = 8
    static_batch_wait: Annotated[
        float, "static policy: seconds to wait for a full batch before a smaller one starts."
    ] = 1.0
    max_running_requests: Annotated[
        int | Auto,
        "Requests that may run at the same time.",
        Alias("max_num_seqs"),
        Alias("parallel", in_help=False),
    ] = "auto"
    max_queued_requests: Annotated[int, "Requests that may wait; further ones get 429 (see --overload)."] = (
        4096
    )
    max_queued_tokens: Annotated[
        int, "Prompt tokens that may wait; further requests get 429 (see --overload)."
    ] = 16_777_216
    overload: Annotated[
        OverloadMode,
        "When the waiting queue is full: refuse answers 429 to the least urgent request; queue delays"
        " new requests until there is room.",
    ] = "refuse"
    queue_timeout: Annotated[
        float | None, "Seconds that a request may wait before it starts (default: no limit)."
    ] = None
    request_timeout: Annotated[
        float | None, "Seconds from arrival to the last token of a request (default: no limit)."
    ] = None
    phases: Annotated[
        StepPhases,
        "Whether a step mixes prefill and decode, or which of them goes first.",
        Alias("enable_mixed_chunk", {True: "mixed", False: "prefill-first"}),
    ] = "mixed"
    prefill_decode_interval: Annotated[
        int, "prefill-first: decode steps between two prefill steps, while requests run."
    ] = 0
    max_prefill_steps_in_a_row: Annotated[
        int, "prefill-first: prefill steps in a row before running requests decode."
    ] = 8
    chunked_prefill_size: Annotated[
        int | Auto,
        "Largest prefill chunk of a request, in tokens; -1: prompts are not chunked.",
        Alias("enable_chunked_prefill", {True: "auto", False: -1}),
    ] = "auto"
    target_step_ms: Annotated[
        float | Auto,
        "Target time in ms of a step with decodes: prefill chunks in it are cut to fit, unless "
        "several prompts wait; 0: no target.",
    ] = "auto"
    batch_slowdown: Annotated[
        float,
        "Share by which requests of the batch class (service_tier flex) may make a step of others longer.",
    ] = 0.05
    max_prefill_tokens: Annotated[int, "Most prompt tokens in one step, all requests together."] = 16384
    max_num_batched_tokens: Annotated[
        int | None, "Most tokens in one step, prefill and decode together (default: only the prefill limits)."
    ] = None
    max_num_partial_prefills: Annotated[
        int, "Most requests with a partly computed prompt at the same time."
    ] = 1
    max_long_partial_prefills: Annotated[
        int, "Most long prompts among the partial prefills; the other places are for short ones."
    ] = 1
    long_prefill_token_threshold: Annotated[
        int,
        "A prompt with more tokens is long; 0: 4 % of the context if several partial prefills are allowed.",
    ] = 0
    admission_estimator: Annotated[
        EstimatorName, "Estimator of the KV memory to reserve for tokens that are not generated yet."
    ] = "ratio"
    schedule_conservativeness: Annotated[
        float, "Above 1: admits fewer requests and retracts less often; below 1: the reverse."
    ] = 1.0
    look_ahead: Annotated[
        int, "Requests tried in a pass after one that lacks memory; 0: no request overtakes it."
    ] = 8
    in_batch_prefix_caching: Annotated[
        bool, "Hold back requests with a prefix that another request computes, so that it is computed once."
    ] = True
    preemption_mode: Annotated[
        PreemptionModeName,
        "KV of a preempted or retracted request: recompute it, swap it to the host, or choose the "
        "lower cost.",
    ] = "cost"
    max_loras_per_batch: Annotated[
        int,
        "Different LoRA adapters that may run at the same time: their slots in the device's memory.",
        Alias("max_loras"),
    ] = 8
    overlap: Annotated[
        bool | Auto,
        "Plan and launch a step while the previous one runs; the end of an output is seen one step late.",
        Alias("async_scheduling"),
        Alias("disable_overlap_schedule", {True: False}),
    ] = "auto"
    num_lookahead_tokens: Annotated[
        int,
        "KV slots reserved per running request beyond its next token, for draft tokens.",
        Alias("num_lookahead_slots"),
    ] = 0
    speculative: Annotated[
        SpeculativeName,
        "Speculative decoding: ngram drafts tokens from the text of the request itself, suffix also from finished "
        "answers to the same tenant, mtp also with the layer of the model's files that predicts further tokens, draft "
        "and eagle3 with the model or head of --speculative-model; auto: by what that is, mtp if the files have such a "
        "layer, else suffix; off where the model or the other settings allow no drafts.",
        Alias("speculative_algorithm", translate=speculative_algorithm, in_help=False),
        Alias("speculative_config", translate=speculative_config, in_help=False),
        Alias("spec_type", translate=spec_type, in_help=False),
    ] = "off"
    speculative_model: Annotated[
        str | None,
        "With --speculative draft, eagle3 or auto: a smaller model with the same vocabulary, or an EAGLE-3 head of "
        "this model; a folder, a .gguf file or a name.",
        Alias("speculative_draft_model_path"),
        Alias("model_draft", in_help=False),
    ] = None
    speculative_len: int | None = field(default=None, metadata=DERIVED)
    """Positions that the drafter of `speculative_model` knows; None: those of the model."""
    speculative_cache_tokens: Annotated[
        int,
        "With --speculative suffix: tokens of finished answers that are kept, the newest of all tenants; each takes "
        "50 bytes of host memory.",
    ] = 1_000_000
    speculative_num_draft_tokens: Annotated[
        int,
        "With --speculative: most draft tokens per request and step; fewer when few are accepted.",
        Alias("num_speculative_tokens"),
    ] = 8
    multi_step_ms: Annotated[
        float | Auto,
        "Time in ms for which decodes may run in a row while no request waits; clients get these "
        "tokens together; 0: one by one.",
        Alias("decode_burst_ms", in_help=False),
    ] = "auto"
    disaggregation_mode: Annotated[
        DisaggregationMode,
        "Prefill/decode disaggregation: compute prompts for other engines (prefill), decode prompts that other engines "
        "compute (decode), behind a router; or a pair of both in one server, for a machine with two devices (both).",
    ] = "null"
    disaggregation_timeout: Annotated[
        float,
        "With --disaggregation-mode: seconds for a prompt to come (decode), or to be claimed (prefill).",
    ] = 120.0
    disaggregation_fallback: Annotated[
        bool,
        "With --disaggregation-mode decode: compute a prompt here if it does not come; else the request fails.",
    ] = True
    chaos: Annotated[
        str | None,
        "Fault injection for tests: 'retract=0.5:500' retracts with this probability, at most this "
        "often; 'oom=0.1:20' treats steps as out of memory; 'slow=0.01' makes every step last at "
        "least this many seconds; 'kill=7' kills the process at a prompt with this token.",
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
            "speculative_cache_tokens",
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
        for name in ("target_step_ms", "multi_step_ms"):
            if getattr(self, name) != "auto":
                check_finite(name, getattr(self, name), 0.0, open_end=False)
        check_finite("batch_slowdown", self.batch_slowdown, 0.0, open_end=False)
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
        if self.speculative_model is not None and self.speculative not in ("draft", "eagle3", "auto"):
            raise ConfigError(
                f"speculative_model is {self.speculative_model!r}, but speculative is {self.speculative}, which drafts "
                "without a model; add --speculative auto"
            )
        if self.speculative_model is None and self.speculative in ("draft", "eagle3"):
            raise ConfigError(
                f"speculative is {self.speculative}, but no model drafts; give its folder, file or name with "
                "--speculative-model, or use --speculative suffix"
            )
        check_finite("schedule_conservativeness", self.schedule_conservativeness, 0.0, open_end=True)
        check_finite("disaggregation_timeout", self.disaggregation_timeout, 0.0, open_end=True)
        parse_chaos(self.chaos)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings, by concern."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    limits: RequestLimits = field(default_factory=RequestLimits)
    media: MediaConfig = field(default_factory=MediaConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        mode = self.scheduler.disaggregation_mode
        if tier := self.cache.kv_tier:
            for name, value, usual in (
                ("nnodes", self.parallel.nnodes, 1),
                ("executor", self.parallel.executor, "local"),
                ("disaggregation_mode", mode, "null"),
            ):
                if value != usual:
                    raise ConfigError(
                        f"kv_{tier} is set with {name} {value}, but a {tier} keeps the KV of engines on one machine "
                        f"that compute and decode; leave --kv-{tier} out, or --{name.replace('_', '-')}"
                    )
        if mode == "null":
            return
        if self.parallel.pp > 1:
            raise ConfigError(
                f"disaggregation_mode is {mode} with pp {self.parallel.pp}, but the ranks of such an engine hold all "
                "layers of a page; leave --pp out, or use --tp"
            )
        if not self.cache.radix_cache:
            raise ConfigError(
                f"disaggregation_mode is {mode} without the prefix cache, but KV is handed over from one prefix cache "
                "to another; leave --no-radix-cache out"
            )
        if mode != "decode" and self.server.bootstrap_port == 0:
            raise ConfigError("bootstrap_port is 0, but decode engines must know it; set it to a free port")
