"""Usage and timings of a generation, for response bodies."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from ....grammar.answer_report import GrammarReport, Truncated, merged
from ....models.tokenizer.tokenizer import Tokenizer
from ...generation import Choice, Generation
from ...media.placement import num_image_tokens


class PromptTokensDetails(msgspec.Struct):
    """The source of the prompt's tokens; `image_tokens`: positions of images, of a chat that has some."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """The purpose of the generated tokens, and drafts that became tokens of the answer or did not."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageBody(msgspec.Struct):
    """OpenAI's `usage`. A prompt counts once for all of its answers. `grammar`: for answers with one."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    grammar: GrammarReport | UnsetType = UNSET


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


class PromptProgress(msgspec.Struct):
    """The part of a prompt that is read, under llama.cpp's names.

    `processed` tokens of `total` have KV, with the `cache` tokens of the prefix cache; `time_ms` since its start.
    """

    total: int
    cache: int
    processed: int
    time_ms: float


def progress_of(generation: Generation, choice: Choice, processed: int, now_s: float) -> PromptProgress:
    """The progress of a choice's prompt, as of a row; `now_s`: by the manager's clock."""
    usage = choice.usage
    end_s = now_s if choice.first_token_s is None else choice.first_token_s
    elapsed_s = max(end_s - generation.arrival_s - usage.queue_s, 0.0)
    return PromptProgress(usage.prompt_tokens, usage.cached_tokens, processed, _ms(elapsed_s))


def grammar_of(generation: Generation, tokenizer: Tokenizer) -> GrammarReport | UnsetType:
    """Report the grammars of a generation so far; UNSET for free text, and before the grammar is ready."""
    guided = [choice.guided for choice in generation.choices if choice.guided is not None]
    reports = [report for each in guided if (report := each.report(tokenizer)) is not None]
    return merged(reports) or UNSET


def truncated_of(choice: Choice, tokenizer: Tokenizer) -> Truncated | UnsetType:
    """Where a finished answer was cut and completed; UNSET if it was not."""
    return (choice.guided.truncated(tokenizer) if choice.guided is not None else None) or UNSET


def usage_of(
    generation: Generation, reasoning_tokens: int | None = None, tokenizer: Tokenizer | None = None
) -> UsageBody:
    """The tokens of a generation so far.

    Args:
        generation: any.
        reasoning_tokens: None for a model that does not reason.
        tokenizer: for the part about the grammar; None leaves it out.
    """
    prompt = sum(len(choice.prompt_ids) for choice in generation.prompt_choices)
    completion = sum(choice.usage.completion_tokens for choice in generation.choices)
    cached = sum(choice.usage.cached_tokens for choice in generation.prompt_choices)
    details: CompletionTokensDetails | UnsetType = UNSET
    drafts = sum(choice.usage.draft_tokens for choice in generation.choices)
    if reasoning_tokens is not None or drafts:
        details = CompletionTokensDetails(UNSET if reasoning_tokens is None else reasoning_tokens)
    if drafts and details is not UNSET:
        accepted = sum(choice.usage.accepted_draft_tokens for choice in generation.choices)
        details.accepted_prediction_tokens = accepted
        details.rejected_prediction_tokens = drafts - accepted
    grammar = UNSET if tokenizer is None else grammar_of(generation, tokenizer)
    images = num_image_tokens(generation.request.media) or UNSET
    prompt_details = PromptTokensDetails(cached, images)
    return UsageBody(prompt, completion, prompt + completion, prompt_details, details, grammar)


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
