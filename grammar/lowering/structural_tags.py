"""`StructuralTags`: structural tags of SGLang and vLLM, in both shapes, as a `GrammarUse`.

    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}
    {"type": "structural_tag", "format": {"type": "triggered_tags" | "sequence" | ..., ...}}

Tags that begin after a trigger in free text become `Triggered` grammars; a tree of any other form is the grammar of the
whole answer, one Lark text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from ...runtime.config.answer_config import RequestLimits
from ...runtime.grammar_use import GrammarUse, Triggered, Whitespace
from ..backend import GrammarError
from ..schema.check import check_schema
from ..schema.report import shown
from .lark import NOTHING, LarkBuilder, embedded, json_rule, one_of, quoted, regex
from .simple import grammar_spec, regex_text

Node = dict[str, Any]

MAX_DEPTH: Final = 32
_KINDS: Final = (
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
)
_ANY_TEXT: Final = "/(?s:.*)/"


class StructuralTags:
    """Reads one structural tag.

    Attributes:
        warnings: of the schemas inside.
    """

    def __init__(
        self,
        at: str,
        *,
        strict: bool,
        limits: RequestLimits,
        whitespace: Whitespace,
        whitespace_pattern: str = "",
    ) -> None:
        self._at = at
        self._strict = strict
        self._limits = limits
        self._whitespace = whitespace
        self._whitespace_pattern = whitespace_pattern
        self.warnings: list[str] = []

    def use(self, tag: Node) -> GrammarUse:
        """Return the constraint of a request with this tag.

        Raises:
            GrammarError: it has a wrong form, or a part of it is invalid.
        """
        if "structures" in tag or "triggers" in tag:
            return self._old(tag)
        if "format" not in tag:
            raise self._error("", 'it has neither "format" nor "structures" with "triggers"')
        root = self._node(tag["format"], ".format")
        if root["type"] == "triggered_tags" and not root.get("at_least_one"):
            tags = [
                (self._begin(each, at), self._tail(each, at))
                for each, at in self._list(root, "tags", ".format")
            ]
            triggers = self._strings(root, "triggers", ".format")
            return GrammarUse(
                triggered=self._triggered(triggers, tags, ".format"),
                ends_after_first=bool(root.get("stop_after_first")),
            )
        grammar = LarkBuilder()
        grammar.start(self._body(root, ".format", grammar, 0, None))
        return GrammarUse(spec=grammar.spec())

    # ------------------------------------------------------------ triggers

    def _old(self, tag: Node) -> GrammarUse:
        tags: list[tuple[str, Callable[[LarkBuilder], str]]] = []
        for structure, at in self._list(tag, "structures", ""):
            begin, end = self._string(structure, "begin", at), self._string(structure, "end", at, empty=True)
            body = self._schema(structure.get("schema", {}), f"{at}.schema")
            tags.append((begin, lambda grammar, body=body, end=end: f"{body} {quoted(end)}"))  # type: ignore[misc]
        return GrammarUse(triggered=self._triggered(self._strings(tag, "triggers", ""), tags, ""))

    def _tail(self, tag: Node, at: str) -> Callable[[LarkBuilder], str]:
        return lambda grammar: self._content_and_end(tag, at, grammar, 0)

    def _triggered(
        self, triggers: list[str], tags: list[tuple[str, Callable[[LarkBuilder], str]]], at: str
    ) -> tuple[Triggered, ...]:
        """One grammar for each trigger: the rest of `begin`, the content and `end` of its tags."""
        self._check_triggers(triggers, [begin for begin, _ in tags], at)
        made: list[Triggered] = []
        for trigger in triggers:
            grammar = LarkBuilder()
            bodies = [
                f"{quoted(begin[len(trigger) :])} {tail(grammar)}"
                for begin, tail in tags
                if begin.startswith(trigger)
            ]
            grammar.start(" | ".join(bodies))
            made.append(Triggered(trigger.encode(), grammar.spec()))
        return tuple(made)

    def _check_triggers(self, triggers: list[str], begins: list[str], at: str) -> None:
        for i, trigger in enumerate(triggers):
            if not any(begin.startswith(trigger) for begin in begins):
                raise self._error(f"{at}.triggers[{i}]", f"no tag begins with {shown(trigger)}")
            if any(trigger.startswith(other) for j, other in enumerate(triggers) if j != i):
                raise self._error(f"{at}.triggers[{i}]", f"{shown(trigger)} begins with another trigger")
        for begin in begins:
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise self._error(f"{at}.triggers", f"no trigger stands at the beginning of {shown(begin)}")

    # ------------------------------------------------------------ the tree

    def _body(self, node: Node, at: str, grammar: LarkBuilder, depth: int, after: str | None) -> str:
        """A node in Lark.

        Args:
            after: the text that follows and ends free text; None: nothing follows.
        """
        if depth > MAX_DEPTH:
            raise self._error(at, f"it is nested more than {MAX_DEPTH} deep", "schema_too_complex")
        match node["type"]:
            case "const_string":
                return quoted(self._string(node, "value", at, empty=True))
            case "json_schema":
                if node.get("style", "json") != "json":
                    raise self._error(f"{at}.style", f"{shown(node['style'])} is not supported; use json")
                return self._schema(node.get("json_schema"), f"{at}.json_schema")
            case "regex":
                pattern = self._string(node, "pattern", at, empty=True)
                return regex(regex_text(pattern, self._at + f"{at}.pattern", self._limits))
            case "grammar":
                text = self._string(node, "grammar", at)
                return embedded(grammar_spec(text, self._at + f"{at}.grammar", self._limits))
            case "any_text":
                return self._free(grammar, after)
            case "sequence":
                return self._sequence(node, at, grammar, depth)
            case "or":
                return one_of(
                    self._body(each, place, grammar, depth + 1, after)
                    for each, place in self._list(node, "elements", at)
                )
            case "tag":
                return self._tag(node, at, grammar, depth)
            case "triggered_tags":
                return self._triggered_inside(node, at, grammar, depth)
            case _:
                return self._separated(node, at, grammar, depth)

    def _sequence(self, node: Node, at: str, grammar: LarkBuilder, depth: int) -> str:
        elements = self._list(node, "elements", at)
        bodies: list[str] = []
        skip = False
        for i, (element, place) in enumerate(elements):
            if skip:  # the end of the free text before it
                skip = False
                if element["type"] == "tag":
                    bodies.append(self._content_and_end(element, place, grammar, depth + 1))
                continue
            last = i + 1 == len(elements)
            if element["type"] == "any_text" and not last:
                following = elements[i + 1][0]
                if following["type"] not in ("const_string", "tag"):
                    raise self._error(
                        place, "any_text must be the last element, or a const_string or tag must follow"
                    )
                end = following.get("value" if following["type"] == "const_string" else "begin")
                if not isinstance(end, str) or not end:
                    raise self._error(
                        elements[i + 1][1], "the text after any_text must be a string that is not empty"
                    )
                bodies.append(self._free(grammar, end))
                skip = True
            else:
                if not last and element["type"] in ("triggered_tags", "or"):
                    self._refuse_open_end(element, place)
                bodies.append(self._body(element, place, grammar, depth + 1, None))
        return " ".join(bodies)

    def _refuse_open_end(self, node: Node, at: str) -> None:
        """Free text in front of another element would have no end."""
        pending = [node]
        while pending:
            each = pending.pop()
            if each.get("type") in ("any_text", "triggered_tags"):
                raise self._error(at, f"{each['type']} inside it must be the last element of the sequence")
            if each.get("type") in ("or", "sequence") and isinstance(each.get("elements"), list):
                pending += (inner for inner in each["elements"] if isinstance(inner, dict))

    def _tag(self, node: Node, at: str, grammar: LarkBuilder, depth: int) -> str:
        return f"{quoted(self._begin(node, at))} {self._content_and_end(node, at, grammar, depth)}"

    def _content_and_end(self, node: Node, at: str, grammar: LarkBuilder, depth: int) -> str:
        content = self._node(node.get("content"), f"{at}.content")
        end = node.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(each, str) for each in ends):
            raise self._error(f"{at}.end", "it must be a string or a list of strings")
        if content["type"] == "any_text" and any(ends):
            if len(ends) > 1:
                raise self._error(f"{at}.end", "any_text with several ends is not supported; give one")
            return self._free(grammar, ends[0])
        self._check_closed(content, f"{at}.content", has_end=any(ends))
        body = self._body(content, f"{at}.content", grammar, depth + 1, None)
        return f"{body} {one_of(map(quoted, ends)) if len(ends) > 1 else quoted(ends[0])}"

    def _check_closed(self, content: Node, at: str, *, has_end: bool) -> None:
        if has_end and content["type"] != "any_text":
            self._refuse_open_end({"type": "or", "elements": [content]}, at)

    def _triggered_inside(self, node: Node, at: str, grammar: LarkBuilder, depth: int) -> str:
        tags = self._list(node, "tags", at)
        begins = [self._begin(each, place) for each, place in tags]
        triggers = self._strings(node, "triggers", at)
        self._check_triggers(triggers, begins, at)
        rules: list[str] = []
        whole: list[str] = []
        for trigger in triggers:
            rests = [
                f"{quoted(begin[len(trigger) :])} {self._content_and_end(each, place, grammar, depth + 1)}"
                for begin, (each, place) in zip(begins, tags, strict=True)
                if begin.startswith(trigger)
            ]
            rest = grammar.add_rule("tag", one_of(rests))
            rules.append(grammar.add_rule("free_tag", f"{self._free(grammar, trigger)} {rest}"))
            whole.append(f"{quoted(trigger)} {rest}")
        others = NOTHING if node.get("stop_after_first") else f"{one_of(rules)}* {_ANY_TEXT}"
        if node.get("at_least_one"):
            return f"{one_of(whole)} {others}"
        return f"({one_of(rules)} | {_ANY_TEXT})" if node.get("stop_after_first") else others

    def _separated(self, node: Node, at: str, grammar: LarkBuilder, depth: int) -> str:
        rule = grammar.add_rule(
            "tag",
            one_of(
                self._tag(each, place, grammar, depth + 1) for each, place in self._list(node, "tags", at)
            ),
        )
        separator = self._string(node, "separator", at, empty=True)
        body = rule if node.get("stop_after_first") else f"{rule} ({quoted(separator)} {rule})*"
        return body if node.get("at_least_one") else f"({body})?"

    def _free(self, grammar: LarkBuilder, end: str | None) -> str:
        """Free text; with `end` it goes on to the first place where that stands."""
        if not end:
            return _ANY_TEXT
        return grammar.add_rule(
            "free", f"/(?s:.*){re.escape(end).replace('/', chr(92) + '/')}/", options="lazy"
        )

    def _schema(self, schema: Any, at: str) -> str:
        report = check_schema(schema, strict=self._strict, at=self._at + at, limits=self._limits)
        self.warnings += report.warnings
        return json_rule(report.schema, self._whitespace, self._whitespace_pattern)

    # ------------------------------------------------------------ reading

    def _node(self, value: Any, at: str) -> Node:
        if not isinstance(value, dict):
            raise self._error(at, f"it is {shown(value)}, but it must be an object with a type")
        if value.get("type") not in _KINDS:
            raise self._error(
                f"{at}.type", f"{shown(value.get('type'))} is not supported; there are {', '.join(_KINDS)}"
            )
        return value

    def _list(self, node: Node, name: str, at: str) -> list[tuple[Node, str]]:
        values = node.get(name)
        if not isinstance(values, list) or not values:
            raise self._error(f"{at}.{name}", "it must be a list that is not empty")
        made: list[tuple[Node, str]] = []
        for i, value in enumerate(values):
            place = f"{at}.{name}[{i}]"
            if name == "elements":
                value = self._node(value, place)
            elif not isinstance(value, dict) or (name == "tags" and value.get("type", "tag") != "tag"):
                raise self._error(
                    place, "it must be an object" if name == "structures" else "it must be a tag"
                )
            made.append((value, place))
        return made

    def _begin(self, tag: Node, at: str) -> str:
        return self._string(tag, "begin", at)

    def _string(self, node: Node, name: str, at: str, *, empty: bool = False) -> str:
        value = node.get(name)
        if not isinstance(value, str) or not (value or empty):
            raise self._error(f"{at}.{name}", f"it is {shown(value)}, but it must be a string")
        return value

    def _strings(self, node: Node, name: str, at: str) -> list[str]:
        values = node.get(name)
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(each, str) and each for each in values)
        ):
            raise self._error(f"{at}.{name}", "it must be a list of strings that are not empty")
        return list(dict.fromkeys(values))

    def _error(self, at: str, text: str, code: str = "invalid_grammar") -> GrammarError:
        return GrammarError(f"{self._at}{at}: {text}", code, self._at + at)
