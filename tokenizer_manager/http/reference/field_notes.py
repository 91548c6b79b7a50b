"""Notes in `/openapi.json` and `/docs` besides types: an example for each endpoint, and the meaning of each field.

An example is accepted by a server with any model that has a chat template, or with any embedder (`OF_EMBEDDERS`), a
classifier (`OF_CLASSIFIERS`), a model that fills in the middle (`OF_CODERS`), or a folder of adapters (`OF_ADAPTERS`);
the tests send them. A note has as key a field, or `Struct.field` where the same name means something else.
tests/tokenizer_manager/http/reference/test_field_notes.py fails while a field has no description, or a description has
no field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ....runtime.sampling_params import NUMBERS, SamplingParams
from ...adapters.registry import UNLOAD_TIMEOUT_S
from ...all_processes import DEFAULT_DURATION_S, DEFAULT_RATE_HZ
from ..native.convert import DEFAULT_MAX_NEW_TOKENS
from ..native.llama_server import DEFAULTS as LLAMA_DEFAULTS
from ..openai.completions import DEFAULT_MAX_TOKENS

_CONSTRAINT: Final = "Constrains the answer; at most one constraint. "

NOTES: Final[Mapping[str, str]] = {
    # ---- what is asked
    "messages": "The conversation: objects with role and content.",
    "prompt": "A text, token ids, or a list of either.",
    "OllamaGenerateRequest.prompt": "The user's message; with raw, the whole prompt.",
    "TokenizeRequest.prompt": "The text; instead of messages.",
    "content": "The text, in llama-server's form; instead of prompt.",
    "LlamaEmbeddingRequest.content": "A text, token ids, or a list of either.",
    "text": "A text, or a list of texts; instead of input_ids.",
    "input_ids": "Token ids, or a list of such lists; instead of text.",
    "image_data": "Images of the text, which has the model's marker in the place of each.",
    "input": "A text, token ids, or a list of either.",
    "ResponsesRequest.input": "A text, or a list of items: messages, calls, results of calls, reasoning.",
    "OllamaOldEmbedRequest.prompt": "The text.",
    "suffix": "The text after the answer, which fills in the middle; for models with tokens for it.",
    "query": "The text that documents are compared with.",
    "ScoreRequest.query": "A text or token ids, joined with each item.",
    "queries": "A text, or as many as documents.",
    "ScoreRequest.documents": "A text, or a list of texts.",
    "text_1": "A text, or as many as text_2.",
    "text_2": "A text, or a list of texts.",
    "items": "Texts or token ids, each joined with the query: the next token is judged.",
    "instruction": "What makes a document relevant, for rerankers that take an instruction.",
    "instructions": "The system prompt.",
    "system": "The system prompt.",
    "images": "Image files in base64, before the prompt, for models that see them.",
    "model": "Name of the served model; left out, it is that model.",
    "name": "Another name of `model`.",
    "tokens": "Token ids.",
    "lora_path": "The name of a LoRA adapter; left out, it is what `model` says.",
    "input_prefix": "The text before the answer.",
    "input_suffix": "The text after the answer.",
    "input_extra": "Parts of other files, the most important one last: objects with text and filename.",
    "InfillRequest.prompt": "The beginning of the middle, such as the line up to the cursor.",
    "LlamaCompletionRequest.prompt": "A text or token ids.",
    # ---- files and batches
    "file": "The file: one request per line.",
    "purpose": "What the file is for; only batch.",
    "requests": "Objects with custom_id and params, which is a body of /v1/messages.",
    "input_file_id": "The id of an uploaded file with the requests, one per line.",
    "endpoint": "The path that answers every line.",
    "completion_window": "24h: what is not answered by then is an error.",
    "BatchRequest.metadata": "Up to 16 texts by name, which the batch shows.",
    "output_expires_after": "When the results are deleted, as expires_after.",
    "expires_after": "When it is deleted: seconds after created_at, 30 days unless set.",
    # ---- sampling
    "sampling_params": "The sampling fields, see below.",
    **{name: bounds.note for name, _, bounds in NUMBERS},
    "dry_sequence_breakers": "Texts that no repetition goes across, for dry_multiplier; line end, colon, quote, star.",
    "bad_words": "Texts that the answer does not have, with and without a space before them.",
    "allowed_token_ids": "The only tokens of the answer.",
    "stop_regex": "Regular expressions that end the answer after the first match; no look-around or back references.",
    "repetition_detection": "Ends an answer that repeats a pattern of tokens, with stop_reason repetition_detected.",
    "temperature_last": "Filters see the logits before the temperature, as in llama.cpp.",
    "logit_bias": "Added to the logits of tokens, by token id.",
    "samplers": "The samplers of the chain, in the order of llama-server; those that are left out are off.",
    "n": "Answers per prompt.",
    "best_of": "Answers that are generated, of which the n most likely are returned.",
    # ---- vectors and scores
    "encoding_format": "float, or base64 of little-endian float32.",
    "dimensions": "Leading numbers of the vector to keep, for models that were trained for it.",
    "task": "embed or classify, which must be what the model does.",
    "normalize": "Scale the vector to length 1; what the model's files say unless set.",
    "embd_normalize": "2: vectors of length 1, -1: as the model computes them.",
    "input_type": "query or document: the model's prompt of this kind is put before the input.",
    "prompt_name": "The model's prompt of this name is put before the input.",
    "top_n": "The most relevant documents to return; 0 for all.",
    "return_documents": "Results have the text of their document.",
    "labels": "Labels that are judged as the next token; each is one token.",
    "label_token_ids": "Tokens that are judged as the next one.",
    "apply_softmax": "Probabilities among the labels, instead of among all tokens.",
    "item_first": "The item comes before the query.",
    "state": "What the questions are about: a text, or any JSON.",
    "questions": "At most 400; each has a type, instructions, and the options of its type.",
    "permutations": "Orders of the options of a choice whose mean is taken; 1.",
    "min_label_mass": "Below this probability of all labels the answer is a refusal; 0.",
    "return_prompt_token_ids": "Answers have the tokens of their prompt and of their labels.",
    # ---- where it ends
    "max_tokens": "Most tokens of the answer; as many as the context holds unless set.",
    "MessagesRequest.max_tokens": "Most tokens of the answer.",
    "CompletionRequest.max_tokens": "Most tokens of the answer.",
    "max_completion_tokens": "Another name of max_tokens.",
    "max_new_tokens": "Most tokens of the answer.",
    "max_output_tokens": "Most tokens of the answer; as many as the context holds unless set.",
    "n_predict": "Most tokens of the answer; -1 is what the context holds, 0 computes the prompt only.",
    "n_indent": "A line after the first with less indentation ends the answer.",
    "t_max_predict_ms": "The first line end after this time since the first token ends the answer; 0: no limit.",
    "min_tokens": "End-of-sequence and stop tokens are masked until the answer has so many tokens.",
    "min_new_tokens": "End-of-sequence and stop tokens are masked until the answer has so many tokens.",
    "stop": "Strings that end the answer.",
    "stop_sequences": "Strings that end the answer.",
    "stop_token_ids": "Tokens that end the answer, besides the model's own.",
    "ignore_eos": "The model's end-of-sequence tokens do not end the answer.",
    "include_stop_str_in_output": "The text keeps the stop string.",
    "no_stop_trim": "The text keeps the stop string.",
    "skip_special_tokens": "Special tokens do not appear in the text.",
    "speculative": "False: no draft tokens for this answer, which is the same without.",
    "echo": "The text begins with the prompt.",
    # ---- the form of the response
    "stream": "Send the answer as it is generated.",
    "OllamaChatRequest.stream": "Send the answer as it is generated.",
    "OllamaGenerateRequest.stream": "Send the answer as it is generated.",
    "stream_options": "include_usage: a last event with the counts of tokens; continuous_usage_stats: in each event.",
    "response_fields": "The fields of the answer, or their paths, such as timings/prompt_n; all unless set.",
    "return_tokens": "The answer has the ids of its tokens.",
    "return_progress": "A stream has `prompt_progress` until the first token: total, cache, processed, time_ms.",
    "return_token_ids": "Choices have `token_ids`; the ids of the prompt come too, in a stream with its first event.",
    "return_tokens_as_token_ids": "Log-probabilities name a token `token_id:ID` instead of its text.",
    "store": "False: a later request cannot refer to this answer or its items.",
    "background": "The answer is generated whether the client waits or not; with --state-dir.",
    "previous_response_id": "The stored response that the input continues; with --state-dir.",
    "include": "More parts of the answer; `reasoning.encrypted_content` has no effect.",
    "incremental": "Events have the new text instead of all text so far.",
    "logprobs": "Log-probabilities of each token and of the k most likely ones.",
    "ChatRequest.logprobs": "Return the log-probability of each token.",
    "top_logprobs": "With logprobs: so many of the most likely tokens at each place.",
    "return_logprob": "Return the log-probability of each token.",
    "top_logprobs_num": "With return_logprob: so many of the most likely tokens at each place.",
    "logprob_start_len": "Position of the prompt from which log-probabilities are returned.",
    "prompt_logprobs": "At each token of the prompt: its log-probability and rank, and the k most likely tokens.",
    "logprob_token_ids": "Tokens whose log-probabilities are listed too, with logprobs or prompt_logprobs.",
    "token_ids_logprob": "With return_logprob: tokens whose log-probabilities are listed too.",
    # ---- constraints
    "response_format": _CONSTRAINT + "Type json_object, json_schema, structural_tag or text.",
    "structured_outputs": _CONSTRAINT
    + "json, regex, choice, grammar, json_object or structural_tag, as in vLLM.",
    "guided_json": _CONSTRAINT + "JSON of this schema.",
    "guided_regex": _CONSTRAINT + "A text that this regular expression matches.",
    "guided_choice": _CONSTRAINT + "One of these texts.",
    "guided_grammar": _CONSTRAINT + "A text of this grammar, in GBNF or Lark.",
    "guided_whitespace_pattern": "Another name of whitespace_pattern.",
    "json_schema": _CONSTRAINT + "JSON of this schema.",
    "regex": _CONSTRAINT + "A text that this regular expression matches.",
    "ebnf": _CONSTRAINT + "A text of this grammar, in GBNF or Lark.",
    "grammar": _CONSTRAINT + "A text of this grammar, in GBNF or Lark.",
    "structural_tag": _CONSTRAINT + "Tags with schemas, between which the text is free.",
    "whitespace_pattern": "Regular expression of the whitespace that JSON may have.",
    "complete_json": "JSON is complete also when the answer ends by its limit of tokens.",
    "format": "json, or a JSON Schema: constrains the answer.",
    "output_config": "effort of the reasoning, and format: a JSON Schema that constrains the answer.",
    "ResponsesRequest.text": "format: constrains the answer.",
    # ---- tools and reasoning
    "tools": "Functions that the model may call: name, description and parameters as a JSON Schema.",
    "tool_choice": "none, auto, required, or an object that names a tool.",
    "parallel_tool_calls": "The model may call several tools in one answer.",
    "functions": "The older form of tools.",
    "function_call": "The older form of tool_choice.",
    "reasoning_effort": "How much the model reasons, for chat templates that know it.",
    "thinking_token_budget": "Most tokens of reasoning.",
    "reasoning_control": "The reasoning may be ended by /v1/chat/completions/control.",
    "ControlRequest.id": "Of the answer, or of one of its choices.",
    "action": "reasoning_end.",
    "thinking": "Anthropic's form: type enabled or disabled, and budget_tokens.",
    "reasoning": "effort, and max_tokens of reasoning.",
    "think": "Whether to reason, or an effort.",
    "include_reasoning": "The response has the reasoning.",
    "separate_reasoning": "The reasoning has a field of its own; otherwise it is in the text.",
    "stream_reasoning": "A stream has the reasoning.",
    # ---- how the prompt is made
    "truncate_prompt_tokens": "Longer inputs are cut to so many tokens; -1: to what the model takes.",
    "max_tokens_per_doc": "Another name of truncate_prompt_tokens.",
    "truncate": "Longer inputs are cut to what the model takes.",
    "documents": "Documents that the chat template places into the prompt.",
    "RerankRequest.documents": "Texts, or objects with the text under `text`.",
    "raw": "The prompt goes to the model without a chat template.",
    "add_generation_prompt": "The prompt ends with the beginning of an answer.",
    "continue_final_message": "The answer continues the last message instead of beginning a new one.",
    "add_special_tokens": "The tokenizer adds its special tokens, such as the one of the beginning.",
    "add_special": "With content: the tokenizer adds its special tokens.",
    "with_pieces": "With content: objects with id and piece, which is bytes if the token is no text.",
    "chat_template_kwargs": "More variables of the chat template.",
    # ---- scheduling
    "priority": "Larger is scheduled earlier by some policies; or high, normal, low.",
    "cache_salt": "Only requests with the same salt share cached prefixes.",
    "user": "The tenant that the request is accounted to.",
    "safety_identifier": "The tenant, where `user` is absent.",
    "session_id": "The conversations of one agent have one; the cache counts its turns.",
    "session_params": "SGLang's form: `id` is the session; the prompt is always the whole one.",
    "CloseSessionRequest.session_id": "Of the session's turns.",
    "OpenSessionRequest.session_id": "Of its turns; left out, it is a new one.",
    "OpenSessionRequest.timeout": "Accepted, without effect.",
    "capacity_of_str_len": "Accepted, without effect.",
    "protocol_version": "1.",
    "message_id": "Returned as it is.",
    "actions": "Objects with action_id, action_type (release, demote, retain, pin) and payload; retain and pin take "
    "`ttl_s`.",
    "kv_hints": "Hints for the prompt, or its session: `{protocol_version, message_id, actions}`; the header "
    "x-kv-hints has the results.",
    "prompt_cache_key": "The session, where `session_id` and headers name none.",
    "prompt_cache_retention": "in_memory: the prompt is not written to the disk of --kv-disk; 24h: it may be.",
    "prompt_cache_options": "`ttl` keeps the prompt for 30m or 12h, `mode: explicit` only one with a breakpoint; "
    "`prewarm` computes the prompt only.",
    "diagnostics": "`previous_message_id`: the answer says which part of that message's prompt has changed.",
    "cache_control": "A breakpoint: keeps the prompt for its `ttl`, 5m or 1h.",
    "service_tier": "flex: the request runs on what others leave; the answer reports the tier.",
    "background_options": "`completion_window` 2h or 8h: as `service_tier: flex`, with this time limit.",
    "queue_timeout": "Seconds until it must have started.",
    "timeout": "Seconds until it must have ended.",
    "bootstrap_host": "Of the prefill engine that computes the prompt, for a decode engine; routers add it.",
    "bootstrap_port": "Its `--bootstrap-port`.",
    "bootstrap_room": "The number that both halves of a request have.",
    "kv_transfer_params": "The two halves of a request as vLLM's routers name them.",
    "data_parallel_rank": "The replica that gets it, from 0 to `--dp` less one; without it the server chooses.",
    "metadata": "Returned as it is.",
    "keep_alive": "Accepted, without effect.",
    "options": "Sampling fields by Ollama's names, such as temperature, num_predict, num_ctx and seed.",
    # ---- operations
    "lora_name": "The name by which requests choose the adapter.",
    "LoadAdapterRequest.lora_path": "A folder or GGUF file below --lora-root.",
    "load_inplace": "The name may be taken: running requests keep the old adapter until they end.",
    "pinned": "It is unloaded only with force.",
    "force": "Requests that use the adapter end with an error; otherwise they are waited for.",
    "UnloadAdapterRequest.timeout": "Seconds to wait for requests that use the adapter; after that it stays.",
    "rid": "Accepted with a warning; ids are made by the server.",
    "AbortBody.rid": "Id of a response, or of one of its choices.",
    "PauseRequest.mode": "What becomes of running requests: abort, retract (they queue) or in_place; abort.",
    "abort_all": "End all requests; needs an admin.",
    "ttl": "Seconds to keep the prefix; 0 unpins it.",
    "level": "The lowest severity that is logged.",
    "duration": "Seconds until the profile ends by itself.",
    "rate": "Samples per second.",
}

DEFAULTS: Final[Mapping[str, Any]] = {
    **{
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in msgspec.structs.fields(SamplingParams)
        if field.default not in (None, ())
        and field.name not in ("include_stop_str_in_output", "prompt_logprobs_start")
    },
    "min_tokens": 0,
    "CompletionRequest.max_tokens": DEFAULT_MAX_TOKENS,
    "max_new_tokens": DEFAULT_MAX_NEW_TOKENS,
    **{
        f"{struct}.{name}": value
        for struct in ("InfillRequest", "LlamaCompletionRequest")
        for name, value in {**LLAMA_DEFAULTS.values(), "temperature_last": True}.items()
    },
    "n_predict": -1,
    "n_indent": 0,
    "t_max_predict_ms": 0,
    "return_tokens": False,
    "n": 1,
    "stream": False,
    "OllamaChatRequest.stream": True,
    "OllamaGenerateRequest.stream": True,
    "OllamaPullRequest.stream": True,
    "return_progress": False,
    "embd_normalize": 2,
    "add_special": False,
    "with_pieces": False,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "echo": False,
    "logprob_start_len": -1,
    "incremental": False,
    "store": True,
    "background": False,
    "encoding_format": "float",
    "truncate": False,
    "OllamaEmbedRequest.truncate": True,
    "top_n": 0,
    "return_documents": False,
    "apply_softmax": False,
    "item_first": False,
    "return_logprob": False,
    "ChatRequest.logprobs": False,
    "top_logprobs": 0,
    "top_logprobs_num": 0,
    "no_stop_trim": False,
    "include_stop_str_in_output": False,
    "add_generation_prompt": True,
    "PinRequest.add_generation_prompt": False,
    "continue_final_message": False,
    "complete_json": True,
    "parallel_tool_calls": True,
    "reasoning_control": False,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "raw": False,
    "abort_all": False,
    "load_inplace": False,
    "pinned": False,
    "force": False,
    "UnloadAdapterRequest.timeout": UNLOAD_TIMEOUT_S,
    "priority": 0,
    "duration": DEFAULT_DURATION_S,
    "rate": DEFAULT_RATE_HZ,
}
"""Defaults of the server. Defaults from a model's own files come to `with_notes` as `model_defaults`."""


_ORDER: Final = {key.rpartition(".")[2]: idx for idx, key in enumerate(NOTES)}


def with_notes(schemas: dict[str, Any], model_defaults: Mapping[str, Any]) -> None:
    """Add the descriptions and defaults to the schemas of requests, in place, and order their fields by subject.

    Args:
        schemas: by the name of the struct.
        model_defaults: sampling fields for which the server takes another default, by name.
    """
    for struct, schema in schemas.items():
        properties = schema.get("properties", {})
        schema["properties"] = {name: properties[name] for name in sorted(properties, key=_ORDER.__getitem__)}
        for name, field in properties.items():
            note = NOTES.get(f"{struct}.{name}", NOTES.get(name))
            if note is not None and not any(
                "description" in each for each in (field, *field.get("anyOf", ()))
            ):
                field["description"] = note
            default = DEFAULTS.get(f"{struct}.{name}", model_defaults.get(name, DEFAULTS.get(name)))
            if default is not None and field.get("default", ...) is None:
                field["default"] = default


_QUESTION: Final = [{"role": "user", "content": "Why is the sky blue?"}]
_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_RERANK: Final = {
    "query": "Why is the sky blue?",
    "documents": ["Air scatters blue light more than red light.", "Grass is green."],
    "top_n": 1,
}
_SCORE: Final = {"text_1": "Why is the sky blue?", "text_2": ["Air scatters blue light.", "Grass is green."]}

BODIES: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = {
    ("POST", "/v1/chat/completions"): {"messages": _QUESTION, "max_tokens": 100, "stream": True},
    ("POST", "/v1/completions"): {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    ("POST", "/v1/chat/completions/control"): {"id": "chatcmpl-1", "action": "reasoning_end"},
    ("POST", "/v1/chat/completions/render"): {"messages": _QUESTION},
    ("POST", "/v1/completions/render"): {"prompt": "The capital of France is"},
    ("POST", "/v1/embeddings"): {"input": ["The sky is blue.", "Grass is green."]},
    ("POST", "/v1/rerank"): _RERANK,
    ("POST", "/rerank"): _RERANK,
    ("POST", "/v2/rerank"): _RERANK,
    ("POST", "/v1/score"): _SCORE,
    ("POST", "/score"): _SCORE,
    ("POST", "/classify"): {"input": ["What a good film.", "It was a waste of time."]},
    ("POST", "/pooling"): {"input": ["The sky is blue.", "Grass is green."]},
    ("POST", "/v1/decisions"): {
        "input": "The parcel came broken. I want my money back.",
        "questions": [
            {"type": "predicate", "instructions": "The customer asks for a refund."},
            {
                "type": "choice",
                "instructions": "Who answers?",
                "choices": [{"value": "sales"}, {"value": "support"}],
            },
        ],
    },
    ("POST", "/v1/systemone"): {
        "state": "The parcel came broken. I want my money back.",
        "questions": {"refund": {"type": "noul", "instructions": "The customer asks for a refund."}},
    },
    ("POST", "/v1/responses"): {"input": "Why is the sky blue?", "max_output_tokens": 100},
    ("POST", "/v1/responses/input_tokens"): {"input": "Why is the sky blue?"},
    ("POST", "/v1/messages"): {"messages": _QUESTION, "max_tokens": 100},
    ("POST", "/v1/messages/count_tokens"): {"messages": _QUESTION},
    ("POST", "/generate"): {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
    },
    ("POST", "/infill"): {
        "input_prefix": "def add(a, b):\n",
        "input_suffix": "\n",
        "prompt": "    return",
        "n_predict": 8,
    },
    ("POST", "/completion"): {"prompt": "The capital of France is", "n_predict": 8},
    ("POST", "/apply-template"): {"messages": _QUESTION},
    ("POST", "/embedding"): {"content": "The sky is blue."},
    ("POST", "/v1/files"): {"file": "@requests.jsonl", "purpose": "batch"},
    ("POST", "/v1/batches"): {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
    ("POST", "/v1/messages/batches"): {
        "requests": [{"custom_id": "a", "params": {"messages": _QUESTION, "max_tokens": 64}}]
    },
    ("POST", "/tokenize"): {"prompt": "Hello"},
    ("POST", "/detokenize"): {"tokens": [1, 2, 3]},
    ("POST", "/v1/cache/pins"): {"prompt": "A long prefix of many prompts", "ttl": 600},
    ("POST", "/open_session"): {"capacity_of_str_len": 4096},
    ("POST", "/close_session"): {"session_id": "3f2a"},
    ("POST", "/v1/kv_hints"): {
        "protocol_version": 1,
        "session_id": "3f2a",
        "actions": [{"action_id": "a1", "action_type": "retain", "payload": {"ttl_s": 600}}],
    },
    ("POST", "/v1/grammar/check"): {
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    },
    ("POST", "/abort_request"): {"rid": "chatcmpl-1"},
    ("POST", "/pause_generation"): {"mode": "retract"},
    ("PUT", "/log_level"): {"level": "debug"},
    ("POST", "/start_profile"): {"duration": 10},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "sql", "lora_path": "sql"},
    ("POST", "/load_lora_adapter"): {"lora_name": "sql", "lora_path": "sql"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "sql"},
    ("POST", "/unload_lora_adapter"): {"lora_name": "sql"},
    ("POST", "/api/chat"): {"messages": _QUESTION},
    ("POST", "/api/generate"): {"prompt": "The capital of France is", "options": {"num_predict": 8}},
    ("POST", "/api/show"): {},
    ("POST", "/api/pull"): {},
    ("POST", "/api/embed"): {"input": "The sky is blue."},
    ("POST", "/api/embeddings"): {"prompt": "The sky is blue."},
}

OF_EMBEDDERS: Final = frozenset(
    path for _, path in BODIES if "embed" in path or path.endswith(("/rerank", "/score", "/pooling"))
)
"""Paths with examples for embedders; those of pairs are also for rerankers."""

OF_CLASSIFIERS: Final = frozenset({"/classify"})
"""Paths with examples for models that give texts labels."""

OF_CODERS: Final = frozenset({"/infill"})
"""Paths with examples for models that fill in the middle."""

OF_ADAPTERS: Final = frozenset(path for _, path in BODIES if path.endswith("load_lora_adapter"))
"""Paths with examples for servers that load adapters, from a folder with one of this name."""

PATH_PARTS: Final[Mapping[str, str]] = {
    "slot": "0",
    "id": "chatcmpl-1",
    "response_id": "resp_1",
    "file_id": "file-1",
    "batch_id": "batch_1",
    "message_batch_id": "msgbatch_1",
}
"""Examples of what stands in a path; `{model}` is the served model."""
