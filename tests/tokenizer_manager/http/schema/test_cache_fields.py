"""Tests of `tokenizer_manager/http/schema/cache_fields.py`: for how long a request keeps its prompt."""

from typing import Any

import msgspec
import pytest

from engine.runtime.errors import RequestError
from engine.tokenizer_manager.http.schema.cache_fields import CacheOptions, keep_s_of

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def part(**fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": "hi"} | fields


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("body", "keep_s"),
    [
        ({"messages": [user(part())]}, None),
        ({"messages": [{"role": "user", "content": "hi"}], "system": "s", "tools": None}, None),
        ({"cache_control": EPHEMERAL, "messages": []}, 300.0),
        ({"cache_control": None, "messages": []}, None),
        ({"system": [part(cache_control=HOUR)], "messages": [user(part(cache_control=EPHEMERAL))]}, 3600.0),
        ({"tools": [{"name": "t", "cache_control": EPHEMERAL}]}, 300.0),
        ({"messages": [user({"type": "tool_result", "content": [part(cache_control=HOUR)]})]}, 3600.0),
        # An argument of a call is the client's own.
        ({"messages": [user({"type": "tool_use", "input": {"cache_control": HOUR}})]}, None),
        ({"input": [user(part(**BREAKPOINT))]}, 1800.0),
        ({"input": [{"type": "function_call_output", "output": [part(**BREAKPOINT)]}]}, 1800.0),
        ({"prompt_cache_options": {}}, None),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
        ({"prompt_cache_options": {"ttl": "12h", "mode": "implicit"}}, 43200.0),
        ({"prompt_cache_options": {"ttl": "12h", "mode": "explicit"}}, 0.0),
        ({"prompt_cache_options": {"mode": "explicit"}, "messages": [user(part(**BREAKPOINT))]}, 1800.0),
        (
            {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}, "input": [user(part(**BREAKPOINT))]},
            43200.0,
        ),
        ({"prompt": "text", "messages": {"content": 5}, "input": "hi", "system": 7}, None),
    ],
)
def test_the_longest_breakpoint_counts(body, keep_s):
    options = msgspec.convert(body.get("prompt_cache_options"), CacheOptions | None)
    assert keep_s_of(body, options) == keep_s


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"cache_control": "yes"}, "cache_control"),
        ({"system": [part(cache_control={"type": "ephemeral", "ttl": "2h"})]}, "system[0].cache_control.ttl"),
        (
            {"messages": [user(part(), part(cache_control={"ttl": "5m"}))]},
            "messages[0].content[1].cache_control.type",
        ),
        (
            {"input": [user(part(prompt_cache_breakpoint={"ttl": "5m"}))]},
            "input[0].content[0].prompt_cache_breakpoint.ttl",
        ),
    ],
)
def test_a_breakpoint_that_does_not_exist_is_refused_by_its_path(body, param):
    with pytest.raises(RequestError) as refused:
        keep_s_of(body)
    assert (refused.value.param, refused.value.status) == (param, 400)
