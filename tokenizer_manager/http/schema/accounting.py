"""Usage and timings of a generation, for response bodies."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from ...generation import Generation


class PromptTokensDetails(msgspec.Struct):
    """The source of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """The purpose of the generated tokens."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """OpenAI's `usage`. A prompt counts once for all of its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timings(msgspec.Struct):
    """Times of a request under llama.cpp's names, and its time in the queue.

    `prompt_n` counts computed prompt tokens, `cache_n` those from the prefix cache. Generation is timed from the first
    token to the last, so its rate counts the tokens after the first.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    queue_ms: float


def usage_of(generation: Generation, reasoning_tokens: int | None = None) -> UsageBody:
    """The tokens of a generation so far; `reasoning_tokens`: None for a model that does not reason."""
    prompt = sum(len(choice.prompt_ids) for choice in generation.prompt_choices)
    completion = sum(choice.usage.completion_tokens for choice in generation.choices)
    cached = sum(choice.usage.cached_tokens for choice in generation.prompt_choices)
    details = UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


def timings_of(generation: Generation) -> Timings:
    """The times of a finished generation."""
    usage = usage_of(generation)
    cached = usage.prompt_tokens_details.cached_tokens
    computed = usage.prompt_tokens - cached
    firsts = [choice.first_token_s for choice in generation.choices if choice.first_token_s is not None]
    lasts = [choice.last_token_s for choice in generation.choices if choice.last_token_s is not None]
    first_s = min(firsts, default=generation.arrival_s)
    last_s = max(lasts, default=first_s)
    queue_s = generation.choices[0].usage.queue_s
    prompt_s = max(first_s - generation.arrival_s - queue_s, 0.0)
    decode_s = last_s - first_s
    num_decoded = max(usage.completion_tokens - len(firsts), 0)
    return Timings(
        cache_n=cached,
        prompt_n=computed,
        prompt_ms=_ms(prompt_s),
        prompt_per_token_ms=_ms(prompt_s / max(computed, 1)),
        prompt_per_second=_rate(computed, prompt_s),
        predicted_n=usage.completion_tokens,
        predicted_ms=_ms(decode_s),
        predicted_per_token_ms=_ms(decode_s / max(num_decoded, 1)),
        predicted_per_second=_rate(num_decoded, decode_s),
        queue_ms=_ms(queue_s),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
