"""Chats with tools: what the model and the scheduler get, and calls in answers, whole and in streams."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine.runtime.grammar_use import GrammarKind
from engine.runtime.messages import Finish, FinishKind

from ..conftest import Serve, Served
from ..conversation.chat_templates import QWEN3
from ..fake_engine import LENGTH, STOP, TOKENIZER, ids_of, say_all
from .serving import ROOMY
from .test_chat import HI, PATH, events

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
ARGUMENTS = '{"city": "Łódź", "days":[1, 2]}'  # sent as the model writes them
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
GENERIC_CALL = f'{{"tool_calls": [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]}}'
CUT = 70  # characters of CALL, of which some are arguments
CUT_ARGUMENTS = ARGUMENTS[: CUT - CALL.index(ARGUMENTS)]


@pytest.fixture(name="serve")
def _serve(serve: Serve) -> Serve:
    """Starts a server with room for prompts with tools."""
    return functools.partial(serve, capacity=ROOMY)


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    """The only choice of an answer in one piece."""
    reply = served.client.post(PATH, json=HI | {"tools": [WEATHER, NOW]} | fields)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    answer: dict[str, Any] = choice
    return answer


def chunks_of(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The choices of the chunks of a stream."""
    reply = served.client.post(PATH, json=HI | {"tools": [WEATHER, NOW], "stream": True} | fields)
    assert reply.status_code == 200, reply.text
    return [chunk["choices"][0] for chunk in events(reply.text)]


def prompt_of(served: Served) -> str:
    return TOKENIZER.decode(ids_of(served.engine.next_request()), skip_special_tokens=False)


def named(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


# ---------------------------------------------------------------- answers in one piece


def test_a_call_in_one_piece(serve: Serve):
    answer = ask(serve(say_all(CALL), chat_template=QWEN3))
    [call] = answer["message"].pop("tool_calls")

    assert answer["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert answer["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}


def test_text_and_two_calls(serve: Serve):
    answer = ask(serve(say_all("Wait.\n\n" + CALL + "\n" + CALL_NOW), chat_template=QWEN3))
    calls = answer["message"]["tool_calls"]

    assert answer["message"]["content"] == "Wait."
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": ARGUMENTS},
        {"name": "now", "arguments": "{}"},
    ]


def test_an_answer_without_a_call_is_text(serve: Serve):
    answer = ask(serve(say_all("It rains."), chat_template=QWEN3))

    assert answer["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("text", "finish", "reason", "arguments"),
    [
        (CALL, STOP, "tool_calls", ARGUMENTS),
        (CALL, Finish(FinishKind.STOP, matched="grammar"), "tool_calls", ARGUMENTS),
        (CALL, LENGTH, "length", ARGUMENTS),
        (CALL[:CUT], LENGTH, "length", CUT_ARGUMENTS),
        (CALL[:CUT], Finish(FinishKind.STOP, matched="a stop string"), "stop", CUT_ARGUMENTS),
    ],
)
def test_the_finish_reason_of_calls(serve: Serve, text, finish, reason, arguments):
    served = serve(say_all(text, finish=finish), chat_template=QWEN3)
    answer = ask(served)
    assert answer["finish_reason"] == reason
    assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == [arguments]
    assert chunks_of(served)[-1]["finish_reason"] == reason


def test_an_aborted_call_ends_with_abort(serve: Serve):
    served = serve(chat_template=QWEN3)
    reply = served.post_later(PATH, json=HI | {"tools": [WEATHER]})
    request = served.engine.next_request()
    served.client.post("/abort_request", json={"rid": request.rid.rpartition("-")[0]})
    served.engine.next_abort()
    served.engine.say(*say_all(CALL, finish=Finish(FinishKind.ABORT))(request))
    [choice] = reply.result().json()["choices"]

    assert choice["finish_reason"] == "abort"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_a_cut_marker_is_no_call(serve: Serve):
    answer = ask(serve(say_all("Hi.<tool_c", finish=LENGTH), chat_template=QWEN3))

    assert "tool_calls" not in answer["message"]
    assert answer["message"]["content"].startswith("Hi.")
    assert answer["finish_reason"] == "length"


def test_the_generic_format_for_templates_without_tools(serve: Serve):
    served = serve(say_all(GENERIC_CALL))
    message = ask(served)["message"]
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert message["content"] is None
    assert "get_weather" in prompt_of(served)

    message = ask(serve(say_all('{"response": "It\\nrains."}')))["message"]
    assert message["content"] == "It\nrains."


# ---------------------------------------------------------------- streams


def test_a_stream_has_id_and_name_once_and_the_reason_alone(serve: Serve):
    texts = ("Wait.\n\n", CALL[:40], CALL[40:80], CALL[80:], "\n" + CALL_NOW)
    chunks = chunks_of(serve(say_all(*texts), chat_template=QWEN3))
    deltas = [chunk["delta"] for chunk in chunks]

    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1] == {"content": "Wait."}
    first = deltas[2]["tool_calls"][0]
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    pieces = [delta["tool_calls"][0] for delta in deltas[3:-1]]
    second = next(i for i, piece in enumerate(pieces) if piece["index"] == 1)
    assert all(piece.keys() == {"index", "function"} for piece in pieces[:second] + pieces[second + 1 :])
    assert "".join(piece["function"]["arguments"] for piece in pieces[:second]) == ARGUMENTS
    assert pieces[second]["function"] == {"name": "now", "arguments": ""}
    assert "".join(piece["function"]["arguments"] for piece in pieces[second:]) == "{}"
    assert (deltas[-1], chunks[-1]["finish_reason"]) == ({}, "tool_calls")
    assert {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}
    assert not any(delta.get("content") and "tool_calls" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("text", "settings"),
    [("Wait.\n" + CALL + "\n" + CALL_NOW, {"chat_template": QWEN3}), (GENERIC_CALL, {})],
)
def test_a_stream_joins_to_the_whole_answer_however_it_is_cut(serve: Serve, text, settings):
    whole = ask(serve(say_all(text), **settings))["message"]
    for size in (1, 2, 3, 7, 30):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        content, calls = "", []
        for chunk in chunks_of(serve(say_all(*pieces), **settings)):
            content += chunk["delta"].get("content", "")
            for call in chunk["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        assert (content or None) == whole["content"]
        assert [call["function"] for call in calls] == [call["function"] for call in whole["tool_calls"]]


def test_n_answers_keep_their_calls_apart(serve: Serve):
    def script(request):
        return say_all(CALL if request.rid.endswith("-0") else CALL_NOW)(request)

    served = serve(script, chat_template=QWEN3)
    fields = HI | {"tools": [WEATHER, NOW], "n": 2}
    choices = served.client.post(PATH, json=fields).json()["choices"]
    names = [choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices]
    assert names == ["get_weather", "now"]

    begun = [
        (choice["index"], call["index"], call["function"]["name"])
        for chunk in events(served.client.post(PATH, json=fields | {"stream": True}).text)
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if "id" in call
    ]
    assert sorted(begun) == [(0, 0, "get_weather"), (1, 0, "now")]


def test_ids_are_unique_over_a_conversation(serve: Serve):
    served = serve(say_all(CALL_NOW * 3), chat_template=QWEN3)
    ids = [call["id"] for _ in range(3) for call in ask(served)["message"]["tool_calls"]]

    assert len(ids) == len(set(ids)) == 9


# ---------------------------------------------------------------- custom tools, old functions


def test_a_custom_tool_gets_text(serve: Serve):
    text = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a\\"\\n"}}\n</tool_call>'
    served = serve(say_all(text), chat_template=QWEN3)
    [call] = ask(served, tools=[SHELL])["message"]["tool_calls"]
    assert call.pop("id")
    assert call == {"type": "custom", "custom": {"name": "shell", "input": 'ls "a"\n'}}

    deltas = [chunk["delta"] for chunk in chunks_of(served, tools=[SHELL])]
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert pieces[0].pop("id")
    assert pieces[0] == {"index": 0, "type": "custom", "custom": {"name": "shell", "input": ""}}
    assert "".join(piece["custom"]["input"] for piece in pieces) == 'ls "a"\n'


@pytest.mark.parametrize("value", [0, False, 5])
@pytest.mark.parametrize("field", ["function_call", "tool_choice"])
def test_a_choice_of_another_type_is_refused_also_if_it_is_false_to_python(serve: Serve, field, value):
    answer = serve(say_all("x")).client.post("/v1/chat/completions", json=HI | {field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_old_functions_are_answered_in_the_old_form(serve: Serve):
    served = serve(say_all(CALL), chat_template=QWEN3)
    fields = HI | {"functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}
    [choice] = served.client.post(PATH, json=fields).json()["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": {"name": "get_weather", "arguments": ARGUMENTS},
    }
    assert choice["finish_reason"] == "function_call"
    grammar = served.engine.next_request().grammar
    assert grammar is not None and grammar.spec is not None  # from the first token on

    chunks = events(served.client.post(PATH, json=fields | {"stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert parts[0] == {"name": "get_weather", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


# ---------------------------------------------------------------- what the scheduler gets


@pytest.mark.parametrize(
    ("fields", "has_spec", "has_triggers", "ends_after_first"),
    [
        ({}, False, True, False),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, False, True, True),
        ({"tool_choice": "required"}, True, False, False),
        ({"tool_choice": named({"name": "now"})}, True, False, False),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [named({"name": "now"})]},
                }
            },
            True,
            False,
            False,
        ),
    ],
)
def test_the_choice_becomes_a_grammar(serve: Serve, fields, has_spec, has_triggers, ends_after_first):
    served = serve(say_all(CALL_NOW), chat_template=QWEN3)
    ask(served, **fields)
    use = served.engine.next_request().grammar

    assert use is not None
    assert (use.spec is not None, bool(use.triggered)) == (has_spec, has_triggers)
    assert use.ends_after_first is ends_after_first
    texts = [spec.text for spec in use.specs]
    assert any("now" in text for text in texts)
    is_limited = isinstance(fields.get("tool_choice"), dict)
    assert any("get_weather" in text for text in texts) is not is_limited


def test_with_tool_choice_none_tools_are_not_shown_and_not_parsed(serve: Serve):
    served = serve(say_all(CALL), chat_template=QWEN3)
    answer = ask(served, tool_choice="none")
    request = served.engine.next_request()

    assert answer["message"]["content"] == CALL
    assert answer["finish_reason"] == "stop"
    assert request.grammar is None
    assert "get_weather" not in TOKENIZER.decode(ids_of(request), skip_special_tokens=False)


def test_a_schema_beside_tools_is_for_an_answer_without_calls(serve: Serve):
    schema = {"type": "object", "properties": {"zzz": {"type": "integer"}}, "required": ["zzz"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    served = serve(say_all('{"zzz": 5}'), chat_template=QWEN3)
    answer = ask(served, response_format=form)

    assert answer["message"]["content"] == '{"zzz": 5}'
    use = served.engine.next_request().grammar
    assert use is not None and use.spec is not None
    assert use.spec.kind is GrammarKind.LARK
    assert "zzz" in use.spec.text and "get_weather" in use.spec.text


def test_tool_messages_reach_the_template(serve: Serve):
    served = serve(say_all("x"), chat_template=QWEN3)
    call = {"id": "call_1", "index": 0, **named({"name": "now", "arguments": '{"zone": "UTC"}'})}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]},
    ]
    ask(served, messages=messages)
    prompt = prompt_of(served)

    assert '{"name": "now", "arguments": {"zone": "UTC"}}' in prompt
    assert "<tool_response>\n12:00\n</tool_response>" in prompt


def test_arguments_that_are_no_json_are_passed_on_with_a_warning(serve: Serve):
    call = {"id": "c", **named({"name": "now", "arguments": '{"zone": "U'})}
    messages = [*HI["messages"], {"role": "assistant", "tool_calls": [call]}, *HI["messages"]]
    reply = serve(say_all("x")).client.post(PATH, json={"messages": messages})

    assert reply.status_code == 200
    assert any("messages[1].tool_calls[0]" in warning for warning in reply.json()["warnings"])


def test_tokenize_and_pins_render_tools_as_chats_do(serve: Serve):
    served = serve(say_all("x"), chat_template=QWEN3)
    ask(served)
    ids = ids_of(served.engine.next_request())
    body = HI | {"tools": [WEATHER, NOW], "add_generation_prompt": True}

    assert served.client.post("/tokenize", json=body).json()["tokens"] == ids
    assert served.client.post("/v1/cache/pins", json=body | {"ttl": 5}).status_code == 200
    assert memoryview(served.engine.pins.get_nowait().input_ids).cast("i").tolist() == ids


# ---------------------------------------------------------------- errors

UNIQUE = {"type": "object", "properties": {"b": {"type": "array", "uniqueItems": True}}}
TAGS = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_field", "is missing"),
        ({"tools": [named(5)]}, "tools[0].function", "invalid_type", "object"),  # type: ignore[arg-type]
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "invalid_tools", "unique"),
        ({"tools": [named({"name": "a b"})]}, "tools[0].function.name", "invalid_tools", "must match"),
        (
            {"tools": [named({"name": "a", "parameters": {"type": "array"}})]},
            "tools[0].function.parameters",
            "invalid_schema",
            "object",
        ),
        (
            {"tools": [named({"name": "a", "strict": True, "parameters": UNIQUE})]},
            "tools[0].function.parameters/properties/b",
            "unsupported_schema",
            "uniqueItems",
        ),
        (
            {"functions": [{"name": "a b"}], "tools": None},
            "functions[0].name",
            "invalid_tools",
            "must match",
        ),
        ({"functions": [NOW["function"]]}, "functions", "invalid_value", "one form"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_tools", "empty"),
        ({"tool_choice": named({"name": "zzz"})}, "tool_choice", "invalid_tools", "not in tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value", "required"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type", "invalid_value", "allowed_tools"),
        (
            {"tool_choice": "required", "regex": "a+"},
            "tool_choice",
            "conflicting_constraints",
            "regex constrains",
        ),
        ({"structural_tag": TAGS}, "structural_tag", "conflicting_constraints", "tools"),
        ({"tools": [named({"name": f"t{i}"}) for i in range(513)]}, "tools", None, "the limit is 512"),
    ],
)
def test_refused(serve: Serve, fields, param, code, message):
    reply = serve(chat_template=QWEN3).client.post(PATH, json=HI | {"tools": [WEATHER, NOW]} | fields)
    error = reply.json()["error"]

    assert (reply.status_code, error["param"]) == (400, param), error
    assert code is None or error["code"] == code
    assert message in error["message"]


def test_without_a_parser_calls_cannot_be_required(serve: Serve):
    served = serve(say_all(CALL), chat_template=QWEN3, answers={"tool_call_parser": "none"})
    assert ask(served)["message"]["content"] == CALL  # shown, not parsed
    assert served.engine.next_request().grammar is None

    reply = served.client.post(PATH, json=HI | {"tools": [NOW], "tool_choice": "required"})
    assert reply.json()["error"]["code"] == "unsupported_field"
