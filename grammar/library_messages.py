"""Error texts of llguidance, turned into `GrammarError`s and texts for the client."""

from __future__ import annotations

import re
from typing import Final

from ..runtime.grammar_use import GrammarKind
from .backend import GrammarError

MAX_MESSAGE_CHARS: Final = 300
_TOO_COMPLEX: Final = re.compile(
    r"too (?:large|many|big|complex|deep|long)|toocomplex|fuel|limit|exceed|maximum size", re.IGNORECASE
)
_UNSATISFIABLE: Final = re.compile(r"unsatisfiable", re.IGNORECASE)
_UNSUPPORTED: Final = re.compile(r"unimplemented|not supported|unknown format|unsupported", re.IGNORECASE)
_NO_TEXT: Final = re.compile(r"noextension", re.IGNORECASE)
_REGEX_ERROR: Final = re.compile(r"regex parse error:\n(?P<body>.*?)error: (?P<cause>[^\n]*)", re.DOTALL)
_SYNTAX: Final = {
    GrammarKind.JSON_SCHEMA: ("invalid_schema", "the schema"),
    GrammarKind.REGEX: ("invalid_regex", "the regular expression"),
    GrammarKind.LARK: ("invalid_grammar", "the grammar"),
}


def translate_error(kind: GrammarKind, text: str, source: str = "") -> GrammarError:
    """The error for a client.

    Args:
        kind: of the grammar.
        text: of the library.
        source: the text of the grammar; its size is part of the message if it is too complex.
    """
    code, noun = _SYNTAX[kind]
    cause = clean_message(text)
    if _NO_TEXT.search(text):
        return GrammarError(
            f"{noun} allows no text", "unsatisfiable_schema" if kind is GrammarKind.JSON_SCHEMA else code
        )
    if match := _REGEX_ERROR.search(text):
        if kind is GrammarKind.JSON_SCHEMA and _UNSUPPORTED.search(match["cause"]):
            code = "unsupported_schema"
        return GrammarError(f"{noun} has an invalid pattern: {_regex_cause(match)}", code)
    if _UNSATISFIABLE.search(text):
        return GrammarError(
            f"{noun} allows no text: {cause}",
            "unsatisfiable_schema" if kind is not GrammarKind.REGEX else code,
        )
    if _UNSUPPORTED.search(text) and kind is GrammarKind.JSON_SCHEMA:
        return GrammarError(f"{noun} cannot be enforced: {cause}", "unsupported_schema")
    if _TOO_COMPLEX.search(text):
        return GrammarError(
            f"{noun} has {len(source):,} characters and is too complex: {cause}", "schema_too_complex"
        )
    return GrammarError(f"{noun} is not valid: {cause}", code)


def is_limit(text: str, stop_reason: str) -> bool:
    """Whether an error of a matcher is one of the library's limits."""
    return stop_reason in {"ParserTooComplex", "LexerTooComplex"} or _TOO_COMPLEX.search(text) is not None


def clean_message(text: str) -> str:
    """The library's text in one line, without excerpts of the source and dumps."""
    text = text.replace("<non-verbose/>", "")
    lines = [line.strip() for line in text.splitlines() if not re.match(r"\s*(?:\d+ \||\^)", line)]
    line = " ".join(filter(None, lines))
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}..."


def _regex_cause(match: re.Match[str]) -> str:
    """The cause, and the position if the library marks one in a pattern of one line."""
    lines = match["body"].splitlines()
    if len(lines) >= 2 and lines[1].strip("^ ") == "" and "^" in lines[1]:
        indent = len(lines[0]) - len(lines[0].lstrip(" "))
        position = lines[1].index("^") - min(indent, 4)
        return f"{match['cause']} (at position {position})"
    return match["cause"]
