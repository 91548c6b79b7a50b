"""`IncrementalDecoder`: the text of one request, as its tokens arrive.

It works on the exact bytes of tokens, so it decodes each byte once, and the joined pieces are equal for any split into
pieces. A character with bytes in several tokens appears with the last of them. The pieces equal the text of
`Tokenizer.decode` too, except for invalid bytes: an invalid sequence is one U+FFFD here; there, each byte token of a
SentencePiece model is one, in a run of byte tokens that is not valid UTF-8.

A generated text continues its prompt: the space with which SentencePiece models begin a word is part of the first
token's bytes and stays. (Decoding the output on its own would drop it and join the first word to the prompt.)
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable(Protocol):
    """The facts about each token; `models.tokenizer.tokenizer.Tokenizer` implements it."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; empty for an id without one."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token, which is not part of the visible text."""
        ...


class NoText:
    """The `TokenTable` of a model that generates no text."""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return False


class IncrementalDecoder:
    """Turns token ids into text with complete characters."""

    __slots__ = ("_kept", "_skip_special_tokens", "_table", "_utf8")

    def __init__(
        self, table: TokenTable, *, skip_special_tokens: bool, keep_special_ids: Iterable[int] = ()
    ) -> None:
        """Start a text.

        Args:
            table: of the model's tokens.
            skip_special_tokens: control tokens produce no text.
            keep_special_ids: control tokens that do.
        """
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._kept = frozenset(keep_special_ids)
        # Bytes that can never become a character turn into U+FFFD; an incomplete character is held back.
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became final with these tokens."""
        table = self._table
        if self._skip_special_tokens:
            kept = self._kept
            data = b"".join([table.token_bytes(i) for i in token_ids if not table.is_special(i) or i in kept])
        else:
            data = b"".join([table.token_bytes(i) for i in token_ids])
        return self._utf8.decode(data)

    def prints(self, token_id: int) -> bool:
        """Whether the token's bytes are part of the text."""
        return not self._skip_special_tokens or not self._table.is_special(token_id) or token_id in self._kept

    def flush(self) -> str:
        """The remaining text when no more tokens come: U+FFFD for an incomplete character, usually empty."""
        return self._utf8.decode(b"", final=True)
