"""`POST /api/chat` and `POST /api/generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from ...conversation.deltas import Delta
from ...generation import Generation, GenerationRequest, Row
from ..delivery import collect_deltas, stream
from ..exchange import Exchange
from ..guards.auth import Caller
from ..schema.accounting import timings_of, usage_of
from ..schema.fim import fill_in
from ..services import Engine
from .convert import CONTENT_TYPE, Durations, OllamaStream, read_chat, read_generate
from .wire import OllamaChatRequest, OllamaFields, OllamaGenerateRequest

_DONE_REASONS: Final = {"tool_calls": "stop"}
_NS_PER_MS: Final = 1_000_000


async def ollama_chat(exchange: Exchange, engine: Engine) -> None:
    """Answer a chat in the form of Ollama's API."""
    await _answer(exchange, engine, read_chat, chat=True)


async def ollama_generate(exchange: Exchange, engine: Engine) -> None:
    """Answer a prompt in the form of Ollama's API."""
    await _answer(exchange, engine, read_generate, chat=False)


def _filling_in(generation: GenerationRequest, prefix: str, suffix: str, engine: Engine) -> GenerationRequest:
    """The request for the text between two others, without the template; the prompt leaves a quarter of the context."""
    sampling, context = generation.sampling, engine.manager.capacity.max_model_len
    prompts, sampling = fill_in(
        engine.tokenizer,
        [(prefix, suffix)],
        sampling,
        room=context - (sampling.max_new_tokens or context // 4),
        param="suffix",
        suffix_first=engine.config.answers.spm_infill,
    )
    return replace(generation, prompts=prompts, conversation=None, sampling=sampling)


async def _answer(
    exchange: Exchange,
    engine: Engine,
    reader: Callable[..., tuple[OllamaFields, GenerationRequest]],
    *,
    chat: bool,
) -> None:
    body, request = await engine.read(exchange, lambda body: _read(reader, body, engine, exchange.caller))
    lines = OllamaStream(body.model or engine.served_model, chat=chat)
    if request.conversation is not None and not request.conversation.messages:
        # An empty chat loads the model, which is loaded.
        await exchange.send_json(lines.whole([], "load", None, request.warnings))
        return
    async with exchange.abort_on_disconnect():
        with await engine.start(exchange, request) as generation:
            warnings = generation.request.warnings + engine.second_bos(
                generation, "leave it out of the prompt"
            )
            if body.stream is not False:
                await stream(exchange, generation, _Writer(generation, lines, warnings), CONTENT_TYPE)
                return
            deltas = await collect_deltas(generation)
            await exchange.send_json(lines.whole(deltas, *_ending(generation), warnings))


def _read(
    reader: Callable[..., tuple[OllamaFields, GenerationRequest]],
    body: dict[str, Any],
    engine: Engine,
    caller: Caller,
) -> tuple[OllamaFields, GenerationRequest]:
    max_model_len = engine.manager.capacity.max_model_len
    request, generation = reader(
        body,
        engine.config,
        engine.sampling_defaults,
        max_model_len=max_model_len,
        sees_images=engine.images.are_seen,
    )
    if isinstance(request, OllamaChatRequest):
        request.messages = []  # the conversation has them; an answer may take long, and images are megabytes
    elif isinstance(request, OllamaGenerateRequest) and request.suffix:
        generation = _filling_in(generation, request.prompt or "", request.suffix, engine)
    if isinstance(request, OllamaGenerateRequest):
        request.images = []
    scheduling = engine.with_adapter(caller.scheduling(request), request.model)
    return request, replace(generation, scheduling=scheduling)


class _Writer:
    """Writes the stream of one answer."""

    def __init__(self, generation: Generation, lines: OllamaStream, warnings: list[str]) -> None:
        self._generation = generation
        self._lines = lines
        self._warnings = warnings

    def events(self, row: Row, deltas: Sequence[Delta]) -> bytes:
        """The lines for a row."""
        return self._lines.events(deltas)

    def closing(self) -> bytes:
        """The last line."""
        return self._lines.complete(*_ending(self._generation), self._warnings)


def _ending(generation: Generation) -> tuple[str, Durations]:
    """`done_reason` and the numbers of a finished answer."""
    usage, times = usage_of(generation), timings_of(generation)
    prompt_ms = times.prompt_ms
    durations = Durations(
        total_ns=round((times.queue_ms + prompt_ms + times.predicted_ms) * _NS_PER_MS),
        prompt_tokens=usage.prompt_tokens,
        prompt_ns=round(prompt_ms * _NS_PER_MS),
        output_tokens=usage.completion_tokens,
        output_ns=round(times.predicted_ms * _NS_PER_MS),
    )
    reason = generation.choices[0].finish_reason or "stop"
    return _DONE_REASONS.get(reason, reason), durations
