"""An example request for each endpoint with a body, by method and path; `/openapi.json` and `/docs` have them.

Each is accepted by a server with any model that has a chat template, or (`OF_EMBEDDERS`) with any embedder, or
(`OF_ADAPTERS`) with a folder of adapters; the tests send them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
    ("POST", "/v1/chat/completions/render"): {"messages": _QUESTION},
    ("POST", "/v1/completions/render"): {"prompt": "The capital of France is"},
    ("POST", "/v1/embeddings"): {"input": ["The sky is blue.", "Grass is green."]},
    ("POST", "/v1/rerank"): _RERANK,
    ("POST", "/rerank"): _RERANK,
    ("POST", "/v2/rerank"): _RERANK,
    ("POST", "/v1/score"): _SCORE,
    ("POST", "/score"): _SCORE,
    ("POST", "/v1/responses"): {"input": "Why is the sky blue?", "max_output_tokens": 100},
    ("POST", "/v1/responses/input_tokens"): {"input": "Why is the sky blue?"},
    ("POST", "/v1/messages"): {"messages": _QUESTION, "max_tokens": 100},
    ("POST", "/v1/messages/count_tokens"): {"messages": _QUESTION},
    ("POST", "/generate"): {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
    },
    ("POST", "/tokenize"): {"prompt": "Hello"},
    ("POST", "/detokenize"): {"tokens": [1, 2, 3]},
    ("POST", "/v1/cache/pins"): {"prompt": "A long prefix of many prompts", "ttl": 600},
    ("POST", "/v1/grammar/check"): {
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
    },
    ("POST", "/abort_request"): {"rid": "chatcmpl-1"},
    ("PUT", "/log_level"): {"level": "debug"},
    ("POST", "/start_profile"): {"duration": 10},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "sql", "lora_path": "sql"},
    ("POST", "/load_lora_adapter"): {"lora_name": "sql", "lora_path": "sql"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "sql"},
    ("POST", "/unload_lora_adapter"): {"lora_name": "sql"},
    ("POST", "/api/chat"): {"messages": _QUESTION},
    ("POST", "/api/generate"): {"prompt": "The capital of France is", "options": {"num_predict": 8}},
    ("POST", "/api/show"): {},
    ("POST", "/api/embed"): {"input": "The sky is blue."},
    ("POST", "/api/embeddings"): {"prompt": "The sky is blue."},
}

OF_EMBEDDERS: Final = frozenset(
    path for _, path in BODIES if "embed" in path or path.endswith(("/rerank", "/score"))
)
"""Paths with examples for embedders; those of pairs are also for rerankers."""

OF_ADAPTERS: Final = frozenset(path for _, path in BODIES if path.endswith("load_lora_adapter"))
"""Paths with examples for servers that load adapters, from a folder with one of this name."""

PATH_PARTS: Final[Mapping[str, str]] = {"id": "chatcmpl-1"}
"""Examples of what stands in a path; `{model}` is the served model."""
