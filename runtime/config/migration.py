"""Flags and commands of vLLM, SGLang, llama.cpp and Ollama that do not exist here: what to use instead.

A name with the same meaning is an `Alias` of its setting. A name here has another meaning, another unit, or needs
nothing: an error with the answer is better than a setting that means something else. The answers apply to flags, to
keys of a configuration file and to arguments of `LLM`. docs/migration.md is made from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..sampling_params import NUMBERS

_ALWAYS: Final = "leave it out"
_IN_REQUESTS: Final = "send it with each request"
_TASK: Final = (
    "leave it out: embedders and rerankers are recognized by their files; --task embed is for the others"
)
_TOKENIZER: Final = "leave it out: the tokenizer is read from the model's files"
_CONFIG_JSON: Final = "change config.json in the model's folder"
_REVISION: Final = "give it with the model: engine serve org/name@revision"
_EXPERTS: Final = "use --tp; each device has a part of each expert"
_ONE_GPU: Final = "use --tp for several GPUs, and CUDA_VISIBLE_DEVICES to choose them"
_HOST_TIER: Final = (
    "use --kv-host-size, GiB of host memory for what the KV pool of a GPU evicts; on a CPU --kv-disk DIR"
)

ANSWERS: Final[Mapping[str, str]] = {
    # memory and batches
    "gpu_memory_utilization": "use --mem-fraction, the share of the memory that remains after the weights, or "
    "--max-total-tokens",
    "mem_fraction_static": "use --mem-fraction, the share of the memory that remains after the weights, or "
    "--max-total-tokens",
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
    "structured_outputs_config": f"{_ALWAYS}: there is one backend for structured output",
    "num_gpu_blocks_override": "use --max-total-tokens",
    "context_shift": "send shorter prompts: a request ends when its context is full",
    "allow_auto_truncate": "send shorter prompts: one that does not fit is refused",
    "enable_hierarchical_cache": _HOST_TIER,
    "hicache_size": "use --kv-host-size, which is in GiB and for all ranks together",
    "hicache_ratio": _HOST_TIER,
    "kv_offloading_backend": f"{_ALWAYS}: --kv-host-size is enough",
    # devices
    "n_gpu_layers": "use --device cuda or --device cpu; a model is on one kind of device",
    "gpu_layers": "use --device cuda or --device cpu; a model is on one kind of device",
    "load_balance_method": "use --dispatch-policy",
    "distributed_executor_backend": "use --executor local or --executor ray",
    "numa": f"{_ALWAYS}, or start the server with numactl",
    "mlock": f"{_ALWAYS}: weights are read once into memory",
    "mmap": f"{_ALWAYS}: weight files are mapped while they are read",
    "enable_expert_parallel": _EXPERTS,
    "ep_size": _EXPERTS,
    "tensor_split": _ONE_GPU,
    "split_mode": _ONE_GPU,
    "main_gpu": _ONE_GPU,
    "base_gpu_id": _ONE_GPU,
    "api_server_count": f"{_ALWAYS}: there is one process for HTTP",
    "threads_batch": "use --num-threads, for prompts and answers",
    "skip_server_warmup": f"{_ALWAYS}: the server is ready when it says so",
    # the model
    "trust_remote_code": f"{_ALWAYS}: code from a model's files is never run; see --model-impl",
    "tokenizer": _TOKENIZER,
    "tokenizer_path": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "download_dir": "set HF_HOME to the folder",
    "hf_token": "set HF_TOKEN",
    "hf_repo": "give the model as MODEL: engine serve org/name",
    "runner": _TASK,
    "convert": _TASK,
    "is_embedding": _TASK,
    "embedding": _TASK,
    "embeddings": _TASK,
    "rerank": _TASK,
    "reranking": _TASK,
    "pooler_config": "use --pooling; layers after pooling are read from the model's files",
    "override_pooler_config": "use --pooling; layers after pooling are read from the model's files",
    "revision": _REVISION,
    "code_revision": _REVISION,
    "tokenizer_revision": _REVISION,
    "hf_file": "give the model as MODEL: engine serve org/name:Q4_K_M, or the path of the file",
    "hf_overrides": _CONFIG_JSON,
    "json_model_override_args": _CONFIG_JSON,
    "rope_scaling": _CONFIG_JSON,
    "rope_theta": _CONFIG_JSON,
    "generation_config": "use --sampling-defaults model for auto, and --sampling-defaults openai for vllm",
    "override_generation_config": f"{_IN_REQUESTS}, or change generation_config.json in the model's folder",
    "preferred_sampling_params": f"{_IN_REQUESTS}, or change generation_config.json in the model's folder",
    "speculative_num_steps": "use --speculative-num-draft-tokens",
    "speculative_eagle_topk": f"{_ALWAYS}: drafts are one row of tokens, not a tree",
    "speculative_token_map": f"{_ALWAYS}: a head's own table says which tokens it drafts",
    "speculative_accept_threshold_single": f"{_ALWAYS}: a draft is kept only if it is the sampled token",
    "speculative_accept_threshold_acc": f"{_ALWAYS}: a draft is kept only if it is the sampled token",
    "draft_p_min": f"{_ALWAYS}: measured hit rates choose the number of drafts",
    "draft_min": f"{_ALWAYS}: measured hit rates choose the number of drafts",
    "ctx_size_draft": f"{_ALWAYS}: a draft model uses the pages of the model",
    "n_gpu_layers_draft": f"{_ALWAYS}: a draft model is on the device of the model",
    "gpu_layers_draft": f"{_ALWAYS}: a draft model is on the device of the model",
    "device_draft": f"{_ALWAYS}: a draft model is on the device of the model",
    "draft_max": "use --speculative-num-draft-tokens",
    # adapters
    "lora_eviction_policy": f"{_ALWAYS}: the slot that was idle longest is used for another adapter",
    "lora_backend": f"{_ALWAYS}: kernels are chosen for the device",
    "max_lora_chunk_size": f"{_ALWAYS}: kernels are chosen for the device",
    "fully_sharded_loras": f"{_ALWAYS}: with --tp each rank has its part of each adapter",
    "lora_dtype": f"{_ALWAYS}: adapters have the model's dtype, see --dtype",
    "lora_extra_vocab_size": f"{_ALWAYS}: an adapter adds no tokens",
    "enable_lora_overlap_loading": f"{_ALWAYS}: adapters are read beside the steps",
    "default_mm_loras": f"{_ALWAYS}: adapters apply to the language model",
    "lora_scaled": "use --lora NAME=FILE; to scale an adapter change lora_alpha in its adapter_config.json",
    "lora_init_without_apply": f"{_ALWAYS}: an adapter applies to the requests that name it",
    # scheduling
    "scheduling_policy": "use --schedule-policy; with `priority` larger numbers go first, in vLLM smaller ones",
    # server and answers
    "enable_auto_tool_choice": f"{_ALWAYS}: tools work with every model; demanded calls follow their schemas, and with "
    f"auto those of tools with strict: true; see --tool-call-parser",
    "jinja": f"{_ALWAYS}: chat templates are always used",
    "reasoning_format": "use --reasoning-parser and --reasoning-field",
    "predict": f"{_IN_REQUESTS}: max_tokens",
    "n_predict": f"{_IN_REQUESTS}: max_tokens",
    "temp": f"{_IN_REQUESTS}: temperature",
    **dict.fromkeys((name for name, _, bounds in NUMBERS if bounds.from_model), _IN_REQUESTS),
    "json_schema": f"{_IN_REQUESTS}: response_format",
    "grammar": f"{_IN_REQUESTS}, as docs/structured_output.md describes",
    "allowed_origins": "use --cors-origin, once for each origin",
    "root_path": f"{_ALWAYS}: let the proxy remove the prefix",
    "metrics": f"{_ALWAYS}: /metrics is always there",
    "enable_metrics": f"{_ALWAYS}: /metrics is always there",
    "slots": f"{_ALWAYS}: /v1/requests lists the requests",
    "timeout": "use --send-timeout, --body-timeout or --request-timeout",
    "response_role": f"{_ALWAYS}: answers have the role assistant",
    "chat_template_content_format": f"{_ALWAYS}: it is found in the template",
    "chat_template_kwargs": _IN_REQUESTS,
    "reasoning_budget": f"{_IN_REQUESTS}: reasoning.max_tokens",
    "repeat_penalty": f"{_IN_REQUESTS}: repetition_penalty",
    "presence_penalty": _IN_REQUESTS,
    "frequency_penalty": _IN_REQUESTS,
    "middleware": "put a proxy before the server",
    "return_tokens_as_token_ids": "send return_tokens_as_token_ids with the requests",
    "tool_parser_plugin": "use a parser that the engine has, see --tool-call-parser",
    "stream_interval": "use --multi-step-ms, in milliseconds",
    "enable_prompt_tokens_details": f"{_ALWAYS}: usage always has the cached tokens",
    "enable_cache_report": f"{_ALWAYS}: usage always has the cached tokens",
    "enable_force_include_usage": f"{_IN_REQUESTS}: stream_options.include_usage",
    "enable_request_id_headers": f"{_ALWAYS}: each answer has X-Request-Id",
    "enable_server_load_tracking": f"{_ALWAYS}: /metrics has the load",
    "disable_fastapi_docs": "use --no-page",
    "no_webui": "use --no-page to have no page at /",
    # logs
    "uvicorn_log_level": "use --log-level",
    "log_level_http": "use --log-level",
    "log_requests_level": "use --log-requests; texts are never logged",
    "disable_log_stats": "use --log-interval, the seconds between two step lines",
    "decode_log_interval": "use --log-interval, in seconds",
    "disable_uvicorn_access_log": f"{_ALWAYS}: requests are logged with --log-requests only",
    "max_log_len": f"{_ALWAYS}: texts are never logged",
    "log_file": "redirect standard error: engine serve 2> FILE",
    "log_disable": "use --log-level error",
    "verbose": "use --log-level debug",
}
"""Name, with underscores -> what to do."""

CHAT_ANSWERS: Final[Mapping[str, str]] = {
    "parallel": f"{_ALWAYS}: a chat is one conversation",
    "json_schema": "use --schema FILE",
    "format": "use --schema FILE",
    "grammar": "use --schema FILE; a server takes grammars, as docs/structured_output.md describes",
    "prompt": 'give the question as an argument: engine chat "QUESTION"',
    "file": 'pipe the file: engine chat "QUESTION" < FILE',
    "system_prompt_file": "use --system with the text of the file",
    "conversation": f"{_ALWAYS}: without a question it is a conversation",
    "interactive": f"{_ALWAYS}: without a question it is a conversation",
    "verbose": "use --stats",
}
"""Flags of llama-cli and `ollama run` -> what to do in `engine chat`; others are in `ANSWERS`."""

COMMANDS: Final[Mapping[str, str]] = {
    "run": "use engine chat --model NAME, or engine serve NAME for a server",
    "show": "use engine doctor NAME",
    "route": "start a router by its own command, as smg launch --worker-urls URL URL; see docs/distributed.md",
    "stop": "press Ctrl-C in the server's terminal, or end the process id that engine ps shows",
    "create": "serve the .gguf file or the folder itself: engine serve ./FILE.gguf",
    "cp": "use engine serve NAME --served-model-name OTHER",
    "push": "use hf upload",
    "signin": "use hf auth login",
    "login": "use hf auth login",
    "complete": "use engine chat",
    "run-batch": "use engine batch -i IN -o OUT --model MODEL",
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
"""Short flags of these engines -> their long names: those of settings work, the others have answers."""

SAME_IN_CHAT: Final[Mapping[str, str]] = {
    "--temp": "--temperature",
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "-r": "--stop",
    "--reverse-prompt": "--stop",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-jf": "--schema",
    "--json-schema-file": "--schema",
}
"""Flags of llama-cli and vLLM that work in `engine chat` -> its options; `--temp` in `engine bench`, too."""

CHAT_SHORT: Final[Mapping[str, str]] = {
    "-p": "prompt",
    "-f": "file",
    "-i": "interactive",
    "-j": "json_schema",
    "-cnv": "conversation",
}
"""Short flags of llama-cli -> their long names."""


def answer_for(name: str, *, chat: bool = False) -> str:
    """Replacement for another engine's flag or key; "" if it is unknown.

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
