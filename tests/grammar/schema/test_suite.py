"""The JSON-Schema test suite against the compiled grammars: what the check lets through as strict is enforced.

`fixtures/suite.json` has cases of the suite (MIT, `fixtures/LICENSE`) for four drafts: draft, file, description,
schema, valid documents, invalid documents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.grammar.backend import GrammarError
from engine.grammar.schema.check import check_schema
from engine.grammar.schema.report import SchemaReport
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace

from ..byte_grammar import ByteGrammar

SUITE = Path(__file__).parent / "fixtures" / "suite.json"
WITH_REFERENCES = {"refRemote", "ref", "defs", "definitions", "dynamicRef", "recursiveRef", "anchor", "id"}
CODES = {"invalid_schema", "unsupported_schema", "unsatisfiable_schema", "invalid_regex"}


class Case(NamedTuple):
    """A schema of the suite with its documents."""

    draft: str
    file: str
    description: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


CASES = [Case(*case) for case in json.loads(SUITE.read_text())]


def compact(document: Any) -> str | None:
    """The document as the grammar would write it; None if it is no text."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


def checked(case: Case, *, strict: bool) -> SchemaReport | GrammarError:
    try:
        return check_schema(case.schema, strict=strict, at="schema")
    except GrammarError as error:
        return error


def grammar_of(report: SchemaReport) -> ByteGrammar:
    return ByteGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, report.text, Whitespace.COMPACT))


@pytest.mark.parametrize("draft", sorted({case.draft for case in CASES}))
def test_no_invalid_document_is_accepted(draft):
    wrong = []
    num_checked = 0
    for case in CASES:
        if case.draft != draft or isinstance(report := checked(case, strict=True), GrammarError):
            continue
        grammar = grammar_of(report)
        assert grammar.error == "", (case.description, grammar.error)
        for document in case.invalid:
            text = compact(document)
            if text is not None:
                num_checked += 1
                wrong += [(case.description, text)] if grammar.accepts(text) else []

    assert wrong == []
    assert num_checked > 30


def test_what_is_approximated_compiles_and_warns():
    for case in CASES:
        if isinstance(report := checked(case, strict=False), GrammarError):
            continue
        exact = not isinstance(checked(case, strict=True), GrammarError)

        assert grammar_of(report).error == "", case.description
        assert exact or report.warnings, case.description


def test_a_refused_schema_is_refused_by_name_and_place():
    for case in CASES:
        for strict in (True, False):
            if isinstance(error := checked(case, strict=strict), GrammarError):
                assert error.code in CODES, case.description
                assert error.at.startswith("schema") and error.message.startswith(f"{error.at}: "), error
                if not strict and case.valid:  # only references that leave the schema
                    assert "ref" in error.message.lower() or error.code == "unsupported_schema", error


def test_schemas_without_distant_references_pass_without_strict():
    refused = {
        case.description
        for case in CASES
        if case.file not in WITH_REFERENCES
        and "Ref" not in case.description
        and case.valid
        and isinstance(checked(case, strict=False), GrammarError)
    }

    assert refused == {"nul characters in strings"}  # which JSON writes as an escape by number


def test_most_valid_documents_are_accepted():
    """The rest: other types where `type` is left out, another order of properties, 1.0 as an integer."""
    accepted: list[bool] = []
    for case in CASES:
        if not isinstance(report := checked(case, strict=False), GrammarError):
            grammar = grammar_of(report)
            accepted += map(grammar.accepts, filter(None, map(compact, case.valid)))

    assert sum(accepted) > 0.7 * len(accepted)


def test_samples_are_documents_of_the_schema():
    num_samples = 0
    for case in CASES:
        report = checked(case, strict=False)
        if isinstance(report, GrammarError) or report.compact_sample is None:
            continue
        num_samples += 1
        assert grammar_of(report).accepts(report.compact_sample), (case.description, report.compact_sample)
        pretty = ByteGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, report.text, Whitespace.PRETTY))
        text = json.dumps(report.sample, ensure_ascii=False, indent=2)
        assert pretty.accepts(text), (case.description, text)

    assert num_samples > 0.5 * len(CASES)
