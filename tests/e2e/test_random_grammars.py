"""Random schemas, regular expressions and grammars in all fields that take them: an answer, or an error of ours.

No example is a valid constraint by design: what is accepted is answered, and what is refused is a 4xx with a text. The
server must be the same afterwards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .serving import DEADLINE_S, EngineServe

pytestmark = pytest.mark.real_process

NUM_EXAMPLES: Final = 60
NUM_SLOW_EXAMPLES: Final = 1000
HI: Final = [{"role": "user", "content": "hi"}]

# ---------------------------------------------------------------- what is sent

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**64), 2**64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        ["string", "object", "array", "integer", "#", "#/$defs/a", "#/properties/a", "^a+$", "date"]
    ),
)
KEYWORDS: Final = (
    *("type", "enum", "const", "anyOf", "allOf", "oneOf", "not", "if", "then", "else", "$ref", "$defs"),
    *("definitions", "$id", "$anchor", "$dynamicRef", "properties", "required", "additionalProperties"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minLength", "maxLength"),
    *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("title", "nullable", "a"),
)
schemas = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYWORDS), inner, min_size=1, max_size=5)
    ),
    max_leaves=20,
)
PIECES: Final = (
    *(
        "a",
        "b",
        "é",
        "日",
        ".",
        r"\d",
        r"\w",
        r"\b",
        r"\x41",
        r"\u00e9",
        r"\p{L}",
        r"\1",
        "[a-z]",
        "[^x]",
        "[",
        "]",
    ),
    *(
        "(",
        ")",
        "(?:",
        "(?=",
        "(?<!",
        "(?P<n>",
        "(?i)",
        "|",
        "*",
        "+",
        "?",
        "*?",
        "{2}",
        "{3,1}",
        "{,5}",
        "{1000}",
    ),
    *("{1,", "^", "$", "\\", "\n", "-", "/", "\0", "😀"),
)
regexes = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=20)
WORDS: Final = (
    *(
        "root ::= ",
        "start: ",
        "x ::= ",
        "x: ",
        "X: ",
        "\n",
        " | ",
        '"a"',
        '"',
        "'b'",
        "[a-z]",
        "[^",
        "/a+/",
        "/",
        "root",
    ),
    *(
        "x",
        "X",
        "start",
        "(",
        ")",
        "*",
        "+",
        "?",
        "{2,3}",
        "{",
        "%json {}",
        "%json",
        "%ignore X",
        "%llguidance {}",
    ),
    *("%regex", "@", "# c", "// c", "<|im_end|>", "<x>", "~", "..", ".", r"\x", "::=", ":", ";", "é"),
)
grammars = st.lists(st.sampled_from(WORDS), max_size=16).map("".join) | st.text(max_size=40)

Fields = dict[str, Any]
Request = tuple[str, Fields]


def of_schema(value: Any) -> list[Request]:
    """The requests that ask for this schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": value, "strict": True}}
    flat = {"type": "json_schema", "name": "a", "schema": value}
    function = {"name": "f", "parameters": value}
    tool = {"name": "f", "input_schema": value, "strict": True}
    return [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, "response_format": form}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, "response_format": strict}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 8, "guided_json": value}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 8, "guided_json": json.dumps(value)}),
        (
            "/generate",
            {"text": "x", "sampling_params": {"max_new_tokens": 8, "json_schema": json.dumps(value)}},
        ),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 8, "text": {"format": flat}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 8, "output_config": {"format": flat}}),
        ("/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 8}, "format": value}),
        ("/v1/grammar/check", {"guided_json": value}),
        (
            "/v1/chat/completions",
            {
                "messages": HI,
                "max_tokens": 8,
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
            },
        ),
        ("/v1/messages", {"messages": HI, "max_tokens": 8, "tools": [tool], "tool_choice": {"type": "any"}}),
    ]


def of_regex(value: str) -> list[Request]:
    """The requests that ask for this regular expression."""
    tool = {
        "type": "custom",
        "name": "f",
        "format": {"type": "grammar", "syntax": "regex", "definition": value},
    }
    return [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, "regex": value}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 8, "structured_outputs": {"regex": value}}),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 8, "regex": value}}),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 8, "guided_json": {}, "guided_whitespace_pattern": value},
        ),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 8, "guided_json": {"type": "string", "pattern": value}},
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": 8, "tools": [tool], "tool_choice": "required"}),
        ("/v1/grammar/check", {"regex": value}),
    ]


def of_grammar(value: str) -> list[Request]:
    """The requests that ask for this grammar."""
    tool = {
        "type": "custom",
        "name": "f",
        "format": {"type": "grammar", "syntax": "lark", "definition": value},
    }
    return [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, "grammar": value}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 8, "guided_grammar": value}),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 8, "ebnf": value}}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 8, "tools": [tool], "tool_choice": "required"}),
        ("/v1/grammar/check", {"grammar": value}),
    ]


KINDS: Final[dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], list[Request]]]]] = {
    "schema": (schemas, of_schema),
    "regex": (regexes, of_regex),
    "grammar": (grammars, of_grammar),
}

# ---------------------------------------------------------------- what comes back


@pytest.fixture(scope="module")
def limited(model: Path) -> Iterator[EngineServe]:
    """A server of these tests: no example shall delay the others for long."""
    with EngineServe(str(model), "--dtype", "float32", "--grammar-timeout", "10") as engine:
        yield engine.wait_until_ready()
        assert engine.stop() == 0, engine.log
        assert engine.leftovers() == []
        assert "Traceback" not in engine.log


def check(client: httpx.Client, path: str, fields: Fields) -> int:
    """One request is answered, or refused with an error of its API; returns the status."""
    reply = client.post(path, json=fields)
    assert reply.status_code in (200, 400, 413, 422, 429), (path, fields, reply.text)
    body = reply.json()
    if reply.status_code == 200:
        assert not body.get("error") or path == "/v1/grammar/check"
        return reply.status_code
    error = body["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str) and error
        return reply.status_code
    assert error["message"] and error["type"]
    assert path == "/v1/messages" or error["code"], body
    return reply.status_code


def run(engine: EngineServe, kind: str, num_examples: int) -> None:
    values, requests_of = KINDS[kind]

    @settings(max_examples=num_examples, deadline=None)
    @given(values, st.integers(0, 100))
    def ask(value: Any, which: int) -> None:
        requests = requests_of(value)
        statuses[check(client, *requests[which % len(requests)])] += 1

    pids = engine.pids
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=engine.url, timeout=DEADLINE_S) as client:
        ask()
        assert check(client, "/v1/completions", {"prompt": "x", "max_tokens": 8, "regex": "[a-c]{3}"}) == 200
    assert statuses[200] >= num_examples / 20, statuses
    assert statuses[400] >= num_examples / 20, statuses
    assert engine.pids == pids
    engine.idle_metrics()


@pytest.mark.slow
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_random_constraints(limited: EngineServe, kind: str):
    run(limited, kind, NUM_EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_constraints(limited: EngineServe, kind: str):
    run(limited, kind, NUM_SLOW_EXAMPLES)
