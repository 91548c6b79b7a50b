"""The route table: every path with its bodies and its handler."""

from __future__ import annotations

from typing import Any, Final

from ..telemetry.metrics import BuildInfo
from .anthropic.endpoint import count_tokens, messages
from .anthropic.wire import CountBody, CountTokensRequest, MessageBody, MessageEvent, MessagesRequest
from .batch_runner.wire import BatchBody, BatchListBody, BatchRequest
from .batches.batches import BATCHES_PATH, cancel_batch, create_batch, get_batch, list_batches
from .batches.files import (
    FILES_PATH,
    FileBody,
    FileDeletedBody,
    FileForm,
    FileListBody,
    delete_file,
    file_content,
    get_file,
    list_files,
    upload_file,
)
from .batches.message_batches import (
    MESSAGE_BATCHES_PATH,
    MessageBatchBody,
    MessageBatchDeletedBody,
    MessageBatchListBody,
    MessageBatchRequest,
    cancel_message_batch,
    create_message_batch,
    delete_message_batch,
    get_message_batch,
    list_message_batches,
    message_batch_results,
)
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
from .endpoints.pauses import (
    IsPausedBody,
    PauseBody,
    PauseRequest,
    PauseStatusBody,
    continue_generation,
    is_paused,
    pause,
    pause_generation,
    resume,
)
from .endpoints.sessions import (
    CloseSessionRequest,
    HintsRequest,
    OpenSessionRequest,
    SessionsBody,
    close_session,
    kv_hints,
    open_session,
    sessions,
)
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
    WorldSizeBody,
)
from .native import llama_facts
from .native.convert import generate
from .native.llama_server import infill, llama_completion
from .native.llama_wire import (
    AppliedTemplateBody,
    InfillRequest,
    LlamaBody,
    LlamaCompletionRequest,
    LlamaEmbedding,
    LlamaEmbeddingRequest,
    LoraBody,
    PropsBody,
    SlotBody,
)
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
    OllamaPullRequest,
    OllamaShowRequest,
    PullBody,
    RunningBody,
    ShowBody,
    TagsBody,
    VersionBody,
)
from .openai import rendering
from .openai.chat import chat_completions
from .openai.completions import completions
from .openai.control import ControlBody, ControlRequest, control
from .openai.wire import ChatChunk, ChatCompletion, ChatRequest, Completion, CompletionRequest, RenderedBody
from .pooling.classify import classify, pooled
from .pooling.decisions import decisions, system_one
from .pooling.decisions_wire import DecisionsBody, DecisionsRequest, SystemOneBody, SystemOneRequest
from .pooling.embeddings import embeddings
from .pooling.rerank import rerank
from .pooling.score import score
from .pooling.wire import (
    ClassificationsBody,
    ClassifyRequest,
    EmbeddingsBody,
    EmbeddingsRequest,
    PooledBody,
    PoolingRequest,
    RerankBody,
    RerankRequest,
    ScoreBody,
    ScoreRequest,
)
from .responses import stored
from .responses.endpoint import response_input_tokens, responses
from .responses.wire import (
    DeletedBody,
    InputTokensBody,
    ItemsBody,
    ResponseBody,
    ResponseEvent,
    ResponsesRequest,
)
from .route import Route, answering, get, post
from .schema.kv_hints import HintResult, HintsBody

_STORED: Final = (404, 507)
_NDJSON: Final = "application/x-ndjson"
_PAGED: Final = ("after", "limit", "order")
_FORM: Final = "multipart/form-data"


def _unavailable(
    method: str, *paths: str, why: str = ollama_models.OTHER_MODELS, api: str = "ollama", **more: Any
) -> list[Route]:
    """Routes of another server that answer 501."""
    handlers = [ollama_models.unavailable(path, why, api) for path in paths]
    return [
        Route(method, path, handler, f"Not available: {why}.", fails=(501,), **more)
        for path, handler in zip(paths, handlers, strict=True)
    ]


ROUTES: Final = (
    *answering(
        "/v1/chat/completions",
        chat_completions,
        "Answer a chat (OpenAI).",
        ChatRequest,
        ChatCompletion,
        ChatChunk,
    ),
    *answering(
        "/v1/completions",
        completions,
        "Continue prompts (OpenAI).",
        CompletionRequest,
        Completion,
        Completion,
    ),
    *post(
        "/v1/chat/completions/control",
        control,
        "End the reasoning of an answer that is generated (llama-server).",
        ControlRequest,
        ControlBody,
        fails=(404,),
    ),
    *answering(
        "/v1/chat/completions/render",
        rendering.render_chat,
        "The prompt of a chat as token ids; nothing is generated.",
        ChatRequest,
        RenderedBody,
    ),
    *post(
        "/v1/completions/render",
        rendering.render_completions,
        "The prompts of completions as token ids; nothing is generated.",
        CompletionRequest,
        list[RenderedBody],
        fails=(404,),
    ),
    *answering("/v1/embeddings", embeddings, "Vectors of texts (OpenAI).", EmbeddingsRequest, EmbeddingsBody),
    *answering(
        "/v1/rerank /rerank /v2/rerank",
        rerank,
        "Documents by relevance to a query (Jina, Cohere).",
        RerankRequest,
        RerankBody,
    ),
    *answering(
        "/v1/score /score",
        score,
        "Scores of pairs of texts, or of labels as the next token.",
        ScoreRequest,
        ScoreBody,
    ),
    *answering("/classify", classify, "The labels of texts (vLLM).", ClassifyRequest, ClassificationsBody),
    *answering("/pooling", pooled, "Vectors or scores of texts (vLLM).", PoolingRequest, PooledBody),
    *answering(
        "/v1/decisions",
        decisions,
        "Answer typed questions about an input (OpenAI's Decisions).",
        DecisionsRequest,
        DecisionsBody,
    ),
    *answering(
        "/v1/systemone",
        system_one,
        "Answer typed questions about a state (System One).",
        SystemOneRequest,
        SystemOneBody,
    ),
    *answering(
        "/v1/responses",
        responses,
        "Answer a chat (OpenAI's Responses).",
        ResponsesRequest,
        ResponseBody,
        ResponseEvent,
    ),
    *post(
        "/v1/responses/input_tokens",
        response_input_tokens,
        "The tokens of a response's prompt.",
        ResponsesRequest,
        InputTokensBody,
        fails=(404,),
    ),
    *get(
        "/v1/responses/{response_id}/input_items",
        stored.list_input_items,
        "The items that a stored response was made from.",
        ItemsBody,
        fails=(404,),
        query=_PAGED,
    ),
    *post(
        "/v1/responses/{response_id}/cancel",
        stored.cancel_response,
        "End a response in the background.",
        None,
        ResponseBody,
        fails=(404,),
    ),
    *get(
        "/v1/responses/{response_id}",
        stored.get_response,
        "A stored response, or the events of one in the background.",
        ResponseBody,
        events=ResponseEvent,
        fails=(404,),
        query=("stream", "starting_after"),
    ),
    Route(
        "DELETE",
        "/v1/responses/{response_id}",
        stored.delete_response,
        "Delete a stored response.",
        answer=DeletedBody,
        fails=(404, 409),
    ),
    *answering(
        "/v1/messages", messages, "Answer a chat (Anthropic).", MessagesRequest, MessageBody, MessageEvent
    ),
    *post(
        "/v1/messages/count_tokens",
        count_tokens,
        "The tokens of a message's prompt.",
        CountTokensRequest,
        CountBody,
        fails=(404,),
    ),
    *post(
        MESSAGE_BATCHES_PATH,
        create_message_batch,
        "Answer many messages in the background (Anthropic).",
        MessageBatchRequest,
        MessageBatchBody,
        fails=_STORED,
    ),
    *get(
        MESSAGE_BATCHES_PATH,
        list_message_batches,
        "The message batches (Anthropic).",
        MessageBatchListBody,
        fails=_STORED,
        query=("before_id", "after_id", "limit"),
    ),
    *post(
        f"{MESSAGE_BATCHES_PATH}/{{message_batch_id}}/cancel",
        cancel_message_batch,
        "End a message batch (Anthropic).",
        None,
        MessageBatchBody,
        fails=_STORED,
    ),
    Route(
        "GET",
        f"{MESSAGE_BATCHES_PATH}/{{message_batch_id}}/results",
        message_batch_results,
        "The results of a message batch, one on each line (Anthropic).",
        fails=_STORED,
        media_type="application/x-jsonl",
    ),
    *get(
        f"{MESSAGE_BATCHES_PATH}/{{message_batch_id}}",
        get_message_batch,
        "A message batch (Anthropic).",
        MessageBatchBody,
        fails=_STORED,
    ),
    Route(
        "DELETE",
        f"{MESSAGE_BATCHES_PATH}/{{message_batch_id}}",
        delete_message_batch,
        "Delete a message batch that has ended (Anthropic).",
        None,
        MessageBatchDeletedBody,
        fails=_STORED,
    ),
    *post(
        FILES_PATH,
        upload_file,
        "Store the input of a batch (OpenAI).",
        FileForm,
        FileBody,
        fails=(404, 507),
        request_type=_FORM,
    ),
    *get(
        FILES_PATH,
        list_files,
        "The stored files (OpenAI).",
        FileListBody,
        fails=_STORED,
        query=(*_PAGED, "purpose"),
    ),
    *get(
        f"{FILES_PATH}/{{file_id}}/content",
        file_content,
        "The bytes of a file (OpenAI).",
        media_type="application/octet-stream",
        fails=_STORED,
    ),
    *get(f"{FILES_PATH}/{{file_id}}", get_file, "A stored file (OpenAI).", FileBody, fails=_STORED),
    Route(
        "DELETE",
        f"{FILES_PATH}/{{file_id}}",
        delete_file,
        "Delete a file (OpenAI).",
        None,
        FileDeletedBody,
        fails=(404, 409, 507),
    ),
    *post(
        BATCHES_PATH,
        create_batch,
        "Answer the requests of a file (OpenAI).",
        BatchRequest,
        BatchBody,
        fails=_STORED,
    ),
    *get(
        BATCHES_PATH,
        list_batches,
        "The batches (OpenAI).",
        BatchListBody,
        fails=_STORED,
        query=("after", "limit"),
    ),
    *post(
        f"{BATCHES_PATH}/{{batch_id}}/cancel",
        cancel_batch,
        "End a batch (OpenAI).",
        None,
        BatchBody,
        fails=(404, 409, 507),
    ),
    *get(f"{BATCHES_PATH}/{{batch_id}}", get_batch, "A batch (OpenAI).", BatchBody, fails=_STORED),
    *get(operations.MODELS_PATH, operations.models, "The served model (OpenAI).", ModelsBody),
    *get(
        f"{operations.MODELS_PATH}/{{model}}",
        operations.model,
        "One model by name (OpenAI).",
        ModelBody,
        fails=(404,),
    ),
    *answering(
        "/generate",
        generate,
        "Generate from texts or token ids.",
        NativeRequest,
        GenerateBody | list[GenerateBody],
        GenerateBody,
    ),
    *answering(
        "/infill",
        infill,
        "Write the text between two others (llama-server).",
        InfillRequest,
        LlamaBody,
        LlamaBody,
    ),
    *answering(
        "/completion",
        llama_completion,
        "Continue a prompt (llama-server).",
        LlamaCompletionRequest,
        LlamaBody,
        LlamaBody,
    ),
    *get("/props", llama_facts.props, "The model and the settings (llama-server).", PropsBody),
    *get(
        "/slots",
        llama_facts.slots,
        "The running requests, in numbers (llama-server).",
        list[SlotBody],
        query=("fail_on_no_slot",),
    ),
    *_unavailable(
        "POST", "/slots/{slot}", why=llama_facts.NO_SLOT_FILES, api="llama_server", query=("action",)
    ),
    *get("/lora-adapters", llama_facts.lora_adapters, "The LoRA adapters (llama-server).", list[LoraBody]),
    *post(
        "/apply-template",
        llama_facts.apply_template,
        "The prompt of a chat (llama-server).",
        ChatRequest,
        AppliedTemplateBody,
        fails=(404,),
    ),
    *answering(
        "/embedding",
        llama_facts.embedding,
        "Vectors of texts (llama-server).",
        LlamaEmbeddingRequest,
        list[LlamaEmbedding],
    ),
    *post(
        "/tokenize",
        tokenizing.tokenize,
        "Token ids of a text or a chat.",
        TokenizeRequest,
        TokensBody,
        fails=(404,),
    ),
    *post(
        "/detokenize", tokenizing.detokenize, "Text of token ids.", DetokenizeRequest, TextBody, fails=(404,)
    ),
    *get(
        operations.REQUESTS_PATH,
        operations.live_requests,
        "The live requests, in numbers.",
        LiveRequestsBody,
        admin=True,
    ),
    *get(
        f"{operations.REQUESTS_PATH}/{{id}}/why",
        operations.why,
        "Why a request waited, was retracted or missed the cache.",
        WhyBody,
        fails=(404,),
    ),
    *post(
        "/v1/cache/pins",
        pin_prefix,
        "Keep a cached prefix for a time, or unpin it.",
        PinRequest,
        PinnedBody,
        fails=(404,),
    ),
    *get("/v1/sessions", sessions, "The sessions with the latest turns.", SessionsBody, admin=True),
    *post(
        "/open_session",
        open_session,
        "Keep a session before its first turn; the answer is its id.",
        OpenSessionRequest,
        str,
    ),
    *post(
        "/close_session",
        close_session,
        "End a session: what only its conversations have cached is evicted first.",
        CloseSessionRequest,
        HintResult,
    ),
    *post(
        "/v1/kv_hints",
        kv_hints,
        "Release, demote, retain or pin what the conversations of a session have cached.",
        HintsRequest,
        HintsBody,
    ),
    *post(
        "/v1/grammar/check",
        check_grammar,
        "What is enforced of a JSON Schema or another constraint.",
        GrammarCheckRequest,
        GrammarCheckBody,
        fails=(404,),
    ),
    *post("/abort_request", operations.abort_request, "End running requests.", AbortBody, AbortedBody),
    *post(
        "/flush_cache /reset_prefix_cache",
        operations.flush_cache,
        "Empty the prefix cache.",
        None,
        FlushedBody,
        admin=True,
    ),
    *post(
        "/pause_generation",
        pause_generation,
        "Stop generating until /continue_generation.",
        PauseRequest,
        PauseBody,
        admin=True,
        bodiless=True,
    ),
    *post("/continue_generation", continue_generation, "Go on after a pause.", None, PauseBody, admin=True),
    *post("/pause", pause, "Stop generating until /resume.", None, PauseStatusBody, admin=True),
    *post("/resume", resume, "Go on after a pause.", None, PauseStatusBody, admin=True),
    *get("/is_paused", is_paused, "Whether the server is paused.", IsPausedBody),
    *get("/flush_cache", operations.flush_cache, "As POST, as older routers ask.", FlushedBody, admin=True),
    *post(
        "/clear_hicache_storage_backend",
        operations.clear_storage,
        "Empty what outlives the process, as SGLang's clients ask.",
        None,
        FlushedBody,
        admin=True,
    ),
    *get(
        diagnosis.LOG_LEVEL_PATH,
        diagnosis.log_level,
        "The lowest severity that is logged.",
        LogLevelBody,
        admin=True,
    ),
    Route(
        "PUT",
        diagnosis.LOG_LEVEL_PATH,
        diagnosis.set_log_level,
        "Log more or less, in all processes.",
        diagnosis.LogLevelRequest,
        LogLevelBody,
        admin=True,
    ),
    *post(
        "/start_profile",
        diagnosis.start_profile,
        "Profile every process.",
        diagnosis.ProfileRequest,
        ProfileStartedBody,
        fails=(409,),
        admin=True,
        bodiless=True,
    ),
    *post(
        "/stop_profile",
        diagnosis.stop_profile,
        "End the profile early.",
        None,
        ProfileBody,
        fails=(409,),
        admin=True,
    ),
    *get(
        "/health /ping", operations.health, "Whether requests are expected to work; needs no key.", HealthBody
    ),
    *get("/version", operations.version, "The version that runs.", BuildInfo),
    *get("/health_generate", operations.health_generate, "Whether a token can be generated.", HealthBody),
    *get(
        "/server_info /get_server_info",
        operations.server_info,
        "Settings, capacity and state.",
        ServerInfoBody,
    ),
    *get("/get_world_size", operations.world_size, "Ranks of all replicas.", WorldSizeBody),
    *get(
        "/model_info /get_model_info",
        worker.model_info,
        "The model and the folder of its tokenizer, for routers.",
        worker.ModelInfoBody,
    ),
    *get(
        "/v1/loads /loads",
        worker.loads,
        "Running and waiting requests and tokens, for routers.",
        worker.LoadsBody,
    ),
    *get("/get_load", worker.old_load, "The load, for older routers.", list[worker.OldLoadBody]),
    *answering(
        "/api/chat",
        ollama_chat,
        "Answer a chat (Ollama).",
        OllamaChatRequest,
        OllamaChatBody,
        OllamaChatBody,
        stream_type=_NDJSON,
    ),
    *answering(
        "/api/generate",
        ollama_generate,
        "Answer a prompt (Ollama).",
        OllamaGenerateRequest,
        OllamaGenerateBody,
        OllamaGenerateBody,
        stream_type=_NDJSON,
    ),
    *get("/api/tags", ollama_models.tags, "The served model (Ollama).", TagsBody),
    *get("/api/ps", ollama_models.running, "The loaded model (Ollama).", RunningBody),
    *post(
        "/api/show",
        ollama_models.show,
        "Facts about the model (Ollama).",
        OllamaShowRequest,
        ShowBody,
        fails=(404,),
    ),
    *get("/api/version", ollama_models.ollama_version, "The version (Ollama).", VersionBody),
    *get("/", ollama_models.greeting, "Whether a server is there.", media_type="text/plain"),
    *answering("/api/embed", ollama_embed, "Vectors of texts (Ollama).", OllamaEmbedRequest, OllamaEmbedBody),
    *answering(
        "/api/embeddings",
        ollama_embeddings,
        "The vector of a text (Ollama, older form).",
        OllamaOldEmbedRequest,
        OllamaOldEmbedBody,
    ),
    *post(
        "/v1/load_lora_adapter /load_lora_adapter",
        load_adapter,
        "Load a LoRA adapter.",
        LoadAdapterRequest,
        AdaptersBody,
        fails=(409,),
        admin=True,
    ),
    *post(
        "/v1/unload_lora_adapter /unload_lora_adapter",
        unload_adapter,
        "Unload a LoRA adapter.",
        UnloadAdapterRequest,
        AdaptersBody,
        fails=(404, 409),
        admin=True,
    ),
    *get("/metrics", operations.metrics, "Prometheus metrics.", media_type="text/plain"),
    *post(
        "/api/pull",
        ollama_models.pull,
        "Whether the model is there (Ollama).",
        OllamaPullRequest,
        PullBody,
        events=PullBody,
        stream_type=_NDJSON,
        fails=(501,),
    ),
    *_unavailable("POST", "/api/push", "/api/create", "/api/copy"),
    *_unavailable("DELETE", "/api/delete"),
)
"""The route table."""
