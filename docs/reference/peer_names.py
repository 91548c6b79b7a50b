"""The names of the engine's settings in SGLang (`ServerArgs`), vLLM (`EngineArgs`, `FrontendArgs`) and llama-server.

Kept by hand. A name stands here only where it is the same setting. A setting that differs in unit or meaning is
described in the note. A setting without an entry exists in none of them. `tests/docs/test_reference.py` checks that
each entry belongs to a setting and that each `Alias` of the code appears here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

READ_AT: Final = "SGLang 0.5 and vLLM 0.27"

EARLIER_NAMES: Final = frozenset({"cuda_graph", "decode_burst_ms"})
"""Aliases that are earlier names of our own settings, and no names in another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNames:
    """Names of one setting.

    Attributes:
        sglang: fields of `ServerArgs`; empty: there is none.
        vllm: fields of `EngineArgs` or `FrontendArgs`; empty: there is none.
        llama_server: options of llama.cpp's server.
        note: what differs, or the nearest setting.
    """

    sglang: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    llama_server: tuple[str, ...] = ()
    note: str = ""


def all_names(peers: PeerNames) -> tuple[str, ...]:
    """The names in every engine."""
    return *peers.sglang, *peers.vllm, *peers.llama_server


def _both(*names: str, note: str = "") -> PeerNames:
    return PeerNames(sglang=names, vllm=names, note=note)


def _sglang(*names: str, note: str = "") -> PeerNames:
    return PeerNames(sglang=names, note=note)


def _vllm(*names: str, note: str = "") -> PeerNames:
    return PeerNames(vllm=names, note=note)


_V0_ONLY: Final = "Only the V0 engine of vLLM supports values above 1."
SETTINGS: Final[Mapping[str, PeerNames]] = {
    # model
    "model": PeerNames(sglang=("model_path",), vllm=("model",), llama_server=("model",)),
    "served_model_name": PeerNames(
        sglang=("served_model_name",), vllm=("served_model_name",), llama_server=("alias",)
    ),
    "max_model_len": PeerNames(
        sglang=("context_length",), vllm=("max_model_len",), llama_server=("ctx_size",)
    ),
    "dtype": _both("dtype"),
    "load_format": _both("load_format"),
    "model_impl": _both(
        "model_impl", note="The value `engine` is called `sglang` in SGLang and `vllm` in vLLM."
    ),
    "quantization": _both("quantization"),
    "device": _sglang("device"),
    "num_threads": PeerNames(llama_server=("threads",)),
    "chat_template": PeerNames(
        sglang=("chat_template",), vllm=("chat_template",), llama_server=("chat_template_file",)
    ),
    "seed": PeerNames(sglang=("random_seed",), vllm=("seed",)),
    # cache
    "page_size": PeerNames(sglang=("page_size",), vllm=("block_size",)),
    "max_total_tokens": _sglang(
        "max_total_tokens", note="vLLM has `num_gpu_blocks_override`, which counts blocks, not tokens."
    ),
    "mem_fraction": PeerNames(
        note="SGLang `mem_fraction_static` and vLLM `gpu_memory_utilization` are shares of the whole device memory, "
        "weights included."
    ),
    "kv_cache_dtype": _both("kv_cache_dtype"),
    "radix_cache": PeerNames(
        sglang=("disable_radix_cache",),
        vllm=("enable_prefix_caching",),
        note="The SGLang switch is the negation.",
    ),
    "eviction_policy": _sglang("radix_eviction_policy"),
    "kv_host_size": PeerNames(
        vllm=("kv_offloading_size",),
        note="SGLang `hicache_size` is in GB of each rank, `hicache_ratio` a multiple of the KV pool.",
    ),
    "kv_disk": PeerNames(
        sglang=("hicache_storage_backend",),
        vllm=("kv_transfer_config",),
        note="SGLang's file, with its folder in SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR, and mooncake, with "
        "MOONCAKE_MASTER; vLLM's OffloadingConnector with a secondary tier fs.",
    ),
    "kv_write": _sglang(
        "hicache_write_policy",
        note="write_through_selective is selective, write_through is through, write_back is evicted.",
    ),
    "kv_fetch": _sglang("hicache_storage_prefetch_policy", note="wait_complete is wait."),
    "swap_space": PeerNames(note="The V0 engine of vLLM has `swap_space`, in GiB per GPU."),
    "kv_events": _both(
        "kv_events_config",
        note="The value is the address, or their JSON object; without `enable_kv_cache_events` it is on.",
    ),
    # kernels
    "attention_backend": _both(
        "attention_backend",
        note="SGLang has `prefill_attention_backend` and `decode_attention_backend` for two names.",
    ),
    "deterministic": _sglang(
        "enable_deterministic_inference", note="vLLM has the environment variable `VLLM_BATCH_INVARIANT`."
    ),
    "record_steps": PeerNames(
        sglang=("disable_cuda_graph",), vllm=("enforce_eager",), note="Both switches are the negation."
    ),
    "max_recorded_bs": PeerNames(
        sglang=("cuda_graph_max_bs",),
        vllm=("max_cudagraph_capture_size",),
        note="Newer versions of SGLang call it `cuda_graph_max_bs_decode`.",
    ),
    # parallel
    "disaggregation_mode": PeerNames(sglang=("disaggregation_mode",)),
    "bootstrap_port": PeerNames(sglang=("disaggregation_bootstrap_port",)),
    "transfer_backend": PeerNames(sglang=("disaggregation_transfer_backend",)),
    "dp": PeerNames(sglang=("dp_size", "data_parallel_size"), vllm=("data_parallel_size",)),
    "tp": PeerNames(sglang=("tp_size", "tensor_parallel_size"), vllm=("tensor_parallel_size",)),
    "pp": PeerNames(sglang=("pp_size", "pipeline_parallel_size"), vllm=("pipeline_parallel_size",)),
    "pp_layers": PeerNames(
        note="SGLang and vLLM have the environment variables `SGLANG_PP_LAYER_PARTITION` and `VLLM_PP_LAYER_PARTITION`."
    ),
    "nnodes": _both("nnodes"),
    "node_rank": _both("node_rank"),
    "dist_init_addr": PeerNames(
        sglang=("dist_init_addr",),
        vllm=("master_addr", "master_port"),
        note="vLLM has one option for the host and one for the port.",
    ),
    "dist_timeout": PeerNames(
        note="SGLang `dist_timeout` and vLLM `distributed_timeout_seconds` are the timeout of `torch.distributed`."
    ),
    "one_shot_all_reduce_kib": PeerNames(
        note="SGLang has `enable_torch_symm_mem`, vLLM the environment variable `VLLM_ALLREDUCE_USE_SYMM_MEM`."
    ),
    "executor": PeerNames(
        sglang=("use_ray",),
        vllm=("distributed_executor_backend",),
        note="SGLang has a switch; vLLM calls `local` `mp`.",
    ),
    # scheduler
    "schedule_policy": PeerNames(
        sglang=("schedule_policy",),
        vllm=("scheduling_policy",),
        note="SGLang has `fcfs`, `lpm`, `dfs-weight`, `lof`, `random` and, as a switch, `enable_priority_scheduling`. "
        "vLLM has `fcfs` and `priority`, where smaller numbers go first.",
    ),
    "max_running_requests": PeerNames(
        sglang=("max_running_requests",), vllm=("max_num_seqs",), llama_server=("parallel",)
    ),
    "priority_preemption_threshold": _sglang("priority_scheduling_preemption_threshold"),
    "max_queued_requests": _sglang("max_queued_requests"),
    "phases": _sglang(
        "enable_mixed_chunk",
        note="The SGLang switch stands for `mixed`; without it SGLang is `prefill-first`. vLLM always mixes.",
    ),
    "chunked_prefill_size": PeerNames(
        sglang=("chunked_prefill_size",),
        vllm=("enable_chunked_prefill",),
        note="vLLM has a switch; its chunks are what `max_num_batched_tokens` leaves.",
    ),
    "max_prefill_tokens": _sglang("max_prefill_tokens"),
    "max_num_batched_tokens": _vllm("max_num_batched_tokens"),
    "max_num_partial_prefills": _vllm("max_num_partial_prefills", note=_V0_ONLY),
    "max_long_partial_prefills": _vllm("max_long_partial_prefills", note=_V0_ONLY),
    "long_prefill_token_threshold": _vllm("long_prefill_token_threshold"),
    "schedule_conservativeness": _sglang("schedule_conservativeness"),
    "preemption_mode": PeerNames(
        note="The V0 engine of vLLM has `preemption_mode` with `recompute` and `swap`."
    ),
    "max_loras_per_batch": PeerNames(
        sglang=("max_loras_per_batch",),
        vllm=("max_loras",),
        note="SGLang counts requests without an adapter as one more; vLLM's default is 1.",
    ),
    "overlap": PeerNames(
        sglang=("disable_overlap_schedule",),
        vllm=("async_scheduling",),
        note="The SGLang switch is the negation.",
    ),
    "num_lookahead_tokens": _vllm("num_lookahead_slots", note="Only the V0 engine of vLLM has it."),
    "speculative": PeerNames(
        sglang=("speculative_algorithm",),
        vllm=("speculative_config",),
        llama_server=("spec_type",),
        note="SGLang's words are `NGRAM`, `SUFFIX`, `STANDALONE` (draft), `EAGLE3` and `NEXTN` (mtp); vLLM's `method` "
        "is in a JSON object.",
    ),
    "speculative_model": PeerNames(
        sglang=("speculative_draft_model_path",),
        vllm=("speculative_config",),
        llama_server=("model_draft",),
        note="vLLM: `model` in the JSON object.",
    ),
    "speculative_cache_tokens": PeerNames(
        note="vLLM has a number of requests, `suffix_decoding_max_cached_requests` in `speculative_config`.",
    ),
    "speculative_num_draft_tokens": PeerNames(
        sglang=("speculative_num_draft_tokens",),
        vllm=("num_speculative_tokens",),
        note="vLLM takes it in the JSON object of `speculative_config`.",
    ),
    # adapters
    "lora": PeerNames(
        sglang=("lora_paths",),
        vllm=("lora_modules",),
        note="They also take a JSON object. llama-server's `lora` is a file without a name, for all requests.",
    ),
    "enable_lora": _both("enable_lora"),
    "allow_runtime_lora": PeerNames(
        note="vLLM: the environment variable `VLLM_ALLOW_RUNTIME_LORA_UPDATING`. SGLang always allows it."
    ),
    "max_lora_rank": _both("max_lora_rank", note="vLLM takes certain ranks only, and its default is 16."),
    "max_loaded_loras": PeerNames(sglang=("max_loaded_loras",), vllm=("max_cpu_loras",)),
    "lora_target_modules": _sglang("lora_target_modules", note="`all` in SGLang is `all-linear` here."),
    # server
    "host": _both("host"),
    "port": _both("port"),
    "api_key": _both("api_key"),
    "admin_api_key": _sglang("admin_api_key"),
    "cors_origin": _vllm(
        "allowed_origins", note="vLLM takes a JSON list and allows every origin by default."
    ),
    "ssl_certfile": PeerNames(
        sglang=("ssl_certfile",), vllm=("ssl_certfile",), llama_server=("ssl_cert_file",)
    ),
    "ssl_keyfile": PeerNames(sglang=("ssl_keyfile",), vllm=("ssl_keyfile",), llama_server=("ssl_key_file",)),
    "max_header_kb": _vllm("h11_max_incomplete_event_size", note="vLLM counts bytes."),
    "keep_alive_timeout": PeerNames(note="vLLM has the environment variable `VLLM_HTTP_TIMEOUT_KEEP_ALIVE`."),
    "drain_timeout": _vllm("shutdown_timeout", note="The default of vLLM is 0."),
    "watchdog_timeout": PeerNames(
        note="SGLang `watchdog_timeout` limits the time of one forward pass; it does not watch an idle scheduler."
    ),
    # limits
    "max_images": _vllm("limit_mm_per_prompt", note='An object there: `{"image": 4}`.'),
    "max_logprobs": _vllm("max_logprobs"),
    "logprobs_mode": _vllm("logprobs_mode"),
    # media
    "allowed_media_domains": _vllm("allowed_media_domains", note="vLLM fetches from any host without it."),
    "allowed_local_media_path": _vllm("allowed_local_media_path"),
    "mm_max_pixels": _vllm(
        "mm_processor_kwargs",
        note='An object there: `{"max_pixels": 1048576}`, or `{"do_image_splitting": false}`.',
    ),
    "mm_cache_gb": _vllm("mm_processor_cache_gb"),
    # log
    "log_level": _sglang("log_level", note="vLLM has the environment variable `VLLM_LOGGING_LEVEL`."),
    "log_requests": PeerNames(
        sglang=("log_requests",),
        vllm=("enable_log_requests", "disable_log_requests"),
        note="SGLang and vLLM can log texts, too.",
    ),
    "log_interval": PeerNames(
        note="SGLang `decode_log_interval` counts decode steps; vLLM has the environment variable "
        "`VLLM_LOG_STATS_INTERVAL`, in seconds."
    ),
    "crash_dir": _sglang("crash_dump_folder", note="SGLang writes nothing where it is not set."),
    "otlp_endpoint": _vllm(
        "otlp_traces_endpoint", note="`/v1/traces` is added to a URL that does not end in it."
    ),
}
"""Setting -> its names."""

BENCH_SERVE: Final[Mapping[str, PeerNames]] = {
    "--base-url": _both("--base-url"),
    "--model": _both("--model"),
    "--tokenizer": _both("--tokenizer"),
    "--stream": _sglang("--disable-stream", note="The SGLang switch is the negation."),
    "--ready-check-timeout-sec": _vllm("--ready-check-timeout-sec"),
    "--flush-cache": _sglang("--flush-cache"),
    "--dataset-name": _both("--dataset-name", note="The names of the data sets differ in part."),
    "--num-prompts": _both("--num-prompts"),
    "--random-input-len": _both("--random-input-len"),
    "--random-output-len": _both("--random-output-len"),
    "--random-range-ratio": _sglang(
        "--random-range-ratio", note="vLLM has the same name for a range around the mean."
    ),
    "--seed": _both("--seed"),
    "--gsp-num-groups": _sglang("--gsp-num-groups"),
    "--gsp-prompts-per-group": _sglang("--gsp-prompts-per-group"),
    "--gsp-system-prompt-len": _sglang("--gsp-system-prompt-len"),
    "--gsp-question-len": _sglang("--gsp-question-len"),
    "--gsp-output-len": _sglang("--gsp-output-len"),
    "--dataset-path": _both("--dataset-path"),
    "--sharegpt-output-len": _both("--sharegpt-output-len"),
    "--request-rate": _both("--request-rate"),
    "--burstiness": _vllm("--burstiness"),
    "--max-concurrency": _both("--max-concurrency"),
    "--warmup-requests": PeerNames(sglang=("--warmup-requests",), vllm=("--num-warmups",)),
    "--ignore-eos": PeerNames(
        sglang=("--disable-ignore-eos",),
        vllm=("--ignore-eos",),
        note="The SGLang switch is the negation.",
    ),
    "--temperature": _vllm("--temperature"),
    "--goodput": _vllm("--goodput"),
    "--output-file": PeerNames(sglang=("--output-file",), vllm=("--result-filename",)),
    "--append": _vllm("--append-result", note="SGLang always appends."),
    "--details": PeerNames(sglang=("--output-details",), vllm=("--save-detailed",)),
}
"""Option of `engine bench serve` -> its names in `sglang.bench_serving` and `vllm bench serve`."""
