"""Builds texts in llguidance's dialect of Lark, with texts, regular expressions and schemas of clients inside.

    grammar = LarkBuilder()
    arguments = grammar.add_rule("arguments", json_rule(schema, Whitespace.COMPACT))
    grammar.start(f"{quoted('<call>')} {arguments} {quoted('</call>')}")
    GrammarSpec(GrammarKind.LARK, grammar.text())

A rule is written in small letters and describes structure; a terminal is written in capitals and is one regular
expression. llguidance reads a terminal as one unit, which is much faster than a rule of single characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace

PRETTY_PATTERN: Final = r" |\n {0,32}"
"""Whitespace of `Whitespace.PRETTY` at each place where JSON allows it; no whitespace is always allowed too."""
ALLOWED_ESCAPES: Final = 'nrbtf\\"'
"""Characters that may follow a backslash in a JSON string."""
NOTHING: Final = '""'
"""The body of a rule for the empty text."""

_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9_]+")


class LarkBuilder:
    """A Lark grammar, rule by rule. Names are made unique, so that parts need not know of each other."""

    def __init__(self) -> None:
        self._bodies: dict[str, tuple[str, str]] = {}  # name -> body and options
        self._start = NOTHING

    def start(self, body: str) -> None:
        """Set the body of the rule for the whole text."""
        self._start = body

    def add_rule(self, name: str, body: str, *, options: str = "") -> str:
        """Add a rule.

        Args:
            name: its name begins with these letters; other characters than letters and digits are replaced.
            body: what it matches.
            options: such as `lazy`: the rule's regular expression matches as little as it can.

        Returns:
            its name.
        """
        return self._add(_NOT_IN_NAMES.sub("_", name.lower()).strip("_") or "rule", body, options)

    def add_terminal(self, name: str, body: str) -> str:
        """Add a terminal, with quoted texts, regular expressions and terminals in its body; returns its name."""
        return self._add((_NOT_IN_NAMES.sub("_", name.lower()).strip("_") or "text").upper(), body)

    def define(self, name: str, body: str) -> None:
        """Set the body of a rule again, which rules that refer to each other need."""
        self._bodies[name] = (body, "")

    def text(self) -> str:
        """The grammar."""
        lines = [f"start: {self._start}"]
        for name, (body, options) in self._bodies.items():
            lines.append(f"{name}[{options}]: {body}" if options else f"{name}: {body}")
        return "\n".join(lines) + "\n"

    def spec(self) -> GrammarSpec:
        """The grammar as a spec."""
        return GrammarSpec(GrammarKind.LARK, self.text())

    def _add(self, name: str, body: str, options: str = "") -> str:
        if name[0].isdigit() or name.lower() == "start":
            name = ("rule_" if name.islower() or name.isdigit() else "TEXT_") + name
        unique, count = name, 2
        while unique in self._bodies:
            unique = f"{name}_{count}"
            count += 1
        self._bodies[unique] = (body, options)
        return unique


def quoted(text: str) -> str:
    """A text as a Lark string; the empty text too."""
    return json.dumps(text)


def one_of(bodies: Iterable[str]) -> str:
    """Alternatives, in parentheses."""
    return f"({' | '.join(bodies)})"


def regex(pattern: str) -> str:
    """A regular expression as a Lark terminal, which matches its whole text.

    Args:
        pattern: accepted by `grammar.lowering.regex`, in llguidance's dialect.
    """
    return f"/{_with_slashes_escaped(pattern)}/" if pattern else NOTHING


def json_rule(
    schema: Mapping[str, Any] | bool,
    whitespace: Whitespace = Whitespace.PRETTY,
    whitespace_pattern: str = "",
) -> str:
    """A JSON value of a schema, as the body of a rule. Local `$ref`s in it are counted from this schema."""
    return f"%json {schema_text(schema, whitespace, whitespace_pattern)}"


def schema_text(
    schema: Mapping[str, Any] | bool,
    whitespace: Whitespace = Whitespace.PRETTY,
    whitespace_pattern: str = "",
) -> str:
    """A schema as llguidance takes it, with the rule for whitespace inside.

    A member `x-guidance` of the client is replaced: it holds settings of the library, not of the schema.
    """
    members: dict[str, Any] = {}
    if not isinstance(schema, bool):
        members |= schema
    elif not schema:
        members["allOf"] = [False]
    members["x-guidance"] = json_options(whitespace, whitespace_pattern)
    return json.dumps(members)


def json_options(whitespace: Whitespace, pattern: str = "") -> dict[str, Any]:
    """llguidance's options (`x-guidance`) for JSON: whitespace, and one spelling for each string.

    Escapes by number (backslash, u, four digits) are not allowed: with them, the name of a property would have a second
    spelling, to which the library does not apply the property's schema. Control characters without a short escape
    cannot be generated.

    Args:
        whitespace: the rule.
        pattern: a regular expression instead of the rule; "" for none.
    """
    if whitespace is Whitespace.PRETTY:
        pattern = pattern or PRETTY_PATTERN
    options: dict[str, Any] = {"json_allowed_escapes": ALLOWED_ESCAPES}
    if pattern:
        return options | {"whitespace_pattern": pattern, "whitespace_flexible": True}
    return options | {"whitespace_flexible": whitespace is Whitespace.ANY}


def embedded(spec: GrammarSpec) -> str:
    """A grammar of any kind as a part of another grammar's rule."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return json_rule(json.loads(spec.text), spec.whitespace, spec.whitespace_pattern)
        case GrammarKind.REGEX:
            return regex(spec.text)
        case GrammarKind.LARK:
            return f"%lark {{\n{spec.text}\n}}"


def _with_slashes_escaped(pattern: str) -> str:
    """A slash ends a regular expression in Lark, so it is escaped; a newline is written as an escape."""
    escaped = False
    parts: list[str] = []
    for char in pattern:
        if char == "/" and not escaped:
            parts.append("\\/")
        elif char == "\n":
            parts.append("n" if escaped else "\\n")
        else:
            parts.append(char)
        escaped = char == "\\" and not escaped
    return "".join(parts)
