"""Log-probabilities of tokens, as the engine's messages have them, and where the tokens stand in the text.

A text has no control tokens and ends before a stop string, so a token's offset is not the sum of lengths before it.
"""

from __future__ import annotations

import codecs
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from ...runtime.messages import Finish, FinishKind
from ...runtime.transport.message_base import Logprobs

_IMPOSSIBLE: Final = -9999.0  # JSON has no infinity; OpenAI writes this


class TokenLogprob(NamedTuple):
    """One token, its log-probability, and the most likely tokens at its position.

    Attributes:
        rank: of a prompt's token, 1 for the likeliest; 0 for one of an answer.
        chosen: the tokens of `SamplingParams.logprob_token_ids`.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0
    chosen: Sequence[tuple[int, float]] = ()


def unpack(logprobs: Logprobs, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """The entries of `logprobs`, which belong to `token_ids`."""
    own, top_ids, top_values, ranks, chosen = array("f"), array("i"), array("f"), array("i"), array("f")
    own.frombytes(logprobs.token_logprobs)
    top_ids.frombytes(logprobs.top_ids)
    top_values.frombytes(logprobs.top_logprobs)
    ranks.frombytes(logprobs.ranks)
    chosen.frombytes(logprobs.chosen)
    chosen_ids = int32s(logprobs.chosen_ids)
    k, m = logprobs.top_k, len(chosen_ids)
    return [
        TokenLogprob(
            token_id,
            _finite(logprob),
            [(top_ids[j], _finite(top_values[j])) for j in range(i * k, (i + 1) * k)],
            ranks[i] if ranks else 0,
            [(chosen_ids[j], _finite(chosen[i * m + j])) for j in range(m)],
        )
        for i, (token_id, logprob) in enumerate(zip(token_ids, own, strict=True))
    ]


def token_as_id(token_id: int) -> str:
    """A token in the form of vLLM's `return_tokens_as_token_ids`, from which a client reads its id."""
    return f"token_id:{token_id}"


def int32s(data: bytes) -> array[int]:
    """Token ids of a message."""
    ids = array("i")
    ids.frombytes(data)
    return ids


def _finite(value: float) -> float:
    return max(value, _IMPOSSIBLE) if math.isfinite(value) else _IMPOSSIBLE


_SEARCH_BYTES: Final = 64
"""How far a token is looked for after a part of the text that no token has: a normalizer or a decoder changed it."""


class TokenTable(Protocol):
    """The facts about each token; `Tokenizer` implements it."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; empty for an id without one."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token, which is not part of the visible text."""
        ...


class PlacedLogprob(NamedTuple):
    """The log-probabilities of a token, and its first character's number in the text."""

    entry: TokenLogprob
    offset: int


class AnswerPlacement:
    """Places the tokens of one answer in its text, row by row.

    With stop strings, a token is held back as long as its text is: the detokenizer withholds what may become a stop
    string. A token of the stop string that ends the answer is in the text only with its beginning, or not at all; one
    that begins after the text is dropped.
    """

    def __init__(
        self,
        table: TokenTable,
        *,
        skip_special_tokens: bool,
        keep_special_ids: Iterable[int] = (),
        has_stop_strings: bool,
    ) -> None:
        """Begin an answer; the arguments are the options of its text."""
        self._table = table
        self._skips = skip_special_tokens
        self._kept = frozenset(keep_special_ids)
        self._holds_back = has_stop_strings
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_decoded = 0
        self._num_released = 0
        self._held: list[PlacedLogprob] = []

    def add(self, entries: Sequence[TokenLogprob], text: str, finish: Finish | None) -> list[PlacedLogprob]:
        """The tokens that are now certain to be in the answer.

        Args:
            entries: of the row's tokens.
            text: of the row.
            finish: of the row.
        """
        for entry in entries:
            self._held.append(PlacedLogprob(entry, self._num_decoded))
            if not self._is_skipped(entry.token_id):
                self._num_decoded += len(self._decoder.decode(self._table.token_bytes(entry.token_id)))
        self._num_released += len(text)
        cut = finish is not None and finish.kind is FinishKind.STOP and isinstance(finish.matched, str)
        if not cut and (finish is not None or not self._holds_back):
            released, self._held = self._held, []
            return released
        released = [placed for placed in self._held if placed.offset < self._num_released]
        self._held = self._held[len(released) :]
        return released

    def _is_skipped(self, token_id: int) -> bool:
        return self._skips and self._table.is_special(token_id) and token_id not in self._kept


def prompt_offsets(text: str, token_ids: Sequence[int], table: TokenTable, *, skipped: bool) -> list[int]:
    """The offset of each token of a prompt in its text.

    The tokens are looked for in the text, one after another, since it is the client's. It does not have a BOS that
    tokenization added, nor the space that SentencePiece puts before a text and after a control token, and a normalizer
    may have changed it.

    Args:
        text: of the prompt.
        token_ids: its tokens.
        table: of the model's tokens.
        skipped: no control token is in the text.
    """
    data = text.encode("utf-8", "surrogatepass")
    position = num_chars = 0  # characters that begin before `position`
    offsets: list[int] = []
    for token_id in token_ids:
        start, end = _find(data, position, token_id, table, skipped=skipped)
        num_chars += _num_begun(data, position, start)
        within = start < len(data) and _continues(data[start])
        offsets.append(num_chars - 1 if within else num_chars)
        num_chars += _num_begun(data, start, end)
        position = end
    return offsets


def _find(data: bytes, position: int, token_id: int, table: TokenTable, *, skipped: bool) -> tuple[int, int]:
    """Where a token begins and ends in `data`; nothing at `position` for one that is not in it."""
    token, special = table.token_bytes(token_id), table.is_special(token_id)
    if not token or (special and skipped):
        return position, position
    if data.startswith(token, position):
        return position, position + len(token)
    if special:
        return position, position
    if token.startswith(b" ") and data.startswith(token[1:], position):
        return position, position + len(token) - 1
    found = data.find(token, position, position + len(token) + _SEARCH_BYTES)
    return (position, position) if found < 0 else (found, found + len(token))


def _num_begun(data: bytes, start: int, end: int) -> int:
    return sum(not _continues(byte) for byte in data[start:end])


def _continues(byte: int) -> bool:
    """Whether it is a later byte of a character in UTF-8."""
    return byte & 0xC0 == 0x80
