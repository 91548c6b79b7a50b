"""The route table: every path with its bodies and its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec

from ..telemetry.metrics import BuildInfo
from .anthropic.endpoint import count_tokens, messages
from .anthropic.wire import CountBody, CountTokensRequest, MessageBody, MessageEvent, MessagesRequest
from .endpoints import diagnosis, operations, tokenizing, worker
from .endpoints.adapters import (
    AdaptersBody,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_adapter,
    unload_adapter,
)
from .endpoints.cache_pins import pin_prefix
from .endpoints.grammar_check import GrammarCheckBody, GrammarCheckRequest, check_grammar
from .endpoints.wire import (
    AbortBody,
    AbortedBody,
    DetokenizeRequest,
    FlushedBody,
    HealthBody,
    LiveRequestsBody,
    LogLevelBody,
    ModelBody,
    ModelsBody,
    PinnedBody,
    PinRequest,
    ProfileBody,
    ProfileStartedBody,
    ServerInfoBody,
    TextBody,
    TokenizeRequest,
    TokensBody,
    WhyBody,
)
from .exchange import Exchange
from .native.convert import generate
from .native.wire import GenerateBody, NativeRequest
from .ollama import models as ollama_models
from .ollama.embed import (
    OllamaEmbedBody,
    OllamaEmbedRequest,
    OllamaOldEmbedBody,
    OllamaOldEmbedRequest,
    ollama_embed,
    ollama_embeddings,
)
from .ollama.endpoint import ollama_chat, ollama_generate
from .ollama.wire import (
    OllamaChatBody,
    OllamaChatRequest,
    OllamaGenerateBody,
    OllamaGenerateRequest,
    OllamaShowRequest,
    RunningBody,
    ShowBody,
    TagsBody,
    VersionBody,
)
from .openai import rendering
from .openai.chat import chat_completions
from .openai.completions import completions
from .openai.wire import ChatChunk, ChatCompletion, ChatRequest, Completion, CompletionRequest, RenderedBody
from .pooling.embeddings import embeddings
from .pooling.rerank import rerank
from .pooling.score import score
from .pooling.wire import (
    EmbeddingsBody,
    EmbeddingsRequest,
    RerankBody,
    RerankRequest,
    ScoreBody,
    ScoreRequest,
)
from .responses.endpoint import response_input_tokens, responses
from .responses.wire import InputTokensBody, ResponseBody, ResponseEvent, ResponsesRequest
from .services import Services

Handler = Callable[[Exchange, Services], Awaitable[None]]


class Route(NamedTuple):
    """One method of one path; `{...}` matches any text at its place.

    Attributes:
        request: the type of the body; None for no body.
        admin: it affects all requests, and needs an admin.
        answer: the type of a successful JSON response; None for another media type.
        events: the type of the JSON of each event, if it can stream.
        stream_type: media type of the stream.
        media_type: of a successful response.
        fails: statuses of failures beyond those of every route, or of every route with a body.
        bodiless: the body may be left out.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    request: type[msgspec.Struct] | None = None
    admin: bool = False
    answer: Any = None
    events: type[msgspec.Struct] | None = None
    stream_type: str = "text/event-stream"
    media_type: str = "application/json"
    fails: tuple[int, ...] = ()
    bodiless: bool = False


_GENERATING: Final = (404, 504)
_NDJSON: Final = "application/x-ndjson"
_OTHER_MODELS: Final = "this server serves one model, which is chosen when it starts"


def _unavailable(method: str, path: str, why: str) -> Route:
    """A route of Ollama's that answers 501."""
    return Route(method, path, ollama_models.unavailable(path, why), f"Not available: {why}.", fails=(501,))


ROUTES: Final = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "Answer a chat (OpenAI).",
        ChatRequest,
        answer=ChatCompletion,
        events=ChatChunk,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        "Continue prompts (OpenAI).",
        CompletionRequest,
        answer=Completion,
        events=Completion,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/chat/completions/render",
        rendering.render_chat,
        "The prompt of a chat as token ids; nothing is generated.",
        ChatRequest,
        answer=RenderedBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/completions/render",
        rendering.render_completions,
        "The prompts of completions as token ids; nothing is generated.",
        CompletionRequest,
        answer=list[RenderedBody],
        fails=(404,),
    ),
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        "Vectors of texts (OpenAI).",
        EmbeddingsRequest,
        answer=EmbeddingsBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/rerank",
        rerank,
        "Documents by relevance to a query (Jina, Cohere).",
        RerankRequest,
        answer=RerankBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/rerank",
        rerank,
        "Documents by relevance to a query (Jina, Cohere).",
        RerankRequest,
        answer=RerankBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v2/rerank",
        rerank,
        "Documents by relevance to a query (Jina, Cohere).",
        RerankRequest,
        answer=RerankBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/score",
        score,
        "Scores of pairs of texts, or of labels as the next token.",
        ScoreRequest,
        answer=ScoreBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/score",
        score,
        "Scores of pairs of texts, or of labels as the next token.",
        ScoreRequest,
        answer=ScoreBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/responses",
        responses,
        "Answer a chat (OpenAI's Responses).",
        ResponsesRequest,
        answer=ResponseBody,
        events=ResponseEvent,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        response_input_tokens,
        "The tokens of a response's prompt.",
        ResponsesRequest,
        answer=InputTokensBody,
        fails=(404,),
    ),
    Route(
        "POST",
        "/v1/messages",
        messages,
        "Answer a chat (Anthropic).",
        MessagesRequest,
        answer=MessageBody,
        events=MessageEvent,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "The tokens of a message's prompt.",
        CountTokensRequest,
        answer=CountBody,
        fails=(404,),
    ),
    Route("GET", operations.MODELS_PATH, operations.models, "The served model (OpenAI).", answer=ModelsBody),
    Route(
        "GET",
        f"{operations.MODELS_PATH}/{{model}}",
        operations.model,
        "One model by name (OpenAI).",
        answer=ModelBody,
        fails=(404,),
    ),
    Route(
        "POST",
        "/generate",
        generate,
        "Generate from texts or token ids.",
        NativeRequest,
        answer=GenerateBody | list[GenerateBody],
        events=GenerateBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/tokenize",
        tokenizing.tokenize,
        "Token ids of a text or a chat.",
        TokenizeRequest,
        answer=TokensBody,
        fails=(404,),
    ),
    Route(
        "POST",
        "/detokenize",
        tokenizing.detokenize,
        "Text of token ids.",
        DetokenizeRequest,
        answer=TextBody,
        fails=(404,),
    ),
    Route(
        "GET",
        operations.REQUESTS_PATH,
        operations.live_requests,
        "The live requests, in numbers.",
        admin=True,
        answer=LiveRequestsBody,
    ),
    Route(
        "GET",
        f"{operations.REQUESTS_PATH}/{{id}}/why",
        operations.why,
        "Why a request waited, was retracted or missed the cache.",
        answer=WhyBody,
        fails=(404,),
    ),
    Route(
        "POST",
        "/v1/cache/pins",
        pin_prefix,
        "Keep a cached prefix for a time, or unpin it.",
        PinRequest,
        answer=PinnedBody,
        fails=(404,),
    ),
    Route(
        "POST",
        "/v1/grammar/check",
        check_grammar,
        "What is enforced of a JSON Schema or another constraint.",
        GrammarCheckRequest,
        answer=GrammarCheckBody,
        fails=(404,),
    ),
    Route(
        "POST",
        "/abort_request",
        operations.abort_request,
        "End running requests.",
        AbortBody,
        answer=AbortedBody,
    ),
    Route(
        "POST",
        "/flush_cache",
        operations.flush_cache,
        "Empty the prefix cache.",
        admin=True,
        answer=FlushedBody,
    ),
    Route(
        "GET",
        "/flush_cache",
        operations.old_flush_cache,
        "As POST, as older routers ask.",
        admin=True,
        answer=FlushedBody,
    ),
    Route(
        "GET",
        diagnosis.LOG_LEVEL_PATH,
        diagnosis.log_level,
        "The lowest severity that is logged.",
        admin=True,
        answer=LogLevelBody,
    ),
    Route(
        "PUT",
        diagnosis.LOG_LEVEL_PATH,
        diagnosis.set_log_level,
        "Log more or less, in all processes.",
        diagnosis.LogLevelRequest,
        admin=True,
        answer=LogLevelBody,
    ),
    Route(
        "POST",
        "/start_profile",
        diagnosis.start_profile,
        "Profile every process.",
        diagnosis.ProfileRequest,
        admin=True,
        answer=ProfileStartedBody,
        fails=(409,),
        bodiless=True,
    ),
    Route(
        "POST",
        "/stop_profile",
        diagnosis.stop_profile,
        "End the profile early.",
        admin=True,
        answer=ProfileBody,
        fails=(409,),
    ),
    Route(
        "GET",
        "/health",
        operations.health,
        "Whether requests are expected to work; needs no key.",
        answer=HealthBody,
    ),
    Route(
        "GET",
        "/ping",
        operations.ping,
        "As /health, under the name that SageMaker asks for; needs no key.",
        answer=HealthBody,
    ),
    Route("GET", "/version", operations.version, "The version that runs.", answer=BuildInfo),
    Route(
        "GET",
        "/health_generate",
        operations.health_generate,
        "Whether a token can be generated.",
        answer=HealthBody,
    ),
    Route(
        "GET",
        "/server_info",
        operations.server_info,
        "Settings, capacity and state.",
        answer=ServerInfoBody,
    ),
    Route(
        "GET",
        "/get_server_info",
        operations.old_server_info,
        "As /server_info, under the name that older routers ask for.",
        answer=ServerInfoBody,
    ),
    Route(
        "GET",
        "/model_info",
        worker.model_info,
        "The model and the folder of its tokenizer, for routers.",
        answer=worker.ModelInfoBody,
    ),
    Route(
        "GET",
        "/get_model_info",
        worker.old_model_info,
        "As /model_info, under the name that older routers ask for.",
        answer=worker.ModelInfoBody,
    ),
    Route(
        "GET",
        "/v1/loads",
        worker.loads,
        "Running and waiting requests and tokens, for routers.",
        answer=worker.LoadsBody,
    ),
    Route("GET", "/loads", worker.short_loads, "As /v1/loads.", answer=worker.LoadsBody),
    Route(
        "GET",
        "/get_load",
        worker.old_load,
        "The load, for older routers.",
        answer=list[worker.OldLoadBody],
    ),
    Route(
        "POST",
        "/api/chat",
        ollama_chat,
        "Answer a chat (Ollama).",
        OllamaChatRequest,
        answer=OllamaChatBody,
        events=OllamaChatBody,
        stream_type=_NDJSON,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama_generate,
        "Answer a prompt (Ollama).",
        OllamaGenerateRequest,
        answer=OllamaGenerateBody,
        events=OllamaGenerateBody,
        stream_type=_NDJSON,
        fails=_GENERATING,
    ),
    Route("GET", "/api/tags", ollama_models.tags, "The served model (Ollama).", answer=TagsBody),
    Route("GET", "/api/ps", ollama_models.running, "The loaded model (Ollama).", answer=RunningBody),
    Route(
        "POST",
        "/api/show",
        ollama_models.show,
        "Facts about the model (Ollama).",
        OllamaShowRequest,
        answer=ShowBody,
        fails=(404,),
    ),
    Route("GET", "/api/version", ollama_models.ollama_version, "The version (Ollama).", answer=VersionBody),
    Route("GET", "/", ollama_models.greeting, "Whether a server is there.", media_type="text/plain"),
    _unavailable("POST", "/api/pull", _OTHER_MODELS),
    _unavailable("POST", "/api/push", _OTHER_MODELS),
    _unavailable("POST", "/api/create", _OTHER_MODELS),
    _unavailable("POST", "/api/copy", _OTHER_MODELS),
    _unavailable("DELETE", "/api/delete", _OTHER_MODELS),
    Route(
        "POST",
        "/api/embed",
        ollama_embed,
        "Vectors of texts (Ollama).",
        OllamaEmbedRequest,
        answer=OllamaEmbedBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/api/embeddings",
        ollama_embeddings,
        "The vector of a text (Ollama, older form).",
        OllamaOldEmbedRequest,
        answer=OllamaOldEmbedBody,
        fails=_GENERATING,
    ),
    Route(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        "Load a LoRA adapter.",
        LoadAdapterRequest,
        admin=True,
        answer=AdaptersBody,
        fails=(409,),
    ),
    Route(
        "POST",
        "/load_lora_adapter",
        load_adapter,
        "Load a LoRA adapter.",
        LoadAdapterRequest,
        admin=True,
        answer=AdaptersBody,
        fails=(409,),
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        "Unload a LoRA adapter.",
        UnloadAdapterRequest,
        admin=True,
        answer=AdaptersBody,
        fails=(404, 409),
    ),
    Route(
        "POST",
        "/unload_lora_adapter",
        unload_adapter,
        "Unload a LoRA adapter.",
        UnloadAdapterRequest,
        admin=True,
        answer=AdaptersBody,
        fails=(404, 409),
    ),
    Route("GET", "/metrics", operations.metrics, "Prometheus metrics.", media_type="text/plain"),
)
