"""Grammars that take too long or too much to compile; each has its own text, so that no result serves two of them."""

from __future__ import annotations

from typing import Any, Final


def _regex(number: int) -> dict[str, Any]:
    return {"regex": f"(([a-z]{{1,{90 + number}}}){{1,100}}){{1,100}}x"}


def _quadratic(number: int) -> dict[str, Any]:
    names = [f"{number}_{i}" for i in range(6000)]
    return {"guided_json": {"type": "object", "properties": {name: {"type": "integer"} for name in names}}}


def _words(number: int) -> dict[str, Any]:
    return {"guided_json": {"enum": [f"{number} {i} word" for i in range(100_000)]}}


def _deep(number: int) -> dict[str, Any]:
    return {"guided_json": "[" * (30_000 + number)}


def _recursive(number: int) -> dict[str, Any]:
    return {"grammar": f'root ::= root root | root "{number}"'}


_KINDS: Final = (_quadratic, _regex, _quadratic, _words, _deep, _recursive)


def bomb(number: int) -> dict[str, Any]:
    """The fields of the request of this number."""
    return _KINDS[number % len(_KINDS)](number)
