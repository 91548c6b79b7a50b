"""`CompletingMatcher`: JSON answers that end by their limit of tokens are complete."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.grammar.backend import CompiledGrammar, Matcher, MatcherErrorCode
from engine.grammar.closing import shortest_end
from engine.grammar.guided import GuidedMatcher
from engine.grammar.json_state import JsonState
from engine.grammar.llguidance_backend import LLGuidanceBackend
from engine.grammar.markers import allows
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, ReasoningBlock, Whitespace
from tests.selection import examples

MOST_TOKENS = 120
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 18}},
    "required": ["name", "age"],
}
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 40}},
    "required": ["text"],
    "additionalProperties": False,
}
PEOPLE = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": PERSON}},
    "required": ["people"],
}

scalars = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda low: {"type": "integer", "minimum": low}, st.sampled_from([-5, 0, 17, 1000, 10**12])),
    st.sampled_from(
        [
            {"type": "number", "minimum": 0.001, "maximum": 0.002},
            {"type": "integer", "minimum": 1000, "multipleOf": 7},
            {"type": "integer", "maximum": -(10**9)},
        ]
    ),
    st.just({"type": "number"}),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 6),
        st.integers(0, 6),
    ),
    st.just({"type": "string"}),
    st.sampled_from(
        [
            *({"type": "string", "format": name} for name in ("date", "email", "time", "uuid", "duration")),
            {"type": "string", "pattern": "^[A-Z][a-z]*$"},
            {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"},
        ]
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.sampled_from(["a", "ab", "red", "green", "abcabcabc", 7, None]),
            min_size=1,
            max_size=3,
            unique=True,
        ),
    ),
    st.just({}),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 2)
    )
    fields = st.dictionaries(st.sampled_from(["a", "name", "abc", "x y", "é"]), inner, max_size=3)
    objects = st.builds(
        lambda properties, num, more: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num],
            "additionalProperties": more,
        },
        fields,
        st.integers(0, 3),
        st.booleans(),
    )
    return st.one_of(arrays, objects, st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner))


schemas = st.recursive(scalars, _containers, max_leaves=6)


def check(schema: dict[str, Any], text: bytes) -> None:
    """The text is JSON of the schema. Numbers beyond the range of a float are valid JSON."""
    value = json.loads(text, parse_float=lambda number: max(-1e300, min(1e300, float(number))))
    jsonschema_rs.validator_for(schema).validate(value)


def use_of(schema: object, whitespace: Whitespace = Whitespace.PRETTY) -> GrammarUse:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), whitespace)
    return GrammarUse(spec=spec, complete=True)


def compiled(backend: LLGuidanceBackend, use: GrammarUse) -> CompiledGrammar:
    assert use.spec is not None
    return backend.compile(use.spec)


def limited(
    backend: LLGuidanceBackend, grammar: CompiledGrammar, use: GrammarUse, num_tokens: int
) -> GuidedMatcher:
    matcher = GuidedMatcher(use, [grammar], backend.vocabulary)
    matcher.limit(num_tokens)
    return matcher


def answer(
    matcher: Matcher, vocabulary: Any, num_tokens: int, choose: random.Random, late: float = 0.0
) -> bytes:
    """Random tokens of the masks. With probability `late` a token is proposed first and then checked."""
    text = b""
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    for _ in range(num_tokens):
        if matcher.ended:
            break
        token_id = choose.randrange(len(vocabulary.tokens))
        if choose.random() >= late or not matcher.validate((token_id,)):
            matcher.fill(mask)
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            ids = [i for i in ids if i not in vocabulary.eos_token_ids] or ids
            token_id = choose.choice(ids)
        assert matcher.accept((token_id,)) == 1, matcher.error
        if token_id not in vocabulary.eos_token_ids:
            text += vocabulary.tokens[token_id]
    return text


@pytest.fixture(params=["bytes", "words"])
def backend(
    request: Any, byte_backend: LLGuidanceBackend, word_backend: LLGuidanceBackend
) -> LLGuidanceBackend:
    """A vocabulary of bytes with a few merges, and one of 1,500 pieces of English and JSON."""
    return byte_backend if request.param == "bytes" else word_backend


@pytest.fixture
def vocabulary(backend) -> Any:
    return backend.vocabulary


any_case = given(
    schema=schemas,
    seed=st.integers(0, 1 << 30),
    slack=st.integers(0, MOST_TOKENS) | st.integers(0, 8),
    whitespace=st.sampled_from(Whitespace),
)
quick = settings(
    max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@any_case
@quick
@pytest.mark.parametrize("late", [0.0, 0.8])
def test_every_cut_answer_validates(backend, vocabulary, schema, seed, slack, whitespace, late):
    use = use_of(schema, whitespace)
    grammar = compiled(backend, use)
    assert grammar.short_answer is not None
    num_tokens = len(grammar.short_answer) + slack

    matcher = limited(backend, grammar, use, num_tokens)
    text = answer(matcher, vocabulary, num_tokens, random.Random(seed), late)

    check(schema, text)


@any_case
@quick
def test_a_mask_has_the_tokens_that_a_check_allows(backend, vocabulary, schema, seed, slack, whitespace):
    use = use_of(schema, whitespace)
    grammar = compiled(backend, use)
    assert grammar.short_answer is not None
    num_tokens = len(grammar.short_answer) + slack
    choose, masked = random.Random(seed), limited(backend, grammar, use, num_tokens)
    for _ in range(num_tokens):
        checked = masked.copy()  # before the mask is filled: it must not depend on that
        mask = np.zeros(-(-vocabulary.size // 32), np.int32)
        masked.fill(mask)
        token_ids = choose.sample(range(len(vocabulary.tokens)), 40)
        allowed = [i for i in range(len(vocabulary.tokens)) if allows(mask, i)]
        token_ids += choose.sample(allowed, min(10, len(allowed)))
        assert [checked.copy().allows(i) for i in token_ids] == [allows(mask, i) for i in token_ids]
        masked.accept((choose.choice(allowed),))
        if masked.ended:
            return


@any_case
@quick
def test_a_greedy_text_does_not_depend_on_where_the_mask_comes(
    backend, vocabulary, schema, seed, slack, whitespace
):
    use = use_of(schema, whitespace)
    grammar = compiled(backend, use)
    assert grammar.short_answer is not None
    num_tokens = len(grammar.short_answer) + slack
    first, late, drafted = (limited(backend, grammar, use, num_tokens) for _ in range(3))
    rng, mask = np.random.default_rng(seed), np.zeros(-(-vocabulary.size // 32), np.int32)

    def best(matcher: Matcher, logits: Any) -> int:
        matcher.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary.size]
        return int(np.where(bits, logits, -np.inf).argmax())

    for _ in range(num_tokens):
        logits = rng.normal(size=vocabulary.size)
        likeliest = int(logits[: len(vocabulary.tokens)].argmax())
        token_id = best(first, logits)
        assert late.allows(likeliest) == (token_id == likeliest)
        assert best(late, logits) == token_id == best(drafted, logits)
        if token_id != likeliest and not first.validate((likeliest,)):
            first.allows(likeliest)  # as for the figures
        drafted.validate((likeliest, token_id))
        assert first.accept((token_id,)) == late.accept((token_id,)) == drafted.accept((token_id,)) == 1
        if first.ended:
            break
    assert first.ended == late.ended and first.is_cut == late.is_cut
    assert not drafted.is_cut, "a draft that is refused is not the model's token"


@any_case
@quick
def test_a_limit_below_the_short_answer_is_an_error(backend, vocabulary, schema, seed, slack, whitespace):
    use = use_of(schema, whitespace)
    grammar = compiled(backend, use)
    assert grammar.short_answer is not None
    least = len(grammar.short_answer)

    matcher = limited(backend, grammar, use, max(0, least - 1 - slack))

    assert matcher.error_code is MatcherErrorCode.TOO_SHORT
    assert f"the shortest answer has {least} tokens" in matcher.error


@given(
    schema=schemas,
    seed=st.integers(0, 1 << 30),
    slack=st.integers(0, 40),
    opened=st.booleans(),
    budget=st.none() | st.integers(0, 60),
)
@quick
def test_reasoning_leaves_the_tokens_of_the_short_answer(
    backend, vocabulary, schema, seed, slack, opened, budget
):
    block = ReasoningBlock(b"<think>", b"</think>", opened=opened, budget=budget)
    use = GrammarUse(spec=use_of(schema).spec, reasoning=block, complete=True)
    grammar = compiled(backend, use)
    assert grammar.short_answer is not None
    num_tokens = len(grammar.short_answer) + slack
    matcher = limited(backend, grammar, use, num_tokens)
    if matcher.error:
        assert opened and matcher.error_code is MatcherErrorCode.TOO_SHORT
        assert slack < len(vocabulary.encode(b"</think>"))
        return

    text = answer(matcher, vocabulary, num_tokens, random.Random(seed))

    check(schema, text.rpartition(b"</think>")[2])


@pytest.mark.parametrize("seed", range(20))
def test_a_marker_in_single_bytes_leaves_the_tokens_of_the_short_answer(backend, vocabulary, seed):
    use = GrammarUse(
        spec=use_of({"type": "null"}).spec,
        reasoning=ReasoningBlock(b"<think>", b"</think>", False),
        complete=True,
    )
    grammar, choose = compiled(backend, use), random.Random(seed)
    assert grammar.short_answer is not None
    num_tokens = len(grammar.short_answer) + choose.randrange(24)

    text = answer(limited(backend, grammar, use, num_tokens), vocabulary, num_tokens, choose)

    assert text.rpartition(b"</think>")[2] == b"null"


NUMBERS = {
    "type": "object",
    "properties": {
        "xs": {"type": "array", "items": {"type": "integer", "minimum": 10**12}},
        "y": {"type": "string"},
    },
    "required": ["xs", "y"],
    "additionalProperties": False,
}
LONG_PATTERN = {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-f]{90}$"}}
STEPS = {"type": "array", "items": {"type": "integer", "multipleOf": 7, "minimum": 1000}}


@pytest.mark.parametrize("schema", [NUMBERS, LONG_PATTERN, STEPS])
@pytest.mark.parametrize("more", range(16))
def test_a_long_number_or_string_is_not_begun_without_room(backend, vocabulary, schema, more):
    use = use_of(schema)
    grammar = compiled(backend, use)
    assert grammar.short_answer is not None
    num_tokens = len(grammar.short_answer) + more

    text = answer(limited(backend, grammar, use, num_tokens), vocabulary, num_tokens, random.Random(more))

    check(schema, text)


RECORD = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string"} for i in range(12)},
    "required": [f"field_{i}" for i in range(12)],
    "additionalProperties": False,
}
OPTIONAL = {
    "type": "object",
    "properties": {"small": {"type": "null"}, "large": {"type": "string", "minLength": 90}, "record": RECORD},
}


@pytest.mark.parametrize(
    "schema", [{"type": "array", "items": RECORD}, OPTIONAL, {"type": "array", "items": OPTIONAL}]
)
@pytest.mark.parametrize("seed", range(6))
def test_a_large_value_is_not_begun_without_room(backend, vocabulary, schema, seed):
    use = use_of(schema, Whitespace.COMPACT)
    choose = random.Random(seed)
    num_tokens = choose.randint(20, 400)

    text = answer(limited(backend, compiled(backend, use), use, num_tokens), vocabulary, num_tokens, choose)

    check(schema, text)


@pytest.mark.parametrize("schema", [TEXT, {"type": "object"}])
def test_a_text_near_its_limit_keeps_the_tokens_of_the_vocabulary(backend, vocabulary, schema):
    use = use_of(schema)
    begin = vocabulary.encode(b'{"text":"I am ')
    matcher = limited(backend, compiled(backend, use), use, len(begin) + 50)
    assert matcher.accept(begin) == len(begin)
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    for _ in range(40):
        matcher.fill(mask)
        plain = [i for i, text in enumerate(vocabulary.tokens) if text.isalpha()]
        assert all(allows(mask, i) for i in plain)
        assert matcher.accept(vocabulary.encode(b"a")[:1]) == 1


@given(schema=schemas, seed=st.integers(0, 1 << 30), num_tokens=st.integers(0, 40))
@quick
def test_a_way_leads_from_any_state_to_the_end(backend, vocabulary, schema, seed, num_tokens):
    grammar = compiled(backend, use_of(schema))
    matcher = grammar.matcher()
    text = answer(matcher, vocabulary, num_tokens, random.Random(seed))
    state = JsonState()
    state.read(text)

    way = shortest_end(matcher, vocabulary, state, 400)

    assert way is not None
    whole = text + b"".join(vocabulary.tokens[i] for i in way)
    check(schema, whole)
    if way:
        assert shortest_end(matcher, vocabulary, state, len(way) - 1) is None


@pytest.mark.parametrize(
    ("schema", "text", "end"),
    [
        (PERSON, b'{"na', b'me":"","age":18}'),
        (PERSON, b'{"name":"a\\', b'n","age":18}'),
        (PERSON, b'{"name":"\xe2', b'\x80\x80","age":18}'),
        (PEOPLE, b'{"people":[', b"]}"),
        (PEOPLE, b'{"people":[{"name":"}","age":1', b"8}]}"),
        ({"type": "object"}, b'{"a":[[{"b":"', b'"}]]}'),
        ({"enum": ["red", "green"]}, b'"g', b'reen"'),
        ({"type": "string", "minLength": 2, "maxLength": 2}, b'"x', b'y"'),
        ({"type": "number"}, b"-", b"0"),
        ({"type": "number"}, b"12", b""),
    ],
)
def test_the_way_is_short(backend, vocabulary, schema, text, end):
    matcher = compiled(backend, use_of(schema)).matcher()
    ids = vocabulary.encode(text)
    assert matcher.accept(ids) == len(ids)
    state = JsonState()
    state.read(text)

    way = shortest_end(matcher, vocabulary, state, 100)

    assert way is not None
    found = b"".join(vocabulary.tokens[i] for i in way)
    assert len(way) <= len(end)
    check(schema, text + found)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^[a-z]+[0-9]$"},
        {"pattern": "^[^@]+@[^@]+$"},
        *({"format": name} for name in ("email", "uri", "duration", "date-time", "ipv6", "hostname")),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 3, 9])
def test_a_string_with_a_pattern_has_a_way(backend, vocabulary, schema, num_tokens):
    schema = {"type": "object", "properties": {"a": {"type": "string", **schema}}, "required": ["a"]}
    grammar = compiled(backend, use_of(schema))
    matcher = grammar.matcher()
    begin = vocabulary.encode(b'{"a": "')
    assert matcher.accept(begin) == len(begin)
    text = b'{"a": "' + answer(matcher, vocabulary, num_tokens, random.Random(num_tokens))
    state = JsonState()
    state.read(text)

    way = shortest_end(matcher, vocabulary, state, 80)

    assert way is not None and grammar.short_answer is not None
    check(schema, text + b"".join(vocabulary.tokens[i] for i in way))


def test_without_a_way_the_masks_stay_those_of_the_grammar(backend, vocabulary):
    use = use_of({"type": "string", "pattern": "^[a-z]+[0-9]{900}$"})
    grammar = compiled(backend, use)
    plain, matcher = GuidedMatcher(use, [grammar], vocabulary), limited(backend, grammar, use, 10)
    masks = np.zeros((2, -(-vocabulary.size // 32)), np.int32)
    for data in b'"abcdefgh':
        plain.fill(masks[0])
        matcher.fill(masks[1])
        assert (masks[0] == masks[1]).all()
        ids = vocabulary.encode(bytes([data]))
        assert plain.accept(ids) == matcher.accept(ids) == 1
    assert not matcher.is_cut


def test_with_enough_tokens_nothing_is_cut(backend, vocabulary):
    use = use_of(PERSON)
    matcher = limited(backend, compiled(backend, use), use, 300)
    ids = vocabulary.encode(b'{"name": "abc", "age": 21}')
    assert [matcher.accept((i,)) for i in ids] == [1] * len(ids)
    assert matcher.ended and not matcher.is_cut


def test_the_last_tokens_are_those_of_the_way(backend, vocabulary):
    use = use_of({"type": "array", "items": {"type": "integer"}, "minItems": 3})
    grammar = compiled(backend, use)
    way = shortest_end(grammar.matcher(), vocabulary, JsonState(), 100)
    assert way is not None
    matcher = limited(backend, grammar, use, len(way))
    masks = np.zeros((2, -(-vocabulary.size // 32)), np.int32)
    matcher.fill(masks[0])
    assert allows(masks[0], way[0])
    blank, begin = vocabulary.encode(b" ")[0], way[:1]
    assert matcher.accept(begin) == len(begin)
    matcher.fill(masks[0])
    grammar_only = GuidedMatcher(use, [grammar], vocabulary)
    grammar_only.accept(begin)
    grammar_only.fill(masks[1])
    assert allows(masks[1], blank) and not allows(masks[0], blank)
    assert matcher.validate((blank,)) == 0
    assert not matcher.allows(blank)
    rest = way[len(begin) :]
    assert matcher.validate(rest) == len(rest)
    assert matcher.accept(rest) == len(rest)
    assert matcher.ended and matcher.is_cut


def test_masks_of_drafts_are_those_of_single_steps(backend, vocabulary):
    use = use_of(PERSON)
    ids = vocabulary.encode(b'{"name":"abc","a')
    one = limited(backend, compiled(backend, use), use, 36)
    many = one.copy()
    masks = np.zeros((1 + len(ids), -(-vocabulary.size // 32)), np.int32)
    assert many.validate(ids) == len(ids)
    many.fill_drafts(ids, masks)
    row = masks[0].copy()
    for index, token_id in enumerate(ids):
        one.fill(row)
        assert (row == masks[index]).all()
        assert one.accept((token_id,)) == 1


def test_tokens_of_the_reasoning_block_count(backend, vocabulary):
    block = ReasoningBlock(b"<think>", b"</think>", opened=True)
    use = GrammarUse(spec=use_of({"type": "string"}).spec, reasoning=block, complete=True)
    matcher = limited(backend, compiled(backend, use), use, 20)
    ids = vocabulary.encode(b"abcabc</think>")
    assert matcher.accept(ids) == len(ids)

    text = answer(matcher, vocabulary, 20 - len(ids), random.Random(1))

    assert isinstance(json.loads(text), str)
    assert matcher.ended


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_copy_near_the_limit_does_not_follow_the_original(backend, vocabulary, is_asked):
    use = use_of(PERSON)
    grammar = compiled(backend, use)
    original, alone = (limited(backend, grammar, use, 30) for _ in range(2))
    begin = vocabulary.encode(b'{"name":"')
    for matcher in (original, alone):
        assert matcher.accept(begin) == len(begin)
    if is_asked:
        assert original.allows(vocabulary.encode(b"a")[0])
    twin = original.copy()
    rest = vocabulary.encode(b'a", "')
    assert original.accept(rest) == len(rest)

    masks = np.zeros((2, -(-vocabulary.size // 32)), np.int32)
    twin.fill(masks[0])
    alone.fill(masks[1])
    assert (masks[0] == masks[1]).all()
    assert [twin.allows(i) for i in range(256)] == [alone.allows(i) for i in range(256)]
