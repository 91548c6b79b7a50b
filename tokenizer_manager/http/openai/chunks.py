"""The part that `/v1/chat/completions` and `/v1/completions` share: the body around the choices, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic

from msgspec import UNSET, UnsetType

from ....models.tokenizer.tokenizer import Tokenizer
from ...generation import Generation, Row
from ..framing import DONE, event
from ..schema.accounting import UsageBody, progress_of, timings_of, usage_of
from ..schema.generation_fields import StreamOptions
from ..services import Engine
from ..token_logprobs import TokenLogprob
from .wire import C, OpenAIBody, PromptLogprobs, PromptTokenLogprob


def whole_body(
    kind: type[OpenAIBody[C]],
    engine: Engine,
    generation: Generation,
    choices: list[C],
    warnings: list[str],
) -> OpenAIBody[C]:
    """The response of a finished generation in one piece."""
    return kind(
        id=generation.id,
        created=int(time.time()),
        model=generation.scheduling.served_as or engine.served_model,
        system_fingerprint=engine.fingerprint,
        service_tier=generation.scheduling.service_tier or UNSET,
        choices=choices,
        usage=usage_of(generation, generation.reasoning_tokens(), engine.tokenizer),
        timings=timings_of(generation),
        warnings=warnings or UNSET,
        kv_transfer_params=generation.kv_transfer_params or UNSET,
    )


def prompt_logprobs_of(entries: Sequence[TokenLogprob], top_k: int, tokenizer: Tokenizer) -> PromptLogprobs:
    """The log-probabilities of a prompt in the form of vLLM.

    Args:
        entries: of its tokens from the second on.
        top_k: likeliest tokens to list; an entry may have more.
        tokenizer: of the model.
    """

    def of(token_id: int, logprob: float, rank: int | None) -> PromptTokenLogprob:
        return PromptTokenLogprob(logprob, rank, tokenizer.token_bytes(token_id).decode("utf-8", "replace"))

    found: PromptLogprobs = [None]
    for entry in entries:
        tokens = {entry.token_id: of(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top[:top_k], start=1):
            if token_id != entry.token_id:
                tokens[token_id] = of(token_id, logprob, rank)
        for token_id, logprob in entry.chosen:
            tokens.setdefault(token_id, of(token_id, logprob, None))
        found.append(tokens)
    return found


class ChunkWriter(Generic[C]):
    """Writes the events of one stream, with usage, timings and warnings where `stream_options` puts them.

    The first event has the warnings. The last event has the timings: the usage chunk, if it was asked for, otherwise
    the chunk that finishes the last choice.
    """

    def __init__(
        self,
        kind: type[OpenAIBody[C]],
        engine: Engine,
        generation: Generation,
        options: StreamOptions,
        warnings: list[str],
    ) -> None:
        """Take the parts.

        Args:
            kind: of the events.
            engine: of the server.
            generation: that is streamed.
            options: of the stream.
            warnings: for the first event.
        """
        self._kind = kind
        self._engine = engine
        self._generation = generation
        self._options = options
        self._warnings = warnings
        self._created = int(time.time())
        self._num_finished = 0
        self._read: set[int] = set()  # choices with a prompt that is read

    def event(self, choice: C) -> bytes:
        """An event with new text of a choice."""
        return event(self._chunk([choice]))

    def begin_event(self, choice: C, unsent: int, prompt_token_ids: list[int] | UnsetType = UNSET) -> bytes:
        """The event before the first text of the choice with the index `unsent`, which does not count its tokens."""
        chunk = self._chunk([choice], unsent)
        chunk.prompt_token_ids = prompt_token_ids
        return event(chunk)

    def progress_event(self, row: Row, empty: C) -> bytes:
        """The event about the progress of a prompt, if the row brings one: before the first token, and with it.

        `empty`: the choice, without text.
        """
        choice, output = row
        processed = output.usage.processed_tokens
        if processed is None:
            if not self._generation.request.reports_progress or choice.index in self._read:
                return b""
            self._read.add(choice.index)
            if not output.token_ids:  # it ends before its prompt is read
                return b""
            processed = output.usage.prompt_tokens
        chunk = self._chunk([empty], choice.index)
        now_s = self._engine.manager.now_s()
        chunk.prompt_progress = progress_of(self._generation, choice, processed, now_s)
        return event(chunk)

    def finish_event(self, choice: C) -> bytes:
        """The event that finishes a choice; once per choice."""
        self._num_finished += 1
        chunk = self._chunk([choice])
        if self._num_finished == len(self._generation.choices) and not self._options.include_usage:
            chunk.timings = timings_of(self._generation)
        return event(chunk)

    def closing(self) -> bytes:
        """The end of the stream, with the usage chunk if it was asked for."""
        if not self._options.include_usage:
            return DONE
        chunk = self._chunk([])
        chunk.usage = self._usage()
        chunk.timings = timings_of(self._generation)
        return event(chunk) + DONE

    def _usage(self, unsent: int | None = None) -> UsageBody:
        usage = usage_of(self._generation, self._generation.reasoning_tokens(unsent), self._engine.tokenizer)
        if unsent is not None:
            num_unsent = self._generation.choices[unsent].usage.completion_tokens
            usage.completion_tokens -= num_unsent
            usage.total_tokens -= num_unsent
        return usage

    def _chunk(self, choices: list[C], unsent: int | None = None) -> OpenAIBody[C]:
        chunk = self._kind(
            id=self._generation.id,
            created=self._created,
            model=self._generation.scheduling.served_as or self._engine.served_model,
            system_fingerprint=self._engine.fingerprint,
            service_tier=self._generation.scheduling.service_tier or UNSET,
            choices=choices,
        )
        if self._options.continuous_usage_stats and self._options.include_usage is not False:
            chunk.usage = self._usage(unsent)
        elif self._options.include_usage:
            chunk.usage = None
        if self._warnings:
            chunk.warnings, self._warnings = self._warnings, []
        return chunk
