"""Specs of the constraints that are one text or list: choices, regular expressions, grammars and schemas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ...runtime.config.answer_config import RequestLimits
from ...runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace
from ..backend import GrammarError
from ..regex_syntax import RegexError, checked_regex
from ..schema.report import SchemaReport
from .gbnf import gbnf_to_lark, is_gbnf
from .lark import LarkBuilder, quoted

ANY_OBJECT: Final = '{"type":"object"}'
"""The schema of `json_object`."""

_START: Final = re.compile(r"^[ \t]*[?!]?start\b[^\n:]*:", re.MULTILINE)


def schema_spec(report: SchemaReport, whitespace: Whitespace, whitespace_pattern: str = "") -> GrammarSpec:
    """The spec of a checked schema."""
    return GrammarSpec(GrammarKind.JSON_SCHEMA, report.text, whitespace, whitespace_pattern)


def choice_spec(choices: Sequence[str], at: str) -> GrammarSpec:
    """One of these texts.

    Raises:
        GrammarError: there are none, or one is empty.
    """
    if not choices:
        raise GrammarError(f"{at}: the list is empty, so that no answer fits", "invalid_grammar", at)
    for i, choice in enumerate(choices):
        if not choice:
            raise GrammarError(f"{at}[{i}]: a choice is empty; leave it out", "invalid_grammar", f"{at}[{i}]")
    grammar = LarkBuilder()
    grammar.start(" | ".join(map(quoted, dict.fromkeys(choices))))
    return grammar.spec()


def regex_spec(pattern: str, at: str, limits: RequestLimits) -> GrammarSpec:
    """Texts that a regular expression matches as a whole.

    Raises:
        GrammarError: a syntax error, look-around, a back-reference, or too long.
    """
    return GrammarSpec(GrammarKind.REGEX, regex_text(pattern, at, limits))


def regex_text(pattern: str, at: str, limits: RequestLimits) -> str:
    """A checked regular expression in llguidance's dialect.

    Raises:
        GrammarError: as `regex_spec`.
    """
    _check_size(pattern, "the regular expression", at, limits)
    try:
        return checked_regex(pattern, whole=True)
    except RegexError as error:
        raise GrammarError(f"{at}: {error}", "invalid_regex", at) from None


def grammar_spec(text: str, at: str, limits: RequestLimits) -> GrammarSpec:
    """A grammar in GBNF (`root ::= ...`) or Lark (`start: ...`); the sign of the first rule decides.

    Raises:
        GrammarError: too large, no rules, or a syntax error in GBNF. Errors in Lark are found when it is compiled.
    """
    _check_size(text, "the grammar", at, limits)
    if is_gbnf(text):
        return GrammarSpec(GrammarKind.LARK, gbnf_to_lark(text, at))
    if _START.search(text) is None:
        raise GrammarError(
            f'{at}: it has no rule "root ::= ..." (GBNF) and no rule "start: ..." (Lark)',
            "invalid_grammar",
            at,
        )
    return GrammarSpec(GrammarKind.LARK, text)


def _check_size(text: str, what: str, at: str, limits: RequestLimits) -> None:
    size, most = len(text.encode("utf-8", "surrogatepass")), limits.max_schema_kb << 10
    if size > most:
        raise GrammarError(
            f"{at}: {what} has {size:,} bytes, the limit is {most:,}; send a smaller one, or raise --max-schema-kb",
            "schema_too_complex",
            at,
        )
