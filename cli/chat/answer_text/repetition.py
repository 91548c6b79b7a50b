"""`Repetition`: notices that an answer repeats the same text without end, as small models do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIN_CHARS: Final = 1000
MIN_TIMES: Final = 8
_WINDOW: Final = 4000
_STEP: Final = 200
"""New characters between two searches."""


@dataclass(frozen=True, slots=True)
class Loop:
    """The end of a text is `unit`, `times` times in a row."""

    unit: str
    times: int


class Repetition:
    """Searches the end of a growing text for a unit that is repeated.

    A loop is at least MIN_CHARS characters of at least MIN_TIMES equal units; the longest unit that is noticed has
    _WINDOW / MIN_TIMES characters. Tables, lists and JSON differ from one line to the next, so they are no loops.
    """

    def __init__(self) -> None:
        self._tail = ""
        self._num_new = 0

    def add(self, text: str) -> Loop | None:
        """Add the next piece; returns the loop at the end of the text, if there is one."""
        self._tail = (self._tail + text)[-_WINDOW:]
        self._num_new += len(text)
        if self._num_new < _STEP:
            return None
        self._num_new = 0
        return find_loop(self._tail)


def find_loop(text: str) -> Loop | None:
    """The loop at the end of a text; the shortest unit wins.

    Source: the prefix function of Knuth, Morris and Pratt, over the reversed text. O(len(text)).
    """
    reverse = text[::-1]
    borders = [0] * len(reverse)
    for end in range(1, len(reverse)):
        border = borders[end - 1]
        while border and reverse[end] != reverse[border]:
            border = borders[border - 1]
        borders[end] = border + (reverse[end] == reverse[border])
        length = end + 1
        period = length - borders[end]
        if length >= MIN_CHARS and length >= MIN_TIMES * period:
            return Loop(text[len(text) - period :], length // period)
    return None
