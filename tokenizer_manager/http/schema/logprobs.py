"""Log-probabilities in the shapes of both OpenAI APIs."""

from __future__ import annotations

import codecs
import math
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from ....runtime.messages import Logprobs
from ....runtime.model_files.tokenizer import Tokenizer

_IMPOSSIBLE: Final = -9999.0  # JSON has no infinity; OpenAI writes this


class TokenLogprob(NamedTuple):
    """One token, its log-probability, and the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def unpack(logprobs: Logprobs, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """The entries of `logprobs`, which belong to `token_ids`."""
    own, top_ids, top_values = array("f"), array("i"), array("f")
    own.frombytes(logprobs.token_logprobs)
    top_ids.frombytes(logprobs.top_ids)
    top_values.frombytes(logprobs.top_logprobs)
    k = logprobs.top_k
    return [
        TokenLogprob(
            token_id,
            _finite(logprob),
            [(top_ids[j], _finite(top_values[j])) for j in range(i * k, (i + 1) * k)],
        )
        for i, (token_id, logprob) in enumerate(zip(token_ids, own, strict=True))
    ]


def int32s(data: bytes) -> array[int]:
    """Token ids of a message."""
    ids = array("i")
    ids.frombytes(data)
    return ids


def _finite(value: float) -> float:
    return max(value, _IMPOSSIBLE) if math.isfinite(value) else _IMPOSSIBLE


# ---------------------------------------------------------------- chat completions


class ChatTopLogprob(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """One token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


def chat_logprobs(entries: list[TokenLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    """Entries in the chat API's shape."""
    content: list[ChatTokenLogprob] = []
    for entry in entries:
        top = [ChatTopLogprob(*_chat_token(token_id, value, tokenizer)) for token_id, value in entry.top]
        content.append(ChatTokenLogprob(*_chat_token(entry.token_id, entry.logprob, tokenizer), top))
    return ChatLogprobs(content)


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), logprob, list(data)


# ---------------------------------------------------------------- completions


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a completions choice: parallel lists; a prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionLogprobsBuilder:
    """Turns entries into the completions API's shape, chunk after chunk of one choice.

    `text_offset` counts characters of the returned text, echoed prompt included. It is computed from the tokens' bytes:
    a character that several tokens share belongs to the first of them.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def build(self, entries: Sequence[TokenLogprob], first_id: int | None = None) -> CompletionLogprobs:
        """The next chunk.

        Args:
            entries: of consecutive tokens.
            first_id: a prompt's first token, which has no log-probability; it comes first.
        """
        chunk = CompletionLogprobs([], [], [] if self._num_top else None, [])
        if first_id is not None:
            self._add(chunk, first_id, None, None)
        for entry in entries:
            top = {self._token(token_id): value for token_id, value in entry.top}
            top.setdefault(self._token(entry.token_id), entry.logprob)  # OpenAI lists the sampled token too
            self._add(chunk, entry.token_id, entry.logprob, top)
        return chunk

    def _add(
        self, chunk: CompletionLogprobs, token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        chunk.tokens.append(self._token(token_id))
        chunk.token_logprobs.append(logprob)
        chunk.text_offset.append(self._offset)
        if chunk.top_logprobs is not None:
            chunk.top_logprobs.append(top)
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def _token(self, token_id: int) -> str:
        r"""A token as text; one that is not valid UTF-8 in OpenAI's form, `bytes:\xe2\x80`."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
