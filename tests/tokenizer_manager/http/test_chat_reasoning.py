"""Chats with models that reason: the reasoning in answers and usage, and the options of requests."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine.runtime.grammar_use import GrammarKind

from ..conftest import Serve, Served
from ..conversation.chat_templates import QWEN3
from ..fake_engine import LENGTH, TOKENIZER, ids_of, say_all
from .serving import ROOMY
from .test_chat import HI, PATH, events

THOUGHT = "Rain, or sun?"
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nIt rains."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAGS = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.fixture(name="serve")
def _serve(serve: Serve) -> Serve:
    """Starts a server of a model that reasons."""
    return functools.partial(serve, capacity=ROOMY, chat_template=QWEN3)


def body_of(served: Served, **fields: Any) -> dict[str, Any]:
    reply = served.client.post(PATH, json=HI | fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def message_of(served: Served, **fields: Any) -> dict[str, Any]:
    message: dict[str, Any] = body_of(served, **fields)["choices"][0]["message"]
    return message


def deltas_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    reply = served.client.post(PATH, json=HI | {"stream": True} | fields)
    return [chunk["choices"][0]["delta"] for chunk in events(reply.text)]


def prompt_of(served: Served) -> str:
    return TOKENIZER.decode(ids_of(served.engine.next_request()), skip_special_tokens=False)


# ---------------------------------------------------------------- answers


def test_reasoning_is_apart_from_the_content_and_counted(serve: Serve):
    served = serve(say_all(TEXT))
    body = body_of(served)

    message = body["choices"][0]["message"]
    assert message["reasoning_content"].strip() == THOUGHT
    assert message["content"] == "It rains."
    assert "reasoning" not in message
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(f"\n{THOUGHT}\n")}  # a token is a byte


def test_the_name_of_the_field_is_a_setting(serve: Serve):
    message = message_of(serve(say_all(TEXT), answers={"reasoning_field": "reasoning"}))

    assert message["reasoning"].strip() == THOUGHT
    assert "reasoning_content" not in message


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_stream_has_reasoning_and_then_content(serve: Serve, size):
    served = serve(say_all(*[TEXT[i : i + size] for i in range(0, len(TEXT), size)]))
    deltas = deltas_of(served)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == "It rains."
    order = [key for delta in deltas[1:] for key in delta]
    assert order == sorted(order, reverse=True)  # reasoning_content before content


@pytest.mark.parametrize("size", [5, 100])
def test_the_ids_of_a_row_with_several_deltas_come_once(serve: Serve, size):
    served = serve(say_all(*[TEXT[i : i + size] for i in range(0, len(TEXT), size)]))
    reply = served.client.post(PATH, json=HI | {"stream": True, "return_token_ids": True})
    ids = [token for chunk in events(reply.text) for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == TOKENIZER.encode(TEXT)

    chunk = events(
        served.client.post(PATH, json=HI | {"stream": True, "stream_options": {"include_usage": True}}).text
    )[-1]
    details = chunk["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(f"\n{THOUGHT}\n")}


def test_reasoning_that_is_not_included_is_counted_and_not_sent(serve: Serve):
    served = serve(say_all(TEXT))
    body = body_of(served, include_reasoning=False)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0

    deltas = deltas_of(served, include_reasoning=False)
    assert not any("reasoning_content" in delta for delta in deltas)


def test_reasoning_that_is_not_separate_stays_in_the_content(serve: Serve):
    message = message_of(serve(say_all(TEXT)), separate_reasoning=False)

    assert message["content"] == TEXT
    assert "reasoning_content" not in message


def test_reasoning_that_is_not_streamed_is_one_delta(serve: Serve):
    deltas = deltas_of(serve(say_all(*TEXT)), stream_reasoning=False)

    pieces = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert [piece.strip() for piece in pieces] == [THOUGHT]


def test_a_block_without_an_end_is_reasoning(serve: Serve):
    message = message_of(serve(say_all(TEXT[:15], finish=LENGTH)))

    assert message["reasoning_content"].strip() == TEXT[8:15]
    assert message["content"] in ("", None)


def test_an_answer_without_a_block_is_content(serve: Serve):
    body = body_of(serve(say_all("It rains.")))

    assert body["choices"][0]["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_before_a_call(serve: Serve):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = body_of(serve(say_all(f"<think>\n{THOUGHT}\n</think>\n\n{call}")), tools=tools)
    [choice] = body["choices"]

    assert choice["message"]["reasoning_content"].strip() == THOUGHT
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_call_inside_of_open_reasoning(serve: Serve, size):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"<think>\n{THOUGHT}\n{call}"
    served = serve(say_all(*[text[i : i + size] for i in range(0, len(text), size)]))
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    body = body_of(served, **fields)
    [choice] = body["choices"]
    assert choice["message"]["reasoning_content"].strip() == THOUGHT
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(f"\n{THOUGHT}\n")}

    deltas = deltas_of(served, **fields)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).strip() == THOUGHT
    assert not any(delta.get("content") for delta in deltas)
    assert sum("tool_calls" in delta for delta in deltas) >= 1


@pytest.mark.parametrize("cut", ["<tool_call>", '<tool_call>\n{"name": "no'])
def test_the_beginning_of_a_call_is_no_content(serve: Serve, cut):
    served = serve(say_all(f"It rains.\n{cut}", finish=LENGTH))
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "now"}}]}
    [choice] = body_of(served, **fields)["choices"]
    assert choice["message"]["content"] == "It rains." and choice["finish_reason"] == "length"
    assert "".join(delta.get("content") or "" for delta in deltas_of(served, **fields)) == "It rains."


def test_without_a_reasoning_parser_markers_are_text(serve: Serve):
    body = body_of(serve(say_all(TEXT), answers={"reasoning_parser": "none"}))

    assert body["choices"][0]["message"]["content"] == TEXT
    assert "completion_tokens_details" not in body["usage"]


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"thinking_token_budget": 0},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_reasoning_is_turned_off_in_the_prompt(serve: Serve, fields):
    served = serve(say_all("It rains."))
    assert message_of(served, **fields)["content"] == "It rains."

    assert prompt_of(served).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 9},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"reasoning": {"max_tokens": 9}},
        {"thinking_token_budget": 9, "thinking": {"budget_tokens": 9}},
    ],
)
def test_a_budget_reaches_the_scheduler(serve: Serve, fields):
    served = serve(say_all(TEXT))
    message_of(served, **fields)
    grammar = served.engine.next_request().grammar

    assert grammar is not None and grammar.reasoning is not None
    assert (grammar.reasoning.budget, grammar.reasoning.end) == (9, b"</think>")
    assert grammar.specs == ()


def test_a_schema_begins_after_the_block_and_has_room(serve: Serve):
    served = serve(say_all('{"a": 5}'))
    message_of(served, response_format=FORM, max_tokens=200)
    grammar = served.engine.next_request().grammar

    assert grammar is not None and grammar.spec is not None and grammar.reasoning is not None
    assert grammar.spec.kind is GrammarKind.JSON_SCHEMA
    assert grammar.reasoning.budget == 180  # a tenth is left for the answer


def test_structural_tags_begin_after_the_block(serve: Serve):
    served = serve(say_all("x"))
    message_of(served, structural_tag=TAGS)
    grammar = served.engine.next_request().grammar

    assert grammar is not None and grammar.triggered and grammar.reasoning is not None


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_in_the_history_reaches_the_template(serve: Serve, field):
    served = serve(say_all("x"))
    messages = [*HI["messages"], {"role": "assistant", "content": "hey", field: "hmm"}]
    message_of(served, messages=messages, add_generation_prompt=False)

    assert "<think>\nhmm\n</think>\n\nhey" in prompt_of(served)


def test_the_final_message_is_continued(serve: Serve):
    served = serve(say_all("x"))
    messages = [*HI["messages"], {"role": "assistant", "content": "It ra"}]
    message_of(served, messages=messages, continue_final_message=True)

    assert prompt_of(served).endswith("It ra")


def test_the_answer_continues_an_open_block(serve: Serve):
    served = serve(say_all(f"{THOUGHT[5:]}\n</think>\n\nIt rains."))
    template_text = {"role": "assistant", "content": f"<think>\n{THOUGHT[:5]}"}
    message = message_of(served, messages=[*HI["messages"], template_text], continue_final_message=True)

    assert message["content"] == "It rains."
    assert message["reasoning_content"].strip() == THOUGHT[5:].strip()


def test_documents_reach_the_template(serve: Serve):
    template = "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
    served = serve(say_all("x"), chat_template=template)
    message_of(served, documents=[{"text": "one"}, {"text": "two"}])

    assert prompt_of(served) == "[one][two]hi"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort", "none, minimal"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort", "one of none"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "from 0 to 2147483647"),
        ({"reasoning": {"max_tokens": "x"}}, "reasoning.max_tokens", "number of tokens"),
        ({"thinking": {"type": "x"}}, "thinking.type", "enabled, adaptive"),
        (
            {"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}},
            "reasoning.max_tokens",
            "mean the same",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        ({"include_reasoning": "no"}, "include_reasoning", "true or false"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", 'has "messages"'),
        ({"response_format": FORM, "max_tokens": 3}, "max_tokens", "the shortest answer to response_format"),
    ],
)
def test_refused(serve: Serve, fields, param, message):
    reply = serve().client.post(PATH, json=HI | fields)
    error = reply.json()["error"]

    assert (reply.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
