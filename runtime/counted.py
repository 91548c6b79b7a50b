"""`counted`: a number with its noun, in messages: `1 request`, `2 requests`."""

from __future__ import annotations


def counted(number: int | str, noun: str, plural: str = "", *, commas: bool = False) -> str:
    """The number and the noun in its form; a word instead of a number ("auto") takes the plural.

    Args:
        plural: if it is not the noun and an `s`.
        commas: between thousands: `1,024 pages`.
    """
    shown = f"{number:,}" if commas and isinstance(number, int) else number
    return f"{shown} {noun if number == 1 else plural or f'{noun}s'}"
