"""Flags and commands of vLLM, SGLang, llama.cpp and Ollama that do not exist here: what to use instead.

A name with the same meaning is an `Alias` of its setting. A name here has another meaning, another unit, or needs
nothing: an error with the answer is better than a setting that means something else. The answers apply to flags, to
keys of a configuration file and to arguments of `LLM`. docs/migration.md is made from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ALWAYS: Final = "leave it out"
_ONE_MODEL: Final = "start one server for each copy, and a load balancer before them"
_IN_REQUESTS: Final = "send it with each request"
_TOKENIZER: Final = "leave it out: the tokenizer is read from the model's files"

ANSWERS: Final[Mapping[str, str]] = {
    # memory and batches
    "gpu_memory_utilization": "use --mem-fraction, the share of the memory that remains after the weights, or "
    "--max-total-tokens",
    "mem_fraction_static": "use --mem-fraction, the share of the memory that remains after the weights, or "
    "--max-total-tokens",
    "ctx_size": "use --max-model-len for one request, and --max-total-tokens for all together",
    "parallel": "use --max-running-requests",
    "batch_size": "use --max-num-batched-tokens",
    "ubatch_size": "use --chunked-prefill-size",
    "cpu_offload_gb": "the weights stay on one device; --swap-space is host memory for the KV of waiting requests",
    "kv_cache_memory_bytes": "use --max-total-tokens",
    "cache_type_k": "use --kv-cache-dtype, for keys and values",
    "cache_type_v": "use --kv-cache-dtype, for keys and values",
    "max_seq_len_to_capture": "use --max-recorded-bs, a number of requests",
    "cont_batching": f"{_ALWAYS}: batching is always continuous",
    "enable_torch_compile": f"{_ALWAYS}: kernels are chosen for the device; see --record-steps",
    "compilation_config": f"{_ALWAYS}: kernels are chosen for the device; see --record-steps",
    "flash_attn": "use --attention-backend, or leave it out: the best one for the device is chosen",
    "sampling_backend": f"{_ALWAYS}: it is chosen for the device",
    "grammar_backend": f"{_ALWAYS}: there is one",
    "guided_decoding_backend": f"{_ALWAYS}: there is one",
    # devices
    "n_gpu_layers": "use --device cuda or --device cpu; a model is on one kind of device",
    "gpu_layers": "use --device cuda or --device cpu; a model is on one kind of device",
    "data_parallel_size": _ONE_MODEL,
    "dp": _ONE_MODEL,
    "dp_size": _ONE_MODEL,
    "pipeline_parallel_size": "use --tp; a model is not divided by layers",
    "pp_size": "use --tp; a model is not divided by layers",
    "distributed_executor_backend": "use --executor local or --executor ray",
    "numa": f"{_ALWAYS}, or start the server with numactl",
    "mlock": f"{_ALWAYS}: weights are read once into memory",
    "mmap": f"{_ALWAYS}: weight files are mapped while they are read",
    # the model
    "trust_remote_code": f"{_ALWAYS}: code from a model's files is never run; see --model-impl",
    "tokenizer": _TOKENIZER,
    "tokenizer_path": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "download_dir": "set HF_HOME to the folder",
    "hf_token": "set HF_TOKEN",
    "hf_repo": "give the model as MODEL: engine serve org/name",
    "task": f"{_ALWAYS}: models generate text",
    "runner": f"{_ALWAYS}: models generate text",
    "is_embedding": "embeddings are not supported",
    "embedding": "embeddings are not supported",
    "embeddings": "embeddings are not supported",
    "limit_mm_per_prompt": f"{_ALWAYS}: only text is supported",
    "enable_lora": "LoRA adapters are not supported; merge the adapter into the weights",
    "lora_modules": "LoRA adapters are not supported; merge the adapter into the weights",
    "lora_paths": "LoRA adapters are not supported; merge the adapter into the weights",
    "lora": "LoRA adapters are not supported; merge the adapter into the weights",
    "speculative_config": "use --speculative ngram; draft models are not supported",
    "speculative_algorithm": "use --speculative ngram; draft models are not supported",
    "model_draft": "use --speculative ngram; draft models are not supported",
    # scheduling
    "scheduling_policy": "use --schedule-policy; with `priority` larger numbers go first, in vLLM smaller ones",
    # server and answers
    "enable_auto_tool_choice": f"{_ALWAYS}: tools work with every model; see --tool-call-parser",
    "jinja": f"{_ALWAYS}: chat templates are always used",
    "reasoning_format": "use --reasoning-parser and --reasoning-field",
    "predict": f"{_IN_REQUESTS}: max_tokens",
    "n_predict": f"{_IN_REQUESTS}: max_tokens",
    "temp": f"{_IN_REQUESTS}: temperature",
    "temperature": _IN_REQUESTS,
    "top_k": _IN_REQUESTS,
    "top_p": _IN_REQUESTS,
    "min_p": _IN_REQUESTS,
    "json_schema": f"{_IN_REQUESTS}: response_format",
    "grammar": f"{_IN_REQUESTS}, as docs/structured_output.md describes",
    "allowed_origins": "use --cors-origin, once for each origin",
    "root_path": f"{_ALWAYS}: let the proxy remove the prefix",
    "metrics": f"{_ALWAYS}: /metrics is always there",
    "enable_metrics": f"{_ALWAYS}: /metrics is always there",
    "slots": f"{_ALWAYS}: /v1/requests lists the requests",
    "timeout": "use --send-timeout, --body-timeout or --request-timeout",
    # logs
    "uvicorn_log_level": "use --log-level",
    "log_level_http": "use --log-level",
    "log_requests_level": "use --log-requests; texts are never logged",
    "disable_log_stats": "use --log-interval, the seconds between two step lines",
    "decode_log_interval": "use --log-interval, in seconds",
    "log_file": "redirect standard error: engine serve 2> FILE",
    "log_disable": "use --log-level error",
    "verbose": "use --log-level debug",
}
"""Name, with underscores -> what to do."""

CHAT_ANSWERS: Final[Mapping[str, str]] = {
    "temp": "use --temperature",
    "predict": "use --max-tokens",
    "n_predict": "use --max-tokens",
    "max_new_tokens": "use --max-tokens",
    "reverse_prompt": "use --stop",
    "json_schema": "use --schema FILE",
    "json_schema_file": "use --schema FILE",
    "format": "use --schema FILE",
    "grammar": "use --schema FILE; a server takes grammars, as docs/structured_output.md describes",
    "prompt": 'give the question as an argument: engine chat "QUESTION"',
    "file": 'pipe the file: engine chat "QUESTION" < FILE',
    "system_prompt": "use --system",
    "system_prompt_file": "use --system with the text of the file",
    "conversation": f"{_ALWAYS}: without a question it is a conversation",
    "interactive": f"{_ALWAYS}: without a question it is a conversation",
    "verbose": "use --stats",
}
"""Flags of llama-cli and `ollama run` -> what to do in `engine chat`; others are in `ANSWERS`."""

COMMANDS: Final[Mapping[str, str]] = {
    "run": "use engine chat --model NAME, or engine serve NAME for a server",
    "show": "use engine doctor NAME",
    "stop": "press Ctrl-C in the server's terminal, or end the process id that engine ps shows",
    "create": "serve the .gguf file or the folder itself: engine serve ./FILE.gguf",
    "cp": "use engine serve NAME --served-model-name OTHER",
    "push": "use hf upload",
    "signin": "use hf auth login",
    "login": "use hf auth login",
    "complete": "use engine chat",
    "run-batch": "use examples/batch.py",
    "collect-env": "use engine doctor",
    "help": "use engine --help, or engine COMMAND --help",
    "version": "use engine --version",
}
"""Commands of Ollama and vLLM -> what to use; near names of the engine's own commands need no entry."""

SHORT: Final[Mapping[str, str]] = {
    "-m": "model",
    "-c": "ctx_size",
    "-t": "threads",
    "-np": "parallel",
    "-ngl": "n_gpu_layers",
    "-b": "batch_size",
    "-ub": "ubatch_size",
    "-fa": "flash_attn",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-n": "n_predict",
    "-a": "alias",
    "-cb": "cont_batching",
    "-v": "verbose",
    "-to": "timeout",
    "-md": "model_draft",
    "-tp": "tensor_parallel_size",
    "-dp": "data_parallel_size",
    "-pp": "pipeline_parallel_size",
}
"""Short flags of these engines -> their long names."""

CHAT_SHORT: Final[Mapping[str, str]] = {
    "-p": "prompt",
    "-f": "file",
    "-r": "reverse_prompt",
    "-i": "interactive",
    "-j": "json_schema",
    "-cnv": "conversation",
}
"""Short flags of llama-cli -> their long names."""

COMMON: Final[Mapping[str, tuple[str, ...]]] = {
    "vLLM": (
        "model",
        "served_model_name",
        "max_model_len",
        "dtype",
        "quantization",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "block_size",
        "swap_space",
        "kv_cache_dtype",
        "enforce_eager",
        "trust_remote_code",
        "tokenizer",
        "download_dir",
        "host",
        "port",
        "api_key",
        "chat_template",
        "enable_auto_tool_choice",
        "tool_call_parser",
        "reasoning_parser",
        "seed",
        "load_format",
        "scheduling_policy",
        "speculative_config",
        "enable_lora",
        "enable_log_requests",
        "disable_log_requests",
        "disable_log_stats",
        "uvicorn_log_level",
        "allowed_origins",
        "ssl_certfile",
        "ssl_keyfile",
        "shutdown_timeout",
        "distributed_executor_backend",
    ),
    "SGLang": (
        "model_path",
        "tokenizer_path",
        "served_model_name",
        "context_length",
        "host",
        "port",
        "api_key",
        "mem_fraction_static",
        "max_running_requests",
        "max_total_tokens",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "schedule_policy",
        "schedule_conservativeness",
        "page_size",
        "tp_size",
        "dp_size",
        "pp_size",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "attention_backend",
        "sampling_backend",
        "grammar_backend",
        "disable_radix_cache",
        "disable_cuda_graph",
        "cuda_graph_max_bs",
        "enable_mixed_chunk",
        "disable_overlap_schedule",
        "enable_torch_compile",
        "trust_remote_code",
        "random_seed",
        "log_level",
        "log_requests",
        "decode_log_interval",
        "enable_metrics",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "crash_dump_folder",
    ),
    "llama-server": (
        "model",
        "hf_repo",
        "alias",
        "ctx_size",
        "n_gpu_layers",
        "threads",
        "parallel",
        "batch_size",
        "ubatch_size",
        "host",
        "port",
        "api_key",
        "api_key_file",
        "ssl_cert_file",
        "ssl_key_file",
        "flash_attn",
        "cache_type_k",
        "cache_type_v",
        "cont_batching",
        "mlock",
        "mmap",
        "jinja",
        "chat_template_file",
        "reasoning_format",
        "n_predict",
        "temp",
        "top_k",
        "top_p",
        "json_schema",
        "metrics",
        "embedding",
        "lora",
        "model_draft",
        "timeout",
        "log_file",
        "verbose",
        "seed",
    ),
}
"""Engine -> its commonest flags, with underscores."""


def answer_for(name: str, *, chat: bool = False) -> str:
    """What to use instead of another engine's flag or key; "" if it is unknown.

    Args:
        name: `--gpu-memory-utilization`, `gpu_memory_utilization`, `-ngl`, with or without `=value`.
        chat: it was given to `engine chat`, whose options are sampling parameters, too.
    """
    word = name.partition("=")[0]
    short = {**SHORT, **CHAT_SHORT} if chat else SHORT
    key = short.get(word, word.lstrip("-")).replace("-", "_")
    if chat and key in CHAT_ANSWERS:
        return CHAT_ANSWERS[key]
    if word in short and key not in ANSWERS:
        return f"use --{key.replace('_', '-')}"
    return ANSWERS.get(key) or ANSWERS.get(key.removeprefix("no_"), "")
