"""`bisect`: finds which of some switches must be off, with few attempts; several may be guilty."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """The result of a bisection.

    Attributes:
        guilty: the switches found so far that must be off.
        safe: switches that are off in an attempt that passed: `guilty` and nothing else, if it is complete.
        complete: False: there was no time for further attempts.
    """

    guilty: list[str]
    safe: list[str]
    complete: bool


def bisect(switches: Sequence[str], passes: Callable[[Collection[str]], bool | None]) -> Found:
    """Find the switches that must be off.

    With all switches on it fails, and with all of them off it passes. The last switch of the shortest beginning of the
    list that passes is guilty; then only that one is off, and the switches before it are searched, until it passes. So
    one fault among 16 switches takes five attempts. A switch that is no fault, but brings another faulty component into
    use, is found as if it were one; in the end those are dropped without which it passes, too.

    Args:
        passes: tries with some switches off; None: no time left.
    """
    guilty: list[str] = []
    candidates = list(switches)
    while candidates:
        low, high = 0, len(candidates)  # with candidates[:low] off it fails, with candidates[:high] it passes
        while high - low > 1:
            middle = (low + high) // 2
            result = passes([*guilty, *candidates[:middle]])
            if result is None:
                return Found(guilty, [*guilty, *candidates[:high]], False)
            low, high = (low, middle) if result else (middle, high)
        guilty.append(candidates[high - 1])
        candidates = candidates[: high - 1]
        if candidates:
            result = passes(guilty)
            if result is None:
                return Found(guilty, [*guilty, *candidates], False)
            if result:
                break
    for name in guilty[:-1]:
        fewer = [each for each in guilty if each != name]
        if passes(fewer):
            guilty = fewer
    return Found(guilty, guilty, True)
