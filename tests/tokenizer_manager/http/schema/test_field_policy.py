from __future__ import annotations

import msgspec
import pytest

from engine.runtime.errors import RequestError
from engine.tokenizer_manager.http.openai.wire import ChatRequest, CompletionRequest
from engine.tokenizer_manager.http.schema.field_policy import (
    CHAT_NO_EFFECT,
    CHAT_NOT_YET,
    COMPLETION_NOT_YET,
    FieldPolicy,
)

CHAT = FieldPolicy(ChatRequest, CHAT_NOT_YET, no_effect=CHAT_NO_EFFECT)


def test_honored_fields_and_those_without_effect_pass_silently():
    body = {
        "messages": [],
        "temperature": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
    }

    assert CHAT.check(body, strict=True) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),  # an empty object asks for a search with its defaults
        ("echo", True),
        ("repeat_penalty", True),  # 1 is neutral, true is nonsense
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        CHAT.check({field: value}, strict=False)

    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize("field", sorted(CHAT_NOT_YET))
def test_values_that_ask_for_nothing_pass(field):
    for neutral in (None, *CHAT_NOT_YET[field]):
        assert CHAT.check({field: neutral}, strict=True) == []


def test_unknown_fields_are_warned_of_or_refused():
    assert CHAT.check({"temprature": 1}, strict=False) == ["unknown field temprature was ignored"]
    with pytest.raises(RequestError, match="--strict") as caught:
        CHAT.check({"temprature": 1}, strict=True)
    assert caught.value.param == "temprature"


class Inner(msgspec.Struct):
    known: int = 0


class Outer(msgspec.Struct):
    inner: Inner | None = None


def test_objects_inside_are_checked_under_their_path():
    policy = FieldPolicy(Outer, {}, nested={"inner": FieldPolicy(Inner, {"later": (0,)})})

    assert policy.check({"inner": None}, strict=True) == []
    assert policy.check({"inner": {"known": 1, "later": 0}}, strict=True) == []
    assert policy.check({"inner": {"unknown": 1}}, strict=False) == [
        "unknown field inner.unknown was ignored"
    ]
    for fields, param in [({"unknown": 1}, "inner.unknown"), ({"later": 1}, "inner.later")]:
        with pytest.raises(RequestError) as caught:
            policy.check({"inner": fields}, strict=True)
        assert caught.value.param == param


OPENAI_CHAT_FIELDS = """
    messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
    stop store stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options stream
"""
OPENAI_COMPLETION_FIELDS = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
    stream_options suffix temperature top_p user stream
"""


@pytest.mark.parametrize(
    ("struct", "not_yet", "documented"),
    [
        (ChatRequest, CHAT_NOT_YET, OPENAI_CHAT_FIELDS),
        (CompletionRequest, COMPLETION_NOT_YET, OPENAI_COMPLETION_FIELDS),
    ],
)
def test_every_documented_field_of_openai_is_known(struct, not_yet, documented):
    known = {field.encode_name for field in msgspec.structs.fields(struct)} | not_yet.keys() | CHAT_NO_EFFECT

    assert set(documented.split()) <= known
