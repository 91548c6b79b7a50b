"""`ReasoningCounter`: how many tokens of an answer are reasoning, for `usage`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from .parsing.reasoning_families import ReasoningFamily


class ReasoningCounter:
    """Counts the tokens inside the reasoning of one choice, without the tokens of its markers.

    A token is inside if it begins after the begin marker and before the end marker. Budgets count the same tokens.

    Attributes:
        count: so far. While a block is open, tokens of a begun end marker are in it.
    """

    __slots__ = ("_family", "_inside", "_lengths", "_tail", "_token_bytes", "_waits", "count")

    def __init__(
        self, family: ReasoningFamily | None, opened: bool, token_bytes: Callable[[int], bytes]
    ) -> None:
        """Begin an answer.

        Args:
            family: of the model; None: it does not reason.
            opened: the prompt ends inside a block.
            token_bytes: `Tokenizer.token_bytes`.
        """
        self.count = 0
        self._family = family
        self._inside = opened and family is not None
        self._waits = family is not None and not opened  # for a begin marker
        self._token_bytes = token_bytes
        self._tail = b""  # the end of the text in which a marker may be complete with the next token
        self._lengths: deque[int] = deque()  # of the tokens in the tail

    def add(self, token_ids: Iterable[int]) -> None:
        """More tokens of the answer."""
        family = self._family
        if family is None:
            return
        for token_id in token_ids:
            if self._inside:
                self._add_inside(self._token_bytes(token_id), family)
            elif self._waits:
                self._add_outside(self._token_bytes(token_id), family)

    def _add_inside(self, data: bytes, family: ReasoningFamily) -> None:
        self.count += 1
        self._tail += data
        self._lengths.append(len(data))
        end = family.end.encode()
        index = self._tail.find(end)
        if index >= 0:
            position = len(self._tail)
            while self._lengths and position - self._lengths[-1] >= index:
                position -= self._lengths.pop()
                self.count -= 1
            self._inside = False
            self._waits = family.repeats
            self._clear()
            return
        while self._lengths and len(self._tail) - self._lengths[0] >= len(end):
            self._tail = self._tail[self._lengths.popleft() :]

    def _add_outside(self, data: bytes, family: ReasoningFamily) -> None:
        begin = family.begin.encode()
        self._tail += data
        if begin in self._tail:
            self._inside = True
            self._waits = False
            self._clear()
        elif family.repeats:
            self._tail = self._tail[-len(begin) :]
        elif not begin.startswith(self._tail.lstrip()[: len(begin)]):
            self._waits = False  # the answer begins with something else

    def _clear(self) -> None:
        self._tail = b""
        self._lengths.clear()
