"""`ReasoningCounter`: how many tokens of an answer are reasoning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ...runtime.grammar_use import ReasoningBlock


class TokenBytes(Protocol):
    """The bytes of tokens; `Tokenizer` implements it."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token."""
        ...


class ReasoningCounter:
    """Counts tokens from the first one of a block, its opening marker included, to the one that completes its end.

    Attributes:
        count: tokens of reasoning so far.
    """

    __slots__ = ("_block", "_held", "_state", "_tokens", "count")

    def __init__(self, block: ReasoningBlock, tokens: TokenBytes) -> None:
        """Begin an answer; `tokens`: of the model."""
        self._block = block
        self._tokens = tokens
        self._state = "inside" if block.opened else "start"
        self._held = b""
        self.count = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Read generated tokens."""
        for token_id in token_ids:
            if self._state == "after":
                return
            self._read(self._tokens.token_bytes(token_id))

    def _read(self, data: bytes) -> None:
        block = self._block
        self._held += data
        if self._state == "start":
            text = self._held.lstrip()
            if not text.startswith(block.begin):
                if not block.begin.startswith(text):
                    self._state, self.count = "after", 0
                else:
                    self.count += 1
                return
            self._state = "inside"
        self.count += 1
        if block.end in self._held:
            self._state = "after"
        self._held = self._held[-(len(block.end) - 1) or len(self._held) :]
