"""The APIs of agents' clients, as contracts: long answers, histories with unknown parts, results without calls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.tokenizer_manager.http.anthropic.wire import COUNT_POLICY, MESSAGES_POLICY
from engine.tokenizer_manager.http.native import convert as native
from engine.tokenizer_manager.http.native import llama_server
from engine.tokenizer_manager.http.ollama.wire import (
    CHAT_POLICY,
    GENERATE_POLICY,
    OPTIONS_POLICY,
    SHOW_POLICY,
)
from engine.tokenizer_manager.http.openai import chat, completions
from engine.tokenizer_manager.http.recent_items import KEPT_S, RecentItems
from engine.tokenizer_manager.http.responses.wire import POLICY, MessageItem, OutputText
from engine.tokenizer_manager.http.routes import ROUTES

from ..conftest import Serve, Served, _served
from ..fake_engine import CAPACITY, LENGTH, TOKENIZER, say_all
from .answers import sse
from .serving import CALL, PARAMETERS, ROOMY

CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
FUNCTION = {"name": "f", "parameters": PARAMETERS}
NESTED_TOOL = {"type": "function", "function": FUNCTION}


def body_of(path: str, history: list[Any], **fields: Any) -> dict[str, Any]:
    """A request of an API with this history."""
    if path == RESPONSES:
        return {"input": history, **fields}
    defaults: dict[str, dict[str, Any]] = {MESSAGES: {"max_tokens": 9}, OLLAMA: {"stream": False}}
    more = defaults.get(path, {})
    return {"messages": history} | more | fields


def post(served: Served, path: str, history: list[Any], **fields: Any) -> Any:
    """Answer a history."""
    return served.client.post(path, json=body_of(path, history, **fields))


def prompt_of(served: Served) -> str:
    """The prompt of the next request at the engine."""
    ids = served.engine.next_request().input_ids
    return TOKENIZER.decode(memoryview(ids).cast("i").tolist(), skip_special_tokens=False)


# ---------------------------------------------------------------- the limit of an answer

HI = [{"role": "user", "content": "hi"}]
BEYOND = 64_000


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (MESSAGES, {"max_tokens": BEYOND}, {"stop_reason": "model_context_window_exceeded"}),
        (MESSAGES, {"max_tokens": 2**31 - 1}, {"stop_reason": "model_context_window_exceeded"}),
        (MESSAGES, {"max_tokens": 9}, {"stop_reason": "max_tokens"}),
        (RESPONSES, {"max_output_tokens": BEYOND}, {"incomplete_details": {"reason": "max_output_tokens"}}),
        (OLLAMA, {"options": {"num_predict": BEYOND}}, {"done_reason": "length"}),
    ],
)
def test_a_longer_answer_than_fits_is_cut_to_what_fits(serve: Serve, path, fields, reason):
    served = serve(say_all("x", finish=LENGTH))
    reply = post(served, path, HI, **fields)
    request = served.engine.next_request()

    assert reply.status_code == 200, reply.text
    assert {key: reply.json()[key] for key in reason} == reason
    prompt_len = len(request.input_ids) // 4
    asked = fields.get("max_tokens", BEYOND)
    assert request.sampling.max_new_tokens == min(asked, CAPACITY.max_model_len - prompt_len)


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, OLLAMA])
def test_a_prompt_that_fills_the_context_is_refused_all_the_same(serve: Serve, path):
    reply = post(serve(say_all("x")), path, [{"role": "user", "content": "x" * 300}])

    assert reply.status_code == 400
    assert "context holds 256" in reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "max_tokens": -1}),
        (CHAT, {"messages": HI, "max_completion_tokens": -1}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": -1}),
        (RESPONSES, {"input": "hi", "max_output_tokens": -1}),
        (OLLAMA, {"messages": HI, "options": {"num_predict": -1}}),
    ],
)
def test_minus_one_is_no_limit(serve: Serve, path, body):
    served = serve(say_all("x"))
    assert served.client.post(path, json=body).status_code == 200
    request = served.engine.next_request()
    assert request.sampling.max_new_tokens == CAPACITY.max_model_len - len(request.input_ids) // 4


# ---------------------------------------------------------------- members that are null

NULLABLE = {
    # vLLM's `prompt_logprobs`: null for the first token
    "OpenAIBody.prompt_logprobs",
    "ChatCompletion.prompt_logprobs",
    "ChatChunk.prompt_logprobs",
    "Completion.prompt_logprobs",
    "CompletionChoice.prompt_logprobs",
    "PromptTokenLogprob.rank",
    "Classification.label",  # vLLM's: null where the model's files name no labels
    # OpenAI's chat completions and completions
    "ErrorObject.param",
    "ErrorObject.code",
    "OpenAIBody.usage",
    "ChatCompletion.usage",
    "ChatMessageBody.content",
    "ChatMessageBody.refusal",
    "ChatChoice.logprobs",
    "ChatChoice.finish_reason",
    "ChatChunkChoice.logprobs",
    "ChatChunkChoice.finish_reason",
    "ChatLogprobs.refusal",
    "CompletionChoice.logprobs",
    "CompletionChoice.finish_reason",
    "CompletionLogprobs.token_logprobs",
    "CompletionLogprobs.top_logprobs",
    "ChatChunk.usage",
    "Completion.usage",
    # OpenAI's decisions: of a question without one
    *(f"{kind}Answer.name" for kind in ("Choice", "Predicate", "Refusal", "Score")),
    # Anthropic's message batches: of times that have not come, and of an empty list
    *(
        f"MessageBatchBody.{name}"
        for name in ("archived_at", "cancel_initiated_at", "ended_at", "results_url")
    ),
    *(f"MessageBatchListBody.{name}" for name in ("first_id", "last_id")),
    # OpenAI's responses: `X | null` in its schema
    "ResponseBody.completed_at",
    "ResponseBody.error",
    "ResponseBody.incomplete_details",
    "ResponseBody.instructions",
    "ResponseBody.max_output_tokens",
    "ResponseBody.max_tool_calls",
    "ResponseBody.previous_response_id",
    "ResponseBody.temperature",
    "ResponseBody.top_p",
    "ReasoningItem.encrypted_content",
    # Anthropic's
    "MessageBody.stop_reason",
    "MessageBody.stop_sequence",
    "MessageDelta.stop_sequence",
    "MessageBody.diagnostics",
    # of the engine itself, and SGLang's
    "MetaInfo.finish_reason",
    "MetaInfo.input_token_logprobs",
    "MetaInfo.input_top_logprobs",
    "MetaInfo.output_token_logprobs",
    "MetaInfo.output_top_logprobs",
    "MetaInfo.input_token_ids_logprobs",
    "MetaInfo.output_token_ids_logprobs",
}
"""Members that may be null in the APIs of vendors: their schemas say so. Others are left out where there is nothing."""
OWN_MEMBERS = {"GrammarReport", "Truncated", "OverruledToken"}
"""The engine's own members of the vendors' answers."""
OWN_PATHS = {
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/v1/loads",
    "/loads",
    "/get_load",
    "/v1/requests",
    "/v1/grammar/check",
}


def nullable_fields(kind: Any) -> set[str]:
    """The fields below a type that may be null, as `Struct.field`."""
    found: set[str] = set()
    seen: set[str] = set()

    def walk(info: Any) -> bool:
        """Whether a value may be null; looks into what it is made of."""
        if isinstance(info, msgspec.inspect.NoneType):
            return True
        if isinstance(info, msgspec.inspect.UnionType):
            return sum(walk(each) for each in info.types) > 0  # looks into all of them
        for name in ("item_type", "key_type", "value_type"):
            if (inner := getattr(info, name, None)) is not None and walk(inner):
                return True
        for inner in getattr(info, "item_types", ()):
            if walk(inner):
                return True
        if isinstance(info, msgspec.inspect.StructType) and info.cls.__name__ not in seen:
            seen.add(info.cls.__name__)
            found.update(
                f"{info.cls.__name__}.{field.encode_name}" for field in info.fields if walk(field.type)
            )
        return False

    walk(msgspec.inspect.type_info(kind))
    return found


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if route.path not in OWN_PATHS],
    ids=lambda route: f"{route.method} {route.path}",
)
def test_no_answer_has_a_null_that_its_api_does_not_know(route):
    kinds = [kind for kind in (route.answer, route.events) if kind is not None]
    found = {name for kind in kinds for name in nullable_fields(kind)}

    assert {name for name in found if name.partition(".")[0] not in OWN_MEMBERS} <= NULLABLE


def test_no_null_stands_where_an_api_has_an_optional_member(serve: Serve):
    """Values that types do not show: what is sent, whole and in streams."""
    served = serve(say_all("x"))
    allowed = {name.partition(".")[2] for name in NULLABLE} | {"effort", "summary"}
    for path in (CHAT, RESPONSES, MESSAGES, OLLAMA):
        whole = post(served, path, HI).json()
        streamed = post(served, path, HI, stream=True)
        lines = [line.removeprefix("data: ") for line in streamed.text.splitlines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        assert len(events) > 1
        for value in (whole, *events):
            assert set(nulls_in(value)) <= allowed, path


def nulls_in(value: Any) -> list[str]:
    """The names of members that are null."""
    if isinstance(value, dict):
        return [name for key, each in value.items() for name in ([key] if each is None else nulls_in(each))]
    return [name for each in value for name in nulls_in(each)] if isinstance(value, list) else []


# ---------------------------------------------------------------- histories


class Step(NamedTuple):
    """A conversation with one call, in the form of an API.

    Attributes:
        call: what the client keeps of the call.
        result: the result with this content.
    """

    call: Any
    result: Any


USER = {"role": "user", "content": "hi"}


def call_in(path: str) -> dict[str, Any]:
    """A call `f({"a": 1})` with the id `call_1`."""
    if path == RESPONSES:
        return {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
    if path == MESSAGES:
        block = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}
        return {"role": "assistant", "content": [block]}
    arguments: Any = {"a": 1} if path == OLLAMA else '{"a": 1}'
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result_in(path: str, content: Any, call_id: str = "call_1") -> dict[str, Any]:
    """The result of a call."""
    if path == RESPONSES:
        return {"type": "function_call_output", "call_id": call_id, "output": content}
    if path == MESSAGES:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
        return {"role": "user", "content": [block]}
    if path == OLLAMA:
        return {"role": "tool", "tool_name": "f", "content": content}
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def user_in(path: str, content: Any) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": content}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_result_without_its_call_is_refused_as_vendors_do(serve: Serve, path):
    served = serve(say_all("x"))
    for history in (
        [USER, result_in(path, "1")],
        [USER, call_in(path), result_in(path, "1", "call_2")],
        [USER, result_in(path, "1"), call_in(path)],
    ):
        reply = post(served, path, history)
        assert reply.status_code == 400, reply.text
        assert "before it has this id" in reply.text


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_may_be_an_object(serve: Serve, arguments):
    served = serve(say_all("x"), capacity=ROOMY)
    item = call_in(RESPONSES) | {"arguments": arguments}
    assert post(served, RESPONSES, [USER, item, result_in(RESPONSES, "1")]).status_code == 200
    assert '"arguments": {"a": 1}' in prompt_of(served)


def test_ids_may_be_left_out_in_chats(serve: Serve):
    served = serve(say_all("x"))
    call = call_in(CHAT)
    del call["tool_calls"][0]["id"]
    result = result_in(CHAT, "1")
    assert post(served, CHAT, [USER, call, result]).status_code == 200
    del result["tool_call_id"]
    assert post(served, CHAT, [USER, call_in(CHAT), result]).status_code == 200
    assert post(served, CHAT, [USER, result]).status_code == 400


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (42, "42"),
        (2.5, "2.5"),
        (True, "true"),
        ({"temp": 20, "city": "Zürich"}, '{"temp": 20, "city": "Zürich"}'),
        ([1, 2], "[1, 2]"),
        ([{"id": 1}, {"id": 2}], '[{"id": 1}, {"id": 2}]'),
        (["a", "b"], '["a", "b"]'),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
    ],
)
def test_a_result_of_any_value_is_text(serve: Serve, path, content, text):
    served = serve(say_all("x"), capacity=ROOMY)
    reply = post(served, path, [USER, call_in(path), result_in(path, content)])

    assert reply.status_code == 200, reply.text
    assert f"{text}<|im_end|>" in prompt_of(served).replace("\nassistant", "")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
        {"type": "document", "source": {}},
        {"type": "tool_reference", "tool_name": "g"},
        {"type": "something_new", "x": [1]},
    ],
    ids=lambda part: part["type"],
)
def test_a_part_of_a_result_that_is_no_text_is_left_out(serve: Serve, path, part):
    served = serve(say_all("x"), capacity=ROOMY)
    history = [USER, call_in(path), result_in(path, [{"type": "text", "text": "see"}, part])]
    reply = post(served, path, history)

    assert reply.status_code == 200, reply.text
    [warning] = reply.json()["warnings"]
    assert f"({part['type']}) was left out" in warning
    assert f"see\n[{part['type']} left out]" in prompt_of(served)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
        {"type": "compaction_trigger"},
        {"type": "context_compaction", "encrypted_content": "x"},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "agent_message", "content": []},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "image_generation_call", "id": "ig_1", "result": "AA=="},
        {"type": "tool_search_output", "tools": []},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "mcp_call", "id": "m", "name": "x", "arguments": "{}"},
        {"type": "something_of_next_year"},
    ],
    ids=lambda item: item["type"],
)
def test_an_item_that_is_not_known_is_left_out(serve: Serve, item):
    served = serve(say_all("x"))
    reply = post(served, RESPONSES, [USER, item])

    assert reply.status_code == 200, reply.text
    assert reply.json()["warnings"][0].startswith(f"input[1] ({item['type']}) was left out")
    plain = serve(say_all("x"))
    post(plain, RESPONSES, [USER])
    assert prompt_of(served) == prompt_of(plain)


def test_the_result_of_a_call_that_is_left_out_is_left_out(serve: Serve):
    served = serve(say_all("x"))
    shell = {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}
    reply = post(served, RESPONSES, [USER, shell, result_in(RESPONSES, "a.py", "c")])

    assert reply.status_code == 200, reply.text
    assert [warning.split(" was")[0] for warning in reply.json()["warnings"]] == [
        "input[1] (local_shell_call)",
        "input[2] (function_call_output)",
    ]
    assert "a.py" not in prompt_of(served)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (path, kind)
        for path in (CHAT, MESSAGES)
        for kind in ("redacted_thinking", "server_tool_use", "web_search_tool_result", "image", "new_kind")
    ],
)
def test_a_part_of_an_assistants_message_that_is_not_known_is_left_out(serve: Serve, path, kind):
    served = serve(say_all("x"))
    parts = [{"type": "text", "text": "so far"}, {"type": kind, "data": "x"}]
    reply = post(served, path, [USER, {"role": "assistant", "content": parts}, USER])

    assert reply.status_code == 200, reply.text
    assert f"({kind}) was left out" in reply.json()["warnings"][0]
    assert "assistant\nso far<|im_end|>" in prompt_of(served)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("kind", ["image", "input_image", "image_url", "input_audio", "document", "file"])
def test_a_medium_of_the_user_is_refused(serve: Serve, path, kind):
    reply = post(serve(say_all("x")), path, [user_in(path, [{"type": kind}])])

    assert reply.status_code == 400
    assert "serves only the text of this model" in reply.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "part", [{"text": "hey"}, {"type": "text", "text": "hey"}, {"type": "input_text", "text": "hey"}]
)
def test_text_parts_of_other_apis_and_without_a_type(serve: Serve, path, part):
    served = serve(say_all("x"))
    assert post(served, path, [user_in(path, [part])]).status_code == 200
    assert "user\nhey<|im_end|>" in prompt_of(served)


SHOWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hmm", "signature": "x"},
        {"type": "reasoning", "text": "hmm"},
        {"type": "reasoning", "reasoning": "hmm"},
    ],
)
def test_parts_with_reasoning_are_the_reasoning(serve: Serve, path, part):
    served = serve(say_all("x"), chat_template=SHOWN)
    answer = {"role": "assistant", "content": [part, {"type": "text", "text": "yes"}]}
    assert post(served, path, [USER, answer, USER]).status_code == 200
    assert "assistant\n[hmm]yes<|im_end|>" in prompt_of(served)


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("choice", ["any", "required", {"type": "any"}, {"type": "required"}])
@pytest.mark.parametrize(
    ("path", "tool"), [(CHAT, NESTED_TOOL), (RESPONSES, FUNCTION | {"type": "function"})]
)
def test_any_is_required(serve: Serve, path, tool, choice):
    served = serve(say_all(CALL), capacity=ROOMY)
    assert post(served, path, HI, tools=[tool], tool_choice=choice).status_code == 200
    assert served.engine.next_request().grammar is not None
    with_auto = served.client.post(path, json=body_of(path, HI, tools=[tool], tool_choice={"type": "auto"}))
    assert with_auto.status_code == 200


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (CHAT, NESTED_TOOL),
        (CHAT, {"function": FUNCTION}),
        (RESPONSES, FUNCTION | {"type": "function"}),
        (MESSAGES, {"name": "f", "input_schema": PARAMETERS}),
    ],
)
@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "mcp", "code_interpreter"])
def test_a_tool_that_the_server_would_run_is_left_out(serve: Serve, path, tool, kind):
    served = serve(say_all("x"), capacity=ROOMY)
    reply = post(served, path, HI, tools=[{"type": kind}, tool])

    assert reply.status_code == 200, reply.text
    assert kind in reply.json()["warnings"][0]
    assert "was left out" in reply.json()["warnings"][0]
    alone = serve(say_all("x"), capacity=ROOMY)
    post(alone, path, HI, tools=[tool])
    assert prompt_of(served) == prompt_of(alone)


# ---------------------------------------------------------------- references to items


def test_a_tool_loop_with_references_to_items(serve: Serve):
    """The second step of @ai-sdk/openai: the call of the first is named by its id."""
    served = serve(say_all(CALL), capacity=ROOMY)
    tool = FUNCTION | {"type": "function"}
    streamed = post(served, RESPONSES, HI, tools=[tool], stream=True)
    [call] = sse(streamed.content)[-1][1]["response"]["output"]
    reference = {"type": "item_reference", "id": call["id"]}
    result = result_in(RESPONSES, "7", call["call_id"])
    reply = post(served, RESPONSES, [USER, reference, result], tools=[tool])
    spelled_out = post(served, RESPONSES, [USER, call, result], tools=[tool])

    assert (reply.status_code, spelled_out.status_code) == (200, 200), reply.text
    served.engine.next_request()
    assert prompt_of(served) == prompt_of(served)


def test_an_item_of_another_key_cannot_be_referred_to(serve: Serve):
    served = serve(say_all("hello"), api_key=("ann", "bob"))
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("ann", "bob")}
    [item] = served.client.post(RESPONSES, json={"input": "Hi"}, headers=keys["ann"]).json()["output"]
    body = {"input": [USER, {"type": "item_reference", "id": item["id"]}, USER]}
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        statuses = [served.client.post(path, json=body, headers=key).status_code for key in keys.values()]
        assert statuses == [200, 400]


def test_a_reference_to_an_item_that_is_not_kept(serve: Serve):
    served = serve(say_all("hello"))
    [item] = post(served, RESPONSES, HI, store=False).json()["output"]
    for item_id in (item["id"], "rs_1"):
        reply = post(served, RESPONSES, [USER, {"type": "item_reference", "id": item_id}])
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "input[1].id"
        assert "store: false" in reply.json()["error"]["message"]


def test_recent_items_are_bounded_in_bytes_and_time():
    now_s = 0.0
    items = RecentItems(max_bytes=2000, clock=lambda: now_s)

    def add(name: str, text: str = "x", owner: str = "") -> None:
        items.keep([MessageItem(id=name, status="completed", content=[OutputText(text=text)])], owner)

    add("a")
    add("b", owner="ann")
    found = items.find("a", "")
    assert found is not None
    assert (found["type"], found["content"][0]["text"]) == ("message", "x")
    assert items.find("b", "") is None, "another client's"
    assert items.find("b", "ann") is not None
    add("c", "y" * 1200)
    assert [items.find(name, "") is not None for name in "ac"] == [False, True]
    now_s = KEPT_S + 1
    assert items.find("c", "") is None
    add("d")
    assert items.find("d", "") is not None


# ---------------------------------------------------------------- what is asked for and cannot be


@pytest.mark.parametrize(
    ("include", "status", "warnings"),
    [
        (["reasoning.encrypted_content"], 200, 0),
        (["message.output_text.logprobs"], 400, 0),
        (["web_search_call.action.sources", "reasoning.encrypted_content"], 200, 1),
        ([], 200, 0),
    ],
)
def test_include(serve: Serve, include, status, warnings):
    reply = post(serve(say_all("x")), RESPONSES, HI, include=include)

    assert reply.status_code == status
    assert len(reply.json().get("warnings", ())) == warnings
    if status == 400:
        assert reply.json()["error"]["param"] == "include[0]"


@pytest.mark.parametrize(
    "policy",
    [
        *(chat._POLICY, completions._POLICY, native._POLICY, POLICY, MESSAGES_POLICY, COUNT_POLICY),
        *(CHAT_POLICY, GENERATE_POLICY, OPTIONS_POLICY, SHOW_POLICY),
        *(llama_server._INFILL_POLICY, llama_server._COMPLETION_POLICY),
    ],
)
def test_every_field_without_an_effect_is_in_the_documents(policy):
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    named = set(re.findall(r"`([\w.]+)`", page))
    assert {name for name in policy.no_effect if name not in named} == set()


def test_no_field_names_another_api(serve: Serve):
    """A message is about a field that the client has sent."""
    served = serve(say_all("x"), capacity=ROOMY)
    prefilled = [USER, {"role": "assistant", "content": "{"}]
    tool = {"name": "f", "input_schema": PARAMETERS}
    reply = post(served, MESSAGES, prefilled, tools=[tool])
    assert reply.status_code == 400
    assert "a last message of the assistant cannot be combined with tools" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (CHAT, {"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        (CHAT, {"thinking": {"type": "enabled"}}, "thinking"),
        (CHAT, {"thinking_token_budget": 100}, "thinking_token_budget"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (RESPONSES, {"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking"),
        (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
        (OLLAMA, {"think": True}, "think"),
        (OLLAMA, {"think": "high"}, "think"),
    ],
)
def test_reasoning_that_a_model_does_not_have_is_warned_about(serve: Serve, path, fields, name):
    served = serve(say_all("x"))
    [warning] = post(served, path, HI, **fields).json()["warnings"]

    assert warning.split()[0] == name
    assert "has no effect: this model's template has no reasoning" in warning


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"thinking": {"type": "disabled"}}),
        (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (OLLAMA, {"think": False}),
    ],
)
def test_reasoning_that_is_turned_off_needs_no_warning(serve: Serve, path, fields):
    assert "warnings" not in post(serve(say_all("x")), path, HI, **fields).json()


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
OBJECTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [NESTED_TOOL]}, "tools.0"),
    (CHAT, {"tools": [NESTED_TOOL]}, "tools.0.function"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools.0.custom"),
    (
        CHAT,
        {
            "tools": [NESTED_TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NESTED_TOOL]},
            },
        },
        "tool_choice.allowed_tools",
    ),
    (
        CHAT,
        {"tools": [NESTED_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function",
    ),
    (CHAT, {"functions": [FUNCTION]}, "functions.0"),
    (CHAT, {"functions": [FUNCTION], "function_call": {"name": "f"}}, "function_call"),
    (CHAT, {"thinking": {"type": "disabled"}}, "thinking"),
    (CHAT, {"reasoning": {"effort": "none"}}, "reasoning"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        "response_format.json_schema",
    ),
    (CHAT, {"messages": [USER]}, "messages.0"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "messages.0.content.0",
    ),
    (CHAT, {"messages": [USER, call_in(CHAT), result_in(CHAT, "1")]}, "messages.1.tool_calls.0"),
    (CHAT, {"messages": [USER, call_in(CHAT), result_in(CHAT, "1")]}, "messages.1.tool_calls.0.function"),
    (RESPONSES, {"tools": [FUNCTION | {"type": "function"}]}, "tools.0"),
    (
        RESPONSES,
        {"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION | {"type": "function"}]}]},
        "tools.0.tools.0",
    ),
    (
        RESPONSES,
        {"tools": [FUNCTION | {"type": "function"}], "tool_choice": {"type": "function", "name": "f"}},
        "tool_choice",
    ),
    (RESPONSES, {"text": {"format": FORMAT}}, "text"),
    (RESPONSES, {"text": {"format": FORMAT}}, "text.format"),
    (RESPONSES, {"reasoning": {"effort": "none"}}, "reasoning"),
    (RESPONSES, {"input": [USER]}, "input.0"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
        "input.0.content.0",
    ),
    (RESPONSES, {"input": [USER, call_in(RESPONSES), result_in(RESPONSES, "1")]}, "input.1"),
    (RESPONSES, {"input": [USER, call_in(RESPONSES), result_in(RESPONSES, "1")]}, "input.2"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": PARAMETERS}]}, "tools.0"),
    (
        MESSAGES,
        {"tools": [{"name": "f", "input_schema": PARAMETERS}], "tool_choice": {"type": "tool", "name": "f"}},
        "tool_choice",
    ),
    (MESSAGES, {"thinking": {"type": "disabled"}}, "thinking"),
    (MESSAGES, {"output_config": {"format": FORMAT}}, "output_config"),
    (MESSAGES, {"output_config": {"format": FORMAT}}, "output_config.format"),
    (MESSAGES, {"metadata": {"user_id": "u"}}, "metadata"),
    (MESSAGES, {"system": [{"type": "text", "text": "x"}]}, "system.0"),
    (MESSAGES, {"messages": [USER]}, "messages.0"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "messages.0.content.0",
    ),
    (MESSAGES, {"messages": [USER, call_in(MESSAGES), result_in(MESSAGES, "1")]}, "messages.1.content.0"),
    (MESSAGES, {"messages": [USER, call_in(MESSAGES), result_in(MESSAGES, "1")]}, "messages.2.content.0"),
    (OLLAMA, {"tools": [NESTED_TOOL]}, "tools.0"),
    (OLLAMA, {"tools": [NESTED_TOOL]}, "tools.0.function"),
    (OLLAMA, {"options": {"seed": 1}}, "options"),
    (OLLAMA, {"messages": [USER]}, "messages.0"),
    (OLLAMA, {"messages": [USER, call_in(OLLAMA), result_in(OLLAMA, "1")]}, "messages.1.tool_calls.0"),
]
"""Objects inside the bodies of all APIs: path, body, place of the object."""


@pytest.fixture(scope="module")
def roomy(stopped_servers: Any) -> Any:
    """A server with room for tools, shared by the tests of the module."""
    with _served(stopped_servers, say_all("x"), {"capacity": ROOMY}) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "fields", "place"), OBJECTS, ids=[f"{path} {place}" for path, _, place in OBJECTS]
)
def test_a_member_that_is_not_known_is_never_silent(roomy: Served, path, fields, place):
    body = json.loads(json.dumps(body_of(path, HI) | fields))
    inner = body
    for step in place.split("."):
        inner = inner[int(step)] if step.isdigit() else inner[step]
    inner["wibble"] = 1
    reply = roomy.client.post(path, json=body)

    assert reply.status_code == 200, reply.text
    where = ".".join(place.split("."))
    assert any(
        "wibble was ignored" in warning
        and warning.replace("[", ".").replace("]", "").count(f"{where}.wibble")
        for warning in reply.json().get("warnings", ())
    ), reply.json().get("warnings")
