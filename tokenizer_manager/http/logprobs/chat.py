"""Log-probabilities in the shape of chat completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....models.tokenizer.tokenizer import Tokenizer
from .placement import PlacedLogprob


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


def chat_logprobs(placed: Sequence[PlacedLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    """The tokens of a text in the chat API's shape."""
    content: list[ChatTokenLogprob] = []
    for entry, _ in placed:
        top = [ChatTopLogprob(*_chat_token(token_id, value, tokenizer)) for token_id, value in entry.top]
        content.append(ChatTokenLogprob(*_chat_token(entry.token_id, entry.logprob, tokenizer), top))
    return ChatLogprobs(content)


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), logprob, list(data)
