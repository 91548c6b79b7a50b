"""`ValueGrammars`: the grammar of one argument in formats that write each argument by itself.

A string of a tagged format has no quotes: its text is a terminal that ends with the marker after it, limited as the
schema limits the string, and never a text that `json_of` would read as a value of another kind that the schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from ...grammar.lowering.lark import NOTHING, LarkBuilder, json_rule, one_of, quoted, regex
from ...runtime.grammar_use import Whitespace
from .parameters import (
    WORDS,
    Kinds,
    Parameters,
    Unenforceable,
    branches_of,
    json_of,
    listed_values,
)
from .parsing.families import Pieces, ToolFamily

_ANY_TEXT: Final = r"/(.|\n)*/"
_SPACE: Final = r"[\s\x1c-\x1f]*"
_BEGINNINGS: Final = {"integer": "[-0-9]", "number": "[-0-9]", "array": r"\[", "object": r"\{"}
"""First characters of the values of a kind. A text that may also be such a value does not begin with them."""

_MEMBER: Final = r"[A-Za-z0-9_.\-]{1,64}"
_NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?"
_ESCAPE: Final = r"\\[\\\"'bfnrt]"
_PYTHON_STRING: Final = rf"\"([^\"\\\n]|{_ESCAPE})*\"|'([^'\\\n]|{_ESCAPE})*'"

_HEX: Final = "[0-9A-Fa-f]{1,4}"
_LABEL: Final = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DAY: Final = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    "02-(?:0[1-9]|[12][0-9]))"
)
_HOUR: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_PERIOD: Final = "T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DAYS: Final = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_URI: Final = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})"
FORMAT_TEXTS: Final = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_PERIOD})?|{_PERIOD}|[0-9]{{1,9}}W)",
    "email": rf"[A-Za-z0-9_+-]{{1,20}}(?:\.[A-Za-z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,2}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": "|".join(
        [
            f"(?:{_HEX}:){{7}}{_HEX}",
            *(
                f"(?:{_HEX}(?::{_HEX}){{0,{before}}})?::(?:{_HEX}(?::{_HEX}){{0,{5 - before}}})?"
                for before in range(6)
            ),
        ]
    ),
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?(?:/{_URI}*)*|{_URI}+)",
}
"""Texts of each enforced `format`; some valid ones are missing, and all of these are valid."""


class ValueGrammars:
    """Makes the bodies of rules for one format."""

    def __init__(
        self,
        family: ToolFamily,
        whitespace: Whitespace,
        literal: Callable[[Pieces], str],
        specials: re.Pattern[str] | None,
    ) -> None:
        """Prepare.

        Args:
            family: tagged or pythonic.
            whitespace: in JSON.
            literal: writes markers into a grammar.
            specials: finds the special tokens among the markers; None: there are none.
        """
        self._family = family
        self._whitespace = whitespace
        self._literal = literal
        self._specials = specials
        self._end = "".join(family.parameter_end)

    def tagged(self, builder: LarkBuilder, parameters: Parameters, schema: Any) -> str:
        """A value of a tagged parameter and the marker after it; "" if no value is allowed.

        Raises:
            Unenforceable: the schema limits its texts in a way that the grammar cannot.
        """
        kinds = parameters.kinds_of(schema)
        has_flag = self._family.string_flag
        rest = kinds - {"string"}
        bodies = []
        if "string" in kinds:
            part = parameters.narrowed(schema, frozenset({"string"}))
            limits, texts = self._limits(parameters, part, frozenset() if has_flag else rest)
            if texts:
                bodies.append(_joined(self._flag("true"), self.text(builder, limits)))
            if not has_flag:
                # The lexer reads the longest terminal: next to texts, a word is one with the marker after it.
                words = sorted(rest & WORDS.keys())
                bodies += [self._closed(builder, quoted(word)) for word in words]
                rest -= WORDS.keys()
        if rest:
            value = builder.add_rule("value", self._json(parameters, schema, rest))
            bodies.append(_joined(self._flag("false"), value, self._literal((self._end,))))
        return one_of(bodies) if bodies else ""

    def pythonic(self, builder: LarkBuilder, parameters: Parameters, schema: Any) -> str:
        """A value as Python writes it: its words are Python's, everything else is JSON; "" if no value is allowed.

        With quotes of the family's own, strings are texts between them, and everything else is JSON.
        """
        kinds, bodies = parameters.kinds_of(schema), []
        if not self._family.quote:
            bodies = [quoted(WORDS[kind][1]) for kind in sorted(kinds & WORDS.keys())]
            kinds -= WORDS.keys()
        elif "string" in kinds:
            part = parameters.narrowed(schema, frozenset({"string"}))
            limits, texts = self._limits(parameters, part, frozenset())
            quote = self._literal((self._family.quote,))
            bodies = [_joined(quote, self.text(builder, limits))] if texts else []
            kinds -= {"string"}
        if kinds:
            bodies.append(self._json(parameters, schema, kinds))
        return one_of(bodies) if bodies else ""

    def any_value(self, builder: LarkBuilder) -> str:
        """Any value of a pythonic call."""
        value = builder.add_rule("value", NOTHING)
        if self._family.quote:
            text = _joined(self._literal((self._family.quote,)), self.text(builder))
            words, key, comma = "true|false|null", f'/{_MEMBER}/ ":"', '","'
        else:
            text = builder.add_terminal("python_string", f"/{_PYTHON_STRING}/")
            words, key, comma = "True|False|None", f"{text} /: ?/", "/, ?/"
        items, members = (f"({each} ({comma} {each})*)?" for each in (value, f"{key} {value}"))
        nested = f'"[" {items} "]" | "{{" {members} "}}"'
        builder.define(value, f"({text} | /{_NUMBER}/ | /{words}/ | {nested})")
        return value

    def text(self, builder: LarkBuilder, limits: str = "") -> str:
        """A text up to the marker after a parameter; whitespace in front of the marker is a part of unlimited texts.

        Args:
            builder: of the grammar.
            limits: a terminal of the texts that are allowed; "" for all.
        """
        marker = self._end.strip()
        if limits:
            return self._closed(builder, f"{limits} & ~/(.|\\n)*{_escaped(marker)}(.|\\n)*/")
        after = self._end.partition(marker)[2]
        special = self._specials.search(marker) if self._specials else None
        if special is not None:  # never a part of the text
            text = builder.add_rule("text", regex(f"(.|\\n)*{re.escape(marker[: special.start()])}"))
            return _joined(text, self._literal((marker[special.start() :], after)))
        text = builder.add_rule("text", f"%lark {{\nstart[suffix={quoted(marker)}]: {_ANY_TEXT}\n}}")
        return _joined(text, quoted(after) if after else "")

    def _closed(self, builder: LarkBuilder, text: str) -> str:
        """A terminal of a text with what follows it, up to the first special token or the end of the marker."""
        marker = self._end.strip()
        cut = self._end.index(marker) + len(marker)
        if self._specials and (special := self._specials.search(self._end)):
            cut = special.start()
        closing = quoted(self._end[:cut]) if cut else ""
        terminal = builder.add_terminal("text", _joined(f"({text})", closing))
        return _joined(terminal, self._literal((self._end[cut:],)))

    def _flag(self, value: str) -> str:
        return quoted(f' string="{value}">') if self._family.string_flag else ""

    def _json(self, parameters: Parameters, schema: Any, kinds: Kinds) -> str:
        return json_rule(parameters.whole(parameters.narrowed(schema, kinds)), self._whitespace)

    def _limits(self, parameters: Parameters, schema: Any, others: Kinds) -> tuple[str, bool]:
        """The terminal of a string's texts, "" for all; and whether there are any."""
        if isinstance(schema, dict) and (lists := list(listed_values(schema))):
            kinds = others | {"string"}
            readable = [
                text
                for text in lists[0]
                if isinstance(text, str) and json.loads(json_of(text, kinds)) == text
            ]
            if not readable:
                return "", False
            schema, others = {**schema, "enum": readable}, frozenset()
        limits = _text_terminal(parameters, schema)
        spellings = [spelling for kind in sorted(others & WORDS.keys()) for spelling in WORDS[kind]]
        begins = sorted({_BEGINNINGS[kind] for kind in others & _BEGINNINGS.keys()})
        excluded = [f"~/{_SPACE}({'|'.join(spellings)}){_SPACE}/"] if spellings else []
        excluded += [f"~/{_SPACE}{begin}(.|\\n)*/" for begin in begins]
        return " & ".join([limits or _ANY_TEXT, *excluded]) if limits or excluded else "", True


def _text_terminal(parameters: Parameters, schema: Any, depth: int = 0) -> str:
    """The terminal of the texts of a string's schema; "" for all.

    Raises:
        Unenforceable: a keyword is not one for texts.
    """
    if not isinstance(schema, dict):
        return ""
    if depth > 32:
        raise Unenforceable("a recursive reference of a string")
    parts = [
        one_of(quoted(value) for value in values if isinstance(value, str))
        for values in listed_values(schema)
    ]
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    if "pattern" in schema:
        parts.append(regex(searching(schema["pattern"])))
    if schema.get("format") in FORMAT_TEXTS:
        parts.append(regex(FORMAT_TEXTS[schema["format"]]))
    inner = [parameters.target_of(schema), *branches_of(schema, "allOf")]
    parts += [_text_terminal(parameters, each, depth + 1) for each in inner if each is not None]
    for keyword in ("anyOf", "oneOf"):
        branches = [_text_terminal(parameters, each, depth + 1) for each in branches_of(schema, keyword)]
        if branches and all(branches):
            parts.append(one_of(branches))
    return " & ".join(f"({part})" for part in parts if part)


def searching(pattern: str) -> str:
    """A pattern that may match anywhere, as one of the whole text.

    Raises:
        Unenforceable: it has an anchor inside a group.
    """
    branches = []
    for parts in _alternatives(pattern):
        begin = "" if parts[:1] == ["^"] else r"(?:.|\n)*"
        end = "" if parts[-1:] == ["$"] else r"(?:.|\n)*"
        inner = parts[not begin : len(parts) - (not end)]
        if "^" in inner or "$" in inner:
            raise Unenforceable(f"the pattern {pattern[:60]!r}, which has an anchor inside a group")
        branches.append(f"{begin}(?:{''.join(inner)}){end}" if inner else begin + end)
    return "|".join(branches)


_PART: Final = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|.", re.DOTALL)
"""An escape, a class, or another character of a regular expression."""


def _alternatives(pattern: str) -> list[list[str]]:
    """The alternatives at the top of a regular expression, in parts."""
    found: list[list[str]] = [[]]
    depth = 0
    for match in _PART.finditer(pattern):
        part = match[0]
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append([])
        else:
            found[-1].append(part)
    return found


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
