from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import RequestError
from engine.runtime.sampling_defaults import OPENAI_DEFAULTS
from engine.tokenizer_manager.http.ollama.convert import read_chat, read_generate

HI = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Any:
    return read_chat({"messages": [HI]} | fields, EngineConfig(), OPENAI_DEFAULTS, max_model_len=256)[1]


def generate(**fields: Any) -> Any:
    return read_generate(fields, EngineConfig(), OPENAI_DEFAULTS, max_model_len=256)[1]


def test_options_are_sampling_parameters():
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 5,
        "stop": ["x"],
        "repeat_penalty": 1.2,
        "num_ctx": 256,
        "num_thread": 4,
    }
    made = chat(options=options, keep_alive="5m")
    sampling = made.sampling

    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 3)
    assert (sampling.top_p, sampling.min_p, sampling.seed, sampling.stop) == (0.9, 0.1, 5, ("x",))
    assert sampling.repetition_penalty == 1.2
    assert made.warnings == []
    assert chat(options={"num_predict": -1, "top_k": 0}).sampling.max_new_tokens is None


@pytest.mark.parametrize("num_ctx", [1, 128, 257, 9999])
def test_another_context_than_the_server_s_is_a_warning(num_ctx):
    assert chat(options={"num_ctx": num_ctx}).warnings == [
        f"options.num_ctx is {num_ctx}, but the context of this server has 256 tokens; it has no effect"
    ]


@pytest.mark.parametrize("num_ctx", [0, -1])
def test_no_context_is_refused(num_ctx):
    with pytest.raises(RequestError, match=f"options.num_ctx is {num_ctx}, but it must be at least 1"):
        chat(options={"num_ctx": num_ctx})


def test_results_belong_to_the_first_open_call_of_their_tool():
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}}

    made = chat(
        messages=[
            HI,
            {"role": "assistant", "thinking": "hm", "tool_calls": [call("f"), call("g")]},
            {"role": "tool", "tool_name": "g", "content": "G"},
            {"role": "tool", "content": "F"},
        ]
    )
    _, assistant, first, second = made.conversation.messages

    ids = [each["id"] for each in assistant["tool_calls"]]
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert [first["tool_call_id"], second["tool_call_id"]] == [ids[1], ids[0]]


def test_think_and_format():
    assert chat(think=True).conversation.reasoning.enabled is True
    assert chat(think=False).conversation.reasoning.enabled is False
    assert chat(think="low").conversation.reasoning.effort == "low"
    assert chat(format="json").conversation.spec is not None
    assert chat(format={"type": "object"}).conversation.spec is not None
    assert chat(format="").conversation.spec is None


def test_generate():
    made = generate(prompt="hi", system="be brief", stream=False)

    assert made.conversation.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert generate(prompt="hi", raw=True).prompts == ["hi"]
    assert generate().conversation.messages == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ({"messages": [HI | {"images": ["x"]}]}, "messages[0].images"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"format": "xml"}, "format"),
        ({"think": "huge"}, "think"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"template": "{{ x }}"}, "template"),
    ],
)
def test_errors_name_the_clients_path(fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        chat(**fields)

    assert refused.value.param == param
    assert refused.value.status == 400


def test_unknown_fields_of_messages_are_not_silent():
    assert chat(messages=[HI | {"wibble": 1}]).warnings == ["unknown field messages[0].wibble was ignored"]
