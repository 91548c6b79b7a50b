"""`GenerationOutput` and `GenerationChunk`: what `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..runtime.messages import Finish, FinishKind, Logprobs, TextOutput, Usage
from ..runtime.model_files.tokenizer import Tokenizer

TOKEN_DTYPE: Final = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token, and of the likeliest tokens at its position (token id -> logprob)."""

    token_id: int
    token: str
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """New text of one prompt while streaming.

    Attributes:
        index: position of the prompt in the list that was passed; 0 for a single one.
        text: new text that is final: whole characters, without a possible beginning of a stop string.
        token_ids: new tokens; their text may come in a later chunk.
        usage: totals so far.
        finish_reason: set in the last chunk of a prompt: `stop`, `length`, `abort` or `error`.
        error: the reason, for `abort` and `error`.
        logprobs: of `token_ids`, when asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    usage: Usage
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The answer to one prompt.

    Attributes:
        text: the generated text.
        token_ids: the generated tokens.
        prompt_token_ids: the prompt's tokens, as the model received them.
        finish_reason: `stop`, `length`, `abort` or `error`.
        stop: the stop string or token id that ended it, or None.
        usage: prompt, cached and generated tokens; queueing time.
        error: the reason, for `abort` and `error`.
        seed: the seed that reproduces the answer.
        logprobs: of the generated tokens, when asked for.
        prompt_logprobs: of the prompt's tokens from the second on, when asked for.
        request_id: for `LLM.why`.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    seed: int
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    request_id: str = ""


class OutputBuilder:
    """Collects the rows of one prompt."""

    def __init__(self, rid: str, prompt_token_ids: list[int], seed: int, tokenizer: Tokenizer) -> None:
        self._rid = rid
        self._prompt_token_ids = prompt_token_ids
        self._seed = seed
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._usage: Usage | None = None
        self._finish: Finish | None = None

    @property
    def finished(self) -> bool:
        """Whether the last row has arrived."""
        return self._finish is not None

    def add(self, row: TextOutput, index: int) -> GenerationChunk:
        """Add a row; returns it as a chunk."""
        token_ids = decode_token_ids(row.token_ids)
        logprobs = _decode_logprobs(row.logprobs, token_ids, self._tokenizer)
        self._texts.append(row.text)
        self._token_ids += token_ids
        if logprobs is not None:
            self._logprobs = (self._logprobs or []) + logprobs
        if row.prompt_logprobs is not None:
            self._prompt_logprobs = _decode_logprobs(
                row.prompt_logprobs, self._prompt_token_ids[1:], self._tokenizer
            )
        self._usage, self._finish = row.usage, row.finish
        return GenerationChunk(
            index=index,
            text=row.text,
            token_ids=token_ids,
            usage=row.usage,
            finish_reason=row.finish.kind.value if row.finish else None,
            error=_error(row.finish),
            logprobs=logprobs,
        )

    def build(self) -> GenerationOutput:
        """The complete answer, once `finished`."""
        assert self._finish is not None and self._usage is not None
        return GenerationOutput(
            text="".join(self._texts),
            token_ids=self._token_ids,
            prompt_token_ids=self._prompt_token_ids,
            finish_reason=self._finish.kind.value,
            stop=self._finish.matched,
            usage=self._usage,
            seed=self._seed,
            error=_error(self._finish),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            request_id=self._rid,
        )


def encode_token_ids(token_ids: list[int]) -> bytes:
    """Token ids in the encoding of messages."""
    return np.array(token_ids, dtype=TOKEN_DTYPE).tobytes()


def decode_token_ids(data: bytes) -> list[int]:
    """The inverse of `encode_token_ids`."""
    token_ids: list[int] = np.frombuffer(data, dtype=TOKEN_DTYPE).tolist()
    return token_ids


def _error(finish: Finish | None) -> str | None:
    if finish is None or finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
        return None
    return finish.message


def _decode_logprobs(
    logprobs: Logprobs | None, token_ids: list[int], tokenizer: Tokenizer
) -> list[TokenLogprob] | None:
    if logprobs is None:
        return None
    own = np.frombuffer(logprobs.token_logprobs, dtype="<f4").tolist()
    shape = (len(own), logprobs.top_k)
    top_ids = np.frombuffer(logprobs.top_ids, dtype=TOKEN_DTYPE).reshape(shape).tolist()
    top_values = np.frombuffer(logprobs.top_logprobs, dtype="<f4").reshape(shape).tolist()
    return [
        TokenLogprob(
            token_id,
            tokenizer.token_bytes(token_id).decode(errors="replace"),
            value,
            dict(zip(ids, values, strict=True)),
        )
        for token_id, value, ids, values in zip(token_ids, own, top_ids, top_values, strict=True)
    ]
