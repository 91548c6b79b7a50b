"""An example request for each endpoint with a body, by method and path; `/openapi.json` and `/docs` have them.

Each is accepted by a server with any model that has a chat template; the tests send them.
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

BODIES: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = {
    ("POST", "/v1/chat/completions"): {"messages": _QUESTION, "max_tokens": 100, "stream": True},
    ("POST", "/v1/completions"): {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
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
    ("POST", "/api/chat"): {"messages": _QUESTION},
    ("POST", "/api/generate"): {"prompt": "The capital of France is", "options": {"num_predict": 8}},
    ("POST", "/api/show"): {},
}

PATH_PARTS: Final[Mapping[str, str]] = {"id": "chatcmpl-1"}
"""Examples of what stands in a path; `{model}` is the served model."""
