"""`Preparation`: the prompts of a request as token ids, and whether it can ever run.

The rules are those of `runtime/feasibility.py`, which the scheduler uses too. `OverloadControl` decides whether there
is room for the request now.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from ..models.tokenizer.texts_in_tokens import check_num_sequences
from ..models.tokenizer.tokenizer import Tokenizer
from ..runtime.errors import RequestError
from ..runtime.feasibility import (
    Capacity,
    longest_input,
    max_new_tokens_for,
    reason_against,
    reason_against_pooling,
)
from ..runtime.media import reason_against_images
from ..runtime.sampling_params import SamplingParams
from .engine_state import EngineState
from .generation import GenerationRequest
from .prompt_encoder import PromptEncoder, prompt_name

_MAX_UTF8_BYTES: Final = 4


class PreparedPrompt(NamedTuple):
    """A prompt of a request that is checked and not sent.

    Attributes:
        ids: [prompt_len] int32.
        sampling: with `max_new_tokens` set.
    """

    ids: array[int]
    sampling: SamplingParams


class Preparation:
    """See the module."""

    def __init__(self, encoder: PromptEncoder, engine: EngineState) -> None:
        """Take the parts; `engine`: its capacity counts, which a restart may change."""
        self._encoder = encoder
        self._engine = engine

    def check(self, request: GenerationRequest) -> None:
        """Check what needs no tokens: the sampling parameters, and the number of the replica.

        Raises:
            RequestError: one of them is wrong.
        """
        for sampling in request.samplings or (request.sampling,):
            sampling.verify(self._engine.capacity.vocab_size)
        number, num_replicas = request.scheduling.replica, self._engine.num_replicas
        if number is not None and not 0 <= number < num_replicas:
            replicas = "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"
            raise RequestError(
                f"data_parallel_rank is {number}, but the server has {replicas} (--dp), numbered from 0; "
                "leave it out, and the server chooses",
                param="data_parallel_rank",
                code="invalid_value",
            )

    async def encode(self, request: GenerationRequest) -> list[array[int]]:
        """The token ids of each prompt, [prompt_len] int32; a text that must be too long is refused before.

        Raises:
            RequestError: a prompt is refused.
        """
        for i, prompt in enumerate(request.prompts):
            if isinstance(prompt, str) and request.truncate_len is None:
                name = prompt_name(request.prompts, i, request.prompt_param)
                check_may_fit(
                    prompt, self._encoder.tokenizer, self._engine.capacity, name, answers=not request.poolings
                )
        return await self._encoder.encode(
            request.prompts, add_special_tokens=request.add_special_tokens, param=request.prompt_param
        )

    def resolve(
        self, request: GenerationRequest, encoded: list[array[int]]
    ) -> tuple[list[array[int]], list[SamplingParams]]:
        """The prompts, cut if the request wants that, and the sampling parameters of each, with its length.

        Raises:
            RequestError: a prompt cannot run.
        """
        if reason := reason_against_images(request.media, self._engine.capacity):
            raise RequestError(reason, param=request.prompt_param, code="unsupported_value")
        if (
            request.media and request.scheduling.bootstrap is not None
        ):  # two engines compare the ids of prompts only
            raise RequestError(
                "the request has images and the other half of a prefill/decode pair, but one engine computes an image "
                "and its answer; send it without bootstrap_room and kv_transfer_params",
                param=request.prompt_param,
                code="unsupported_value",
            )
        names = [prompt_name(request.prompts, i, request.prompt_param) for i in range(len(encoded))]
        if not request.poolings:
            samplings = [
                with_token_ids(each, self._encoder.tokenizer)
                for each in request.samplings or [request.sampling] * len(encoded)
            ]
            resolved = [
                resolve_length(
                    sampling,
                    len(ids),
                    self._engine.capacity,
                    prompt_param=name,
                    length_param=request.length_param,
                    cut_length=request.cut_length,
                )
                for name, ids, sampling in zip(names, encoded, samplings, strict=True)
            ]
            return encoded, resolved
        if request.truncate_len is not None:
            special = self._encoder.tokenizer.special_ending if request.add_special_tokens else ()
            limit, num_kept = request.truncate_len, request.num_kept_tokens
            encoded = [truncated(ids, limit, special, num_kept, self._engine.capacity) for ids in encoded]
        for name, ids in zip(names, encoded, strict=True):
            check_pooled_length(len(ids), self._engine.capacity, name)
        return encoded, [request.sampling] * len(encoded)


def check_may_fit(
    text: str, tokenizer: Tokenizer, capacity: Capacity, prompt_param: str, *, answers: bool = True
) -> None:
    """Refuse a text that must have too many tokens, before it is tokenized.

    Args:
        answers: one position is for the answer.

    Raises:
        RequestError: it cannot run.
    """
    longest = max_new_tokens_for(0, capacity) - answers
    if len(text) * _MAX_UTF8_BYTES <= longest:
        return  # even with a token for each byte
    num_tokens = tokenizer.min_num_tokens(text)
    if num_tokens > longest:
        raise RequestError(
            f"{prompt_param} has {len(text)} characters, which are at least {num_tokens} tokens, but at most {longest} "
            f"fit{' together with an answer' if answers else ''}; shorten it or raise --max-model-len or "
            "--max-total-tokens",
            param=prompt_param,
            code="context_length_exceeded",
        )


def with_token_ids(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """`sampling` with the tokens of its texts, which the runner needs."""
    if sampling.has_dry:
        found = (tokenizer.texts.sequences(text) for text in sampling.dry_sequence_breakers)
        ids = tuple(dict.fromkeys(itertools.chain(sampling.dry_breaker_ids, *found)))
        check_num_sequences(len(ids), ", ".join(sampling.dry_sequence_breakers))
        sampling = msgspec.structs.replace(sampling, dry_breaker_ids=ids)
    if sampling.bad_words:
        forms = [form for word in sampling.bad_words for form in (word, f" {word.lstrip()}")]
        encoded = map(tuple, tokenizer.encode_batch(forms, add_special_tokens=False))
        words = tuple(filter(None, dict.fromkeys([*sampling.bad_words_ids, *encoded])))
        sampling = msgspec.structs.replace(sampling, bad_words_ids=words)
    return sampling


def resolve_length(
    sampling: SamplingParams,
    prompt_len: int,
    capacity: Capacity,
    *,
    prompt_param: str,
    length_param: str,
    cut_length: bool = False,
) -> SamplingParams:
    """`sampling` with `max_new_tokens` set, if prompt and answer fit.

    Args:
        sampling: verified.
        prompt_len: tokens of the prompt.
        capacity: of the scheduler.
        prompt_param, length_param: the fields that errors name.
        cut_length: a longer answer than fits is cut to what fits.

    Raises:
        RequestError: the request cannot run.
    """
    if prompt_len == 0:
        message = f"{prompt_param} has no tokens; a prompt has at least one"
        raise RequestError(message, param=prompt_param, code="empty_prompt")
    start = sampling.prompt_logprobs_start
    if start >= prompt_len:
        raise RequestError(
            f"prompt_logprobs_start is {start}, but must be below the prompt's length, {prompt_len} tokens",
            param="prompt_logprobs_start",
            code="invalid_value",
        )
    asked = sampling.max_new_tokens
    longest = max_new_tokens_for(prompt_len, capacity)
    if cut_length and asked is not None and asked > longest:
        asked = None
    wanted = asked if asked is not None else max(1, longest)
    reason = reason_against(prompt_len, wanted, capacity)
    if reason is not None:
        if "[" in prompt_param:
            reason = reason.replace("the prompt", prompt_param, 1)
        reason = reason.replace("max_tokens", length_param)
        # The length is at fault if a shorter answer would fit; otherwise the prompt is.
        param = length_param if asked is not None and longest >= 1 else prompt_param
        raise RequestError(reason, param=param, code="context_length_exceeded")
    if sampling.min_new_tokens > wanted:
        message = f"min_new_tokens is {sampling.min_new_tokens}, but only {wanted} tokens can be generated; lower it"
        raise RequestError(message, param="min_new_tokens", code="invalid_value")
    return msgspec.structs.replace(sampling, max_new_tokens=wanted)


def check_pooled_length(prompt_len: int, capacity: Capacity, param: str) -> None:
    """Refuse an input of a pooling request that is empty or too long.

    Raises:
        RequestError: it is.
    """
    if prompt_len == 0:
        raise RequestError(f"{param} has no tokens; it has at least one", param=param, code="empty_prompt")
    reason = reason_against_pooling(prompt_len, capacity)
    if reason is not None:
        if "[" in param:
            reason = reason.replace("the input", param, 1)
        raise RequestError(reason, param=param, code="context_length_exceeded")


def truncated(
    ids: array[int], limit: int, special: Sequence[int], num_kept: int, capacity: Capacity
) -> array[int]:
    """The beginning of an input and its last tokens, as sentence-transformers cuts it.

    Args:
        limit: most tokens; -1: what the model takes.
        special: the special tokens that end a text, and stay; a client's own token ids need not have them.
        num_kept: further tokens at the end that stay: the end of a template.
    """
    most = longest_input(capacity)
    if limit >= 0:
        most = min(most, max(limit, 1))
    if len(ids) <= most:
        return ids
    num_special = len(special) if ids[len(ids) - len(special) :].tolist() == list(special) else 0
    num_last = min(num_special + num_kept, most - 1)
    return ids[: most - num_last] + ids[len(ids) - num_last :]
