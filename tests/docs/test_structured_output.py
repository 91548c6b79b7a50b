"""The tables of docs/structured_output.md are the tables of the code."""

from __future__ import annotations

import re

from engine.grammar.schema.keywords import ANNOTATION_FORMATS, FORMATS, KEYWORDS, Fate
from engine.tokenizer_manager.http.schema.constraint_fields import ConstraintFields
from engine.tokenizer_manager.http.schema.constraints import GRAMMAR_CODES

from .conftest import DOCS

PAGE = (DOCS / "structured_output.md").read_text(encoding="utf-8")


def test_keywords_are_those_of_the_check():
    expected = [
        f"| `{keyword}` | {rule.fate.value} | {rule.reason} | {rule.rewrite} |".replace("  ", " ")
        for keyword, rule in KEYWORDS.items()
        if rule.fate is not Fate.ANNOTATION
    ]
    written = [
        line.replace("  ", " ")
        for line in PAGE.splitlines()
        if re.match(r"\| `\$?\w+` \| (enforced|appr|refused)", line)
    ]

    assert written == expected, "\n".join(["write these rows:", *expected])


def test_annotations_and_formats_are_listed():
    annotations = {keyword for keyword, rule in KEYWORDS.items() if rule.fate is Fate.ANNOTATION}

    assert {name for name in annotations if f"`{name}`" not in PAGE} == set()
    assert {name for name in FORMATS | ANNOTATION_FORMATS if f"`{name}`" not in PAGE} == set()


def test_fields_and_codes_are_listed():
    codes = GRAMMAR_CODES | {"conflicting_constraints", "max_tokens_too_small"}

    assert {name for name in ConstraintFields.__struct_fields__ if f"`{name}" not in PAGE} == set()
    assert {code for code in codes if f"`{code}`" not in PAGE} == set()


def test_lines_fit_120_columns_outside_of_tables():
    assert [line for line in PAGE.splitlines() if len(line.encode()) > 120 and not line.startswith("|")] == []
