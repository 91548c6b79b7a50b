"""`LLGuidanceBackend`: masks, ends, whitespace, limits and error texts, with a tiny tokenizer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.grammar.backend import GrammarError, Matcher, MatcherErrorCode, Vocabulary
from engine.grammar.compile.sandbox import compile_grammar
from engine.grammar.llguidance_backend import LLGuidanceBackend
from engine.grammar.llguidance_matcher import translate_error
from engine.grammar.markers import allows
from engine.grammar.vocabulary import TokenizerVocabulary
from engine.runtime.errors import ConfigError
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, Whitespace

from .conftest import compact, sentencepiece_tokenizer
from .fake_backend import ListVocabulary

PERSON = {
    "type": "object",
    "properties": {
        "abc": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["x", "true", 12]}},
        "ok": {"type": "boolean"},
    },
    "required": ["abc", "tags", "ok"],
    "additionalProperties": False,
}
ANSWER = {"abc": "true, 12 é", "tags": ["x", 12, "true"], "ok": True}
DEEP = {
    "$defs": {
        "n": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
    }
}


def schema(value: object, whitespace: Whitespace = Whitespace.COMPACT, pattern: str = "") -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value), whitespace, pattern)


def regex(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text)


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text)


def mask_ids(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    mask = np.full(-(-vocabulary.size // 32), -1, np.int32)
    matcher.fill(mask)
    return {token_id for token_id in range(vocabulary.size) if allows(mask, token_id)}


def feed(backend: LLGuidanceBackend, matcher: Matcher, text: bytes) -> bool:
    """Whether the text is accepted byte by byte."""
    single = {backend.vocabulary.tokens[i]: i for i in range(256)}
    return all(matcher.accept([single[bytes([byte])]]) for byte in text)


def takes(backend: LLGuidanceBackend, spec: GrammarSpec, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = backend.compile(spec).matcher()
    eos = backend.vocabulary.eos_token_ids[0]
    return feed(backend, matcher, text.encode()) and (matcher.ended or matcher.accept([eos]) == 1)


# ------------------------------------------------------------ masks


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (schema(PERSON, Whitespace.PRETTY), json.dumps(ANSWER, indent=2, ensure_ascii=False).encode()),
        (schema(PERSON, Whitespace.ANY), json.dumps(ANSWER, ensure_ascii=False).encode()),
        (regex("(true|12)+[a-c]{2,4}"), b"true1212abca"),
        (lark('start: "[" item ("," item)* "]"\nitem: /[a-c]+/ | start'), b"[abc,[ab,c],a]"),
    ],
)
def test_masks_allow_the_tokens_that_the_grammar_takes(backend, vocabulary, spec, text):
    """Over a whole answer; the reference tries each token. In forced text only the tokenizer's split is allowed."""
    matcher = backend.compile(spec).matcher()
    for token_id in vocabulary.encode(text):
        brute_force = {i for i in range(vocabulary.size) if matcher.validate([i]) == 1}

        mask = mask_ids(matcher, vocabulary)
        assert mask == brute_force or (mask == {token_id} and mask < brute_force)
        assert mask == {i for i in range(vocabulary.size) if matcher.allows(i)}
        assert token_id in brute_force
        assert matcher.accept([token_id]) == 1
    assert matcher.ended or mask_ids(matcher, vocabulary).issuperset(vocabulary.eos_token_ids)


def test_masks_of_forced_text_allow_only_the_tokenizer_s_split(backend, vocabulary):
    matcher = backend.compile(schema(PERSON)).matcher()
    ids = vocabulary.encode(compact(ANSWER))

    assert mask_ids(matcher, vocabulary) == {ids[0]}
    assert vocabulary.tokens[ids[0]] == b'{"'
    for token_id in ids:
        assert {i for i in range(vocabulary.size) if matcher.allows(i)} == mask_ids(matcher, vocabulary)
        assert token_id in mask_ids(matcher, vocabulary)
        assert matcher.accept([token_id]) == 1
    assert matcher.ended


def test_forced_tokens_come_next_in_every_answer(backend, vocabulary):
    matcher = backend.compile(schema(PERSON)).matcher()

    forced = matcher.forced()

    assert b"".join(vocabulary.tokens[i] for i in forced) in b'{"abc":"'
    assert len(forced) >= 3
    assert matcher.accept(forced) == len(forced)


def test_forced_text_without_end_is_bounded(backend):
    assert 0 < len(backend.compile(lark('start: "a" start')).matcher().forced()) <= 64


def test_special_tokens_that_are_written_in_a_schema_are_text(backend, vocabulary):
    matcher = backend.compile(schema({"const": "<|end|><think>"})).matcher()

    for token_id in matcher.forced():
        assert token_id not in vocabulary.special_token_ids
        assert matcher.accept([token_id]) == 1


def test_bits_of_the_padding_are_zero(backend, vocabulary):
    matcher = backend.compile(regex(".*")).matcher()
    mask = np.full(20, -1, np.int32)

    matcher.fill(mask)

    assert max(i for i in range(640) if allows(mask, i)) < len(vocabulary.tokens)


def test_drafts_get_the_masks_of_the_states_between_them(backend, vocabulary):
    matcher = backend.compile(schema(PERSON, Whitespace.PRETTY)).matcher()
    drafts = vocabulary.encode(b'{"abc": "x')
    masks = np.zeros((len(drafts) + 1, -(-vocabulary.size // 32)), np.int32)

    assert matcher.validate([*drafts, *drafts]) == len(drafts) or matcher.validate(drafts) == len(drafts)
    matcher.fill_drafts(drafts, masks)

    for row, token_id in zip(masks, [*drafts, None], strict=True):
        single = np.zeros_like(row)
        matcher.fill(single)
        assert (row == single).all()
        if token_id is not None:
            matcher.accept([token_id])


def test_a_vocabulary_without_eos_tokens(tokenizer):
    vocabulary = TokenizerVocabulary(tokenizer, tokenizer.vocab_size, ())
    backend = LLGuidanceBackend(vocabulary)

    matcher = backend.compile(regex("a[bc]*")).matcher()
    matcher.accept(vocabulary.encode(b"a"))

    assert {vocabulary.tokens[i] for i in mask_ids(matcher, vocabulary)} == {b"b", b"c"}


# ------------------------------------------------------------ the end


@pytest.mark.parametrize(
    "value", [{"type": "object", "properties": {}}, {"type": "array"}, {"enum": ["a", None]}]
)
@pytest.mark.parametrize("whitespace", Whitespace)
def test_nothing_follows_a_complete_value(backend, value, whitespace):
    matcher = backend.compile(schema(value, whitespace)).matcher()
    text = {"object": b"{}", "array": b"[1, 2]" if whitespace != "compact" else b"[1,2]"}.get(
        value.get("type"), b"null"
    )

    assert feed(backend, matcher, text[:-1])
    assert not matcher.ended
    assert feed(backend, matcher, text[-1:])
    assert matcher.ended
    assert matcher.error == ""
    assert matcher.accept([5]) == 0


def test_every_eos_token_ends_an_answer_that_could_go_on(backend, vocabulary):
    grammar = backend.compile(schema({"type": "integer"}))
    for eos in vocabulary.eos_token_ids:
        matcher = grammar.matcher()
        assert matcher.validate([eos]) == 0
        feed(backend, matcher, b"12")
        assert not matcher.ended
        assert eos in mask_ids(matcher, vocabulary)
        assert matcher.validate([eos, 5]) == 1
        assert matcher.accept([eos, 5]) == 1
        assert matcher.ended


def test_an_eos_token_before_the_end_is_an_error(backend, vocabulary):
    matcher = backend.compile(schema(PERSON)).matcher()

    assert matcher.accept([vocabulary.eos_token_ids[0]]) == 0
    assert matcher.error_code is MatcherErrorCode.BUG
    assert not matcher.ended


def test_a_refused_token_is_an_error_and_the_masks_allow_all(backend, vocabulary):
    matcher = backend.compile(schema(PERSON)).matcher()

    assert matcher.accept(vocabulary.encode(b"x")) == 0

    assert matcher.error_code is MatcherErrorCode.BUG
    assert "after 0 tokens" in matcher.error
    assert "<" not in matcher.error
    assert len(mask_ids(matcher, vocabulary)) == vocabulary.size


@pytest.mark.parametrize("token_id", [299, 1_000_000, 1 << 40, -1])
def test_an_id_without_a_token_is_refused(backend, token_id):
    matcher = backend.compile(regex(".*")).matcher()

    assert matcher.validate([token_id]) == 0
    assert matcher.accept([token_id]) == 0
    assert matcher.error_code is MatcherErrorCode.BUG


def test_the_split_into_tokens_does_not_matter(backend, vocabulary):
    spec = schema(PERSON, Whitespace.PRETTY)
    text = json.dumps(ANSWER, ensure_ascii=False).encode()
    for end in range(len(text) + 1):
        merged, single = backend.compile(spec).matcher(), backend.compile(spec).matcher()
        ids = vocabulary.encode(text[:end])

        assert merged.accept(ids) == len(ids)
        assert feed(backend, single, text[:end])

        assert merged.ended == single.ended == (end == len(text))
        assert mask_ids(merged, vocabulary) == mask_ids(single, vocabulary)


def test_a_tokenizer_that_puts_a_space_before_a_text():
    vocabulary = TokenizerVocabulary(sentencepiece_tokenizer(), 300, (1,))
    backend = LLGuidanceBackend(vocabulary)
    matcher = backend.compile(schema({"enum": ["ab ab"]})).matcher()

    assert [vocabulary.tokens[i] for i in matcher.forced()][:2] == [b'"', b"ab"]
    assert matcher.accept(vocabulary.encode(b'"ab ab"')) == 4
    assert matcher.ended


def test_validate_and_copy_have_no_effects(backend, vocabulary):
    matcher = backend.compile(schema(PERSON)).matcher()
    ids = vocabulary.encode(compact(ANSWER))

    assert matcher.validate(ids) == len(ids)
    twin = matcher.copy()
    assert twin.accept(ids) == len(ids)
    assert twin.ended
    assert matcher.accept(ids) == len(ids)
    assert matcher.validate([vocabulary.size - 1]) == 0


# ------------------------------------------------------------ whitespace


@pytest.mark.parametrize(
    ("text", "compact_ok", "pretty_ok"),
    [
        ('{"a":1,"b":[1,2]}', True, True),
        ('{"a": 1, "b": [1, 2]}', False, True),
        ('{\n  "a": 1,\n  "b": [\n    1\n  ]\n}', False, True),
        ('{"a":1,\n' + " " * 32 + '"b":[]}', False, True),
        ('{"a":1,\n' + " " * 33 + '"b":[]}', False, False),
        ('{"a":  1,"b":[]}', False, False),
        ('{"a":\n\n1,"b":[]}', False, False),
        ('{"a": \n1,"b":[]}', False, False),
        ('{"a":\t1,"b":[]}', False, False),
    ],
)
def test_whitespace_is_bounded(backend, text, compact_ok, pretty_ok):
    """Unbounded whitespace is what weak models fill their answers with."""
    value = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}

    assert takes(backend, schema(value, Whitespace.COMPACT), text) is compact_ok
    assert takes(backend, schema(value, Whitespace.PRETTY), text) is pretty_ok
    assert takes(backend, schema(value, Whitespace.ANY), text)


@pytest.mark.parametrize("whitespace", Whitespace)
def test_no_whitespace_around_the_value(backend, whitespace):
    assert not takes(backend, schema({"type": "array"}, whitespace), " []")
    assert not takes(backend, schema({"type": "array"}, whitespace), "[] ")


def test_a_pattern_replaces_the_whitespace(backend):
    spec = schema({"type": "array", "items": {"type": "integer"}}, Whitespace.COMPACT, r"\x20{2}")

    assert takes(backend, spec, "[  1,  2]")
    assert not takes(backend, spec, "[ 1]")


# ------------------------------------------------------------ errors


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


@pytest.mark.parametrize(
    ("spec", "code", "text"),
    [
        (schema({"type": "strin"}), "invalid_schema", "strin"),
        (schema([1]), "invalid_schema", "must be an object"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "{"), "invalid_schema", "not valid JSON"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, "[" * 100_000), "invalid_schema", "not valid JSON"),
        (schema({"$ref": "#/x"}), "invalid_schema", "'/x' does not exist"),
        (schema({"type": "array", "uniqueItems": True}), "unsupported_schema", "uniqueItems"),
        (schema({"type": "string", "format": "foo"}), "unsupported_schema", "foo"),
        (schema({"type": "string", "pattern": "(?=a)"}), "unsupported_schema", "look-around"),
        (schema(False), "unsatisfiable_schema", "false"),
        (schema(nested(130)), "schema_too_complex", "the schema is nested too deep"),
        (
            lark(f"start: %json {json.dumps(nested(130))}"),
            "schema_too_complex",
            "the grammar is nested too deep",
        ),
        (schema({"enum": ["a"], "format": "date"}), "unsatisfiable_schema", "contradict each other"),
        (schema({"type": "integer", "minimum": 10, "maximum": 5}), "unsatisfiable_schema", "minimum"),
        (regex("ab("), "invalid_regex", "unclosed group (at position 2)"),
        (regex("(?=a)b"), "invalid_regex", "look-around"),
        (regex(r"(a)\1"), "invalid_regex", "backreferences"),
        (regex(r"[^\x00-\u{10ffff}]"), "invalid_regex", "allows no text"),
        (lark("start: foo"), "invalid_grammar", "foo"),
        (lark('strt: "a"'), "invalid_grammar", "no start rule"),
        (lark("start: start"), "invalid_grammar", "allows no text"),
    ],
)
def test_error_codes_and_texts(backend, spec, code, text):
    with pytest.raises(GrammarError) as caught:
        backend.compile(spec)

    assert caught.value.code == code
    assert text in caught.value.message
    assert "\n" not in caught.value.message
    assert not any(internal in caught.value.message for internal in ("<non-verbose", "(And", "SearchRegex"))


def test_a_panic_of_the_library_is_an_error_without_its_backtrace():
    text = "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>\n   0: <unknown>"
    error = translate_error(GrammarKind.JSON_SCHEMA, text, "x" * 2000)

    assert error.code == "schema_too_complex"
    assert error.message == "the schema has 2,000 characters and is too complex for the library; simplify it"


def test_a_schema_of_all_booleans_and_options_of_the_library(backend):
    assert takes(backend, schema(True), '{"a":[1]}')
    with pytest.raises(GrammarError, match="uniqueItems"):
        backend.compile(schema({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}))


def test_a_grammar_beyond_the_limits_is_too_complex(backend):
    value = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}

    with pytest.raises(GrammarError) as caught:
        backend.compile(schema(value))

    assert caught.value.code == "schema_too_complex"


def test_a_step_beyond_the_limits_is_an_error_of_the_matcher(backend, vocabulary):
    matcher = backend.compile(regex("((([a-z]{1,100}){1,100}){1,100}){1,100}")).matcher()

    for _ in range(20):
        mask_ids(matcher, vocabulary)
        matcher.accept(vocabulary.encode(b"z"))

    assert matcher.error_code is MatcherErrorCode.LIMIT
    assert not matcher.ended


def test_a_row_with_more_items_than_the_limit_is_one(backend, vocabulary):
    """It compiles, and its first mask is right; the limit shows at the first token of every answer."""
    optional = {f"p{i}": {"type": "integer"} for i in range(600)}
    spec = schema({"type": "object", "properties": optional})
    matcher = backend.compile(spec).matcher()
    mask_ids(matcher, vocabulary)

    assert matcher.accept(vocabulary.encode(b"{")) == 0
    assert matcher.error_code is MatcherErrorCode.LIMIT
    result = compile_grammar(backend, vocabulary, spec)
    assert result.code == "schema_too_complex"
    assert "max is 2000" in result.message


def test_a_recursive_schema(backend):
    spec = schema(DEEP | {"$ref": "#/$defs/n"})

    assert takes(backend, spec, '{"a":' * 50 + "{}" + "}" * 50)
    assert not takes(backend, spec, '{"a":1}')


def test_the_size_grows_with_the_text(backend):
    small = backend.compile(schema({"enum": ["a"]}))
    large = backend.compile(schema({"enum": [f"value{i}" for i in range(2_000)]}))

    assert 0 < small.num_bytes < large.num_bytes


# ------------------------------------------------------------ the self-test


def test_a_broken_encode_function_is_found():
    class Broken(ListVocabulary):
        def encode(self, data: bytes) -> list[int]:
            return [self.tokens.index(b"x")] * len(data)

    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
    LLGuidanceBackend(ListVocabulary(tokens, eos_token_ids=(256,)))
    with pytest.raises(ConfigError, match="grammars cannot be used"):
        LLGuidanceBackend(Broken(tokens, eos_token_ids=(256,)))


def test_an_encode_function_that_returns_nothing_is_found():
    class Empty(ListVocabulary):
        def encode(self, data: bytes) -> list[int]:
            return []

    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
    with pytest.raises(ConfigError, match="does not reproduce"):
        LLGuidanceBackend(Empty(tokens, eos_token_ids=(256,)))


@pytest.mark.parametrize("how", ["allows", "fill", "forced", "validate only"])
def test_forced_tokens_are_counted_where_a_call_has_found_them(backend, vocabulary, how):
    """In `{"ab":<digit>}` all tokens but the digit are forced."""
    spec = schema(
        {
            "type": "object",
            "properties": {"ab": {"enum": [1, 2, 3]}},
            "required": ["ab"],
            "additionalProperties": False,
        }
    )
    matcher = backend.compile(spec).matcher()
    mask = np.zeros(-(-vocabulary.size // 32), dtype=np.int32)
    tokens = vocabulary.encode(b'{"ab":2}')
    digit = tokens.index(vocabulary.encode(b"2")[0])
    for position, token in enumerate(tokens):
        match how:
            case "allows":
                assert matcher.allows(token)
            case "fill":
                matcher.fill(mask)
            case "forced":
                matcher.forced()
            case _:
                assert matcher.validate((token,)) == 1
        copy = matcher.copy()
        copy.accept((token,))
        before = matcher.num_forced
        assert matcher.accept((token,)) == 1
        assert copy.num_forced == matcher.num_forced
        is_counted = how != "validate only" and position != digit
        assert matcher.num_forced - before == is_counted, (how, position)
    assert matcher.ended
