"""`BlockOpening`, `OpenBlock`: the reasoning block in front of an answer, before and after it opens.

Text after the end marker in the same token belongs to the answer. A mask cannot express a part of a token, so masks of
a block that a grammar follows exclude the tokens that have such text.
"""

from __future__ import annotations

import copy
from typing import Final

from ..runtime.grammar_use import ReasoningBlock
from .backend import MaskRow, Vocabulary
from .markers import allow, marker_table

_WHITESPACE: Final = b" \t\r\n"


class BlockOpening:
    """The beginning of an answer that may open a block: whitespace, then the marker.

    Attributes:
        text: what was read so far.
    """

    def __init__(self, block: ReasoningBlock, vocabulary: Vocabulary) -> None:
        self._block = block
        self._vocabulary = vocabulary
        self.text = b""

    @property
    def may_open(self) -> bool:
        """Whether the text can still become the marker."""
        return self._block.begin.startswith(self._marker_text)

    @property
    def rest(self) -> bytes | None:
        """The text after the marker, once it is complete; None before."""
        text, begin = self._marker_text, self._block.begin
        return text[len(begin) :] if text.startswith(begin) else None

    def read(self, data: bytes) -> None:
        """Read the bytes of a token."""
        self.text += data

    def allow_marker(self, mask: MaskRow) -> None:
        """Add the tokens that continue the marker to a mask. Whitespace before it is not offered."""
        tokens = self._vocabulary.tokens
        there = len(self._marker_text)
        missing = len(self._block.begin) - there
        end_search = marker_table(self._vocabulary, self._block.end).search
        for token_id in marker_table(self._vocabulary, self._block.begin).continuations[there]:
            inside = tokens[token_id][missing:]
            if end_search.advance(0, inside)[1] in (-1, len(inside)):
                allow(mask, token_id)

    def copy(self) -> BlockOpening:
        """An independent object in the same state."""
        return copy.copy(self)

    @property
    def _marker_text(self) -> bytes:
        return self.text.lstrip(_WHITESPACE)


class OpenBlock:
    """A block that is open, from its first byte to the end marker.

    Attributes:
        end_tokens: the tokens that must come next, once the budget is used up; () before.
    """

    def __init__(self, block: ReasoningBlock, vocabulary: Vocabulary) -> None:
        self._budget = block.budget
        self._table = marker_table(vocabulary, block.end)
        self._marker_state = 0  # bytes of the end marker that the text ends with
        self._num_tokens = 0
        self.end_tokens: tuple[int, ...] = ()

    def fill(self, mask: MaskRow) -> None:
        """Write the tokens of the end marker once they must follow; before, all that stay in the block or end it.

        EOS is not among them.
        """
        mask.fill(0)
        if self.end_tokens:
            allow(mask, self.end_tokens[0])
        else:
            row = self._table.open_row(self._marker_state)
            mask[: row.size] = row

    def takes(self, token_id: int) -> bool:
        """Whether a token other than EOS may come next."""
        return not self.end_tokens or token_id == self.end_tokens[0]

    def read(self, data: bytes, num_tokens: int = 1) -> bytes | None:
        """Read the bytes of a token that `takes` has allowed.

        Args:
            data: of the token.
            num_tokens: 0 for the rest of the token that opened the block.

        Returns:
            The bytes after the end marker, once it is complete; None before.
        """
        self._num_tokens += num_tokens
        self._marker_state, end = self._table.search.advance(self._marker_state, data)
        if end >= 0:
            return data[end:]
        self.end_tokens = self.end_tokens[num_tokens:]
        if self._budget is not None and self._num_tokens >= self._budget and not self.end_tokens:
            self.end_tokens = self._table.next_tokens(self._marker_state)
        return None

    def copy(self) -> OpenBlock:
        """An independent object in the same state."""
        return copy.copy(self)
