"""The route table: every path, what it takes, and who handles it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec

from . import operations, tokenizing
from .cache_pins import pin_prefix
from .exchange import Exchange
from .native import generate
from .openai_chat import chat_completions
from .openai_completions import completions
from .protocol import (
    AbortBody,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NativeRequest,
    PinRequest,
    TokenizeRequest,
)
from .services import Services

Handler = Callable[[Exchange, Services], Awaitable[None]]


class Route(NamedTuple):
    """One method of one path; `{...}` stands for whatever lies between what is before and behind it. What
    concerns everybody's requests is the admin's.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[msgspec.Struct] | None = None
    admin: bool = False


ROUTES: Final = (
    Route("POST", "/v1/chat/completions", chat_completions, "Answer a chat (OpenAI).", ChatRequest),
    Route("POST", "/v1/completions", completions, "Continue prompts (OpenAI).", CompletionRequest),
    Route("GET", operations.MODELS_PATH, operations.models, "The served model (OpenAI)."),
    Route("GET", f"{operations.MODELS_PATH}/{{model}}", operations.model, "One model by name (OpenAI)."),
    Route("POST", "/generate", generate, "Generate from texts or token ids.", NativeRequest),
    Route("POST", "/tokenize", tokenizing.tokenize, "Token ids of a text or a chat.", TokenizeRequest),
    Route("POST", "/detokenize", tokenizing.detokenize, "Text of token ids.", DetokenizeRequest),
    Route(
        "GET",
        operations.REQUESTS_PATH,
        operations.live_requests,
        "The live requests, in figures.",
        admin=True,
    ),
    Route("GET", f"{operations.REQUESTS_PATH}/{{id}}/why", operations.why, "Why a request fared as it did."),
    Route("POST", "/v1/cache/pins", pin_prefix, "Keep a cached prefix for a time, or let it go.", PinRequest),
    Route("POST", "/abort_request", operations.abort_request, "End running requests.", AbortBody),
    Route("POST", "/flush_cache", operations.flush_cache, "Empty the prefix cache.", admin=True),
    Route("GET", "/health", operations.health, "Whether requests can be expected to work; needs no key."),
    Route("GET", "/health_generate", operations.health_generate, "Whether a token can be generated."),
    Route("GET", "/server_info", operations.server_info, "Settings, capacity and state."),
    Route("GET", "/metrics", operations.metrics, "Prometheus metrics."),
)
