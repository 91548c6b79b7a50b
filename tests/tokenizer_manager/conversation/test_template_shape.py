"""Templates that refuse or drop messages, and chats that are written so that all of their contents are shown.

The templates are written from the rules of the public models that their names say.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any, Final

import pytest

from engine.tokenizer_manager.conversation.chat_template import ChatTemplate
from engine.tokenizer_manager.conversation.template_shape import TemplateShape, fitted
from tests.tokenizer_manager.conversation import chat_templates

QWEN35: Final = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(query=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = true %}{% endif %}{% endfor %}
{%- if not ns.query %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}"""

_MISTRAL_CALLS: Final = """\
{%- if m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs: alphanumeric, length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs: alphanumeric, length 9!') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
{%- endfor %}
{{- m.content + '</s>' }}
"""
_ALTERNATE: Final = """\
{%- set ns = namespace(index=0) %}
{%- for m in chat %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
"""
MISTRAL_SMALL: Final = (
    """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set chat = messages[1:] %}
{%- else %}{% set system = 'default' %}{% set chat = messages %}{% endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}"""
    + _ALTERNATE
    + "{%- for m in chat %}"
    + _MISTRAL_CALLS
    + """\
{%- elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'assistant' %}{{ m.content + '</s>' }}
{%- else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""
)
NEMO: Final = MISTRAL_SMALL.replace(
    "{%- elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}\n", ""
)
MINISTRAL: Final = NEMO.replace(
    "(m.role == 'assistant' and not m.tool_calls)", "m.role == 'assistant' and not m.tool_calls"
)
GEMMA2: Final = """\
{{- bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}"""
GPT_OSS: Final = """\
{%- if messages[0].role in ['system', 'developer'] %}{% set developer = messages[0].content %}
{%- set chat = messages[1:] %}{% else %}{% set developer = '' %}{% set chat = messages %}{% endif %}
{{- '<|start|>developer<|message|>' + developer + '<|end|>' }}
{%- for m in chat %}
{%- if m.role == 'assistant' and m.tool_calls %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|message|><|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>functions.f to=assistant<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}"""
SMOLLM3: Final = """\
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}"""
LAST_WINS: Final = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{- ns.system }}
{%- for m in messages %}{% if m.role != 'system' %}{{ '|' + m.role + ':' + m.content }}{% endif %}{% endfor %}"""
STRICT: Final = {
    "qwen35": QWEN35,
    "mistral_small": MISTRAL_SMALL,
    "nemo": NEMO,
    "ministral": MINISTRAL,
    "gemma2": GEMMA2,
    "gpt_oss": GPT_OSS,
    "smollm3": SMOLLM3,
    "last_wins": LAST_WINS,
}
LONG_ID: Final = "call_f7d22e6bcab43e212019e931"


def found(source: str) -> ChatTemplate:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    template.find_part_roles()
    template.find_shape()
    return template


def chat(roles: str) -> list[dict[str, Any]]:
    """A message for each letter of s, u, a, c(all) and t(ool)."""
    names = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    messages: list[dict[str, Any]] = []
    for index, letter in enumerate(roles):
        message: dict[str, Any] = {"role": names[letter], "content": f"text {index}."}
        if letter == "c":
            function = {"name": "f", "arguments": {}}
            calls = [{"id": LONG_ID, "type": "function", "function": function}]
            message |= {"content": "", "tool_calls": calls}
        if letter == "t":
            message |= {"tool_call_id": LONG_ID, "name": "f"}
        messages.append(message)
    return messages


@pytest.mark.parametrize("name", sorted(STRICT))
def test_every_chat_is_shown_with_all_of_its_contents_in_order(name: str):
    template = found(STRICT[name])
    assert template.shape.missing
    with_tools = name != "gemma2"
    for size in range(1, 6):
        for roles in itertools.product("suact" if with_tools else "sua", repeat=size):
            chosen = "".join(roles)
            if any(letter == "t" and "c" not in chosen[:index] for index, letter in enumerate(chosen)):
                continue
            messages = chat(chosen)
            prompt = template.render(messages, add_generation_prompt=False)
            for message in messages:
                assert message["content"] in prompt, (chosen, prompt)
            texts = [message["content"] for message in messages if message["role"] in ("user", "assistant")]
            places = [prompt.index(text) for text in texts if text]
            assert places == sorted(places), (chosen, prompt)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("qwen35", {"later_system", "no_user"}),
        (
            "mistral_small",
            {
                "later_system",
                "repeated_roles",
                "assistant_first",
                "user_after_tool",
                "open_calls",
                "any_ids",
            },
        ),
        ("gemma2", {"system", "later_system", "repeated_roles", "assistant_first", "no_user"}),
        ("gpt_oss", {"later_system", "text_with_calls", "parallel_calls"}),
        ("smollm3", {"later_system"}),
        ("last_wins", {"later_system"}),
    ],
)
def test_what_a_template_cannot_show_is_found_and_logged(
    caplog: pytest.LogCaptureFixture, name: str, missing: set[str]
):
    with caplog.at_level(logging.INFO):
        template = found(STRICT[name])

    assert set(template.shape.missing) == missing
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert all(each in caplog.text for each in missing)


def test_a_template_that_wants_arguments_as_text_is_probed_with_text():
    source = MISTRAL_SMALL.replace("'[CALL_ID]' + call.id", "call.function.arguments + '[CALL_ID]' + call.id")
    template = found(source)

    assert source != MISTRAL_SMALL and template.shape == found(MISTRAL_SMALL).shape
    messages = chat("uctu")
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    assert '{"a": 1}[CALL_ID]' in template.render(messages, add_generation_prompt=False)


@pytest.mark.parametrize("name", ["QWEN3", "QWEN3_CODER", "SMOLLM2", "KIMI_K2"])
def test_a_template_that_shows_everything_gets_the_messages_as_they_are(name: str):
    template = found(getattr(chat_templates, name))
    messages = chat("sus")

    assert template.shape == TemplateShape()
    assert fitted(messages, template.shape) is messages


@pytest.mark.parametrize(
    "source", ["constant", "{{ raise_exception('never') }}", "{{ messages[9].content }}"]
)
def test_nothing_is_changed_for_a_template_that_shows_no_message(source: str):
    assert found(source).shape == TemplateShape()


def test_later_messages_of_the_system_are_put_into_the_next_message_of_the_user():
    """The request of Claude Code, and the items of Codex; the beginning of the prompt stays for the prefix cache."""
    template = found(QWEN35)

    def prompt(roles: str) -> str:
        return template.render(chat(roles), add_generation_prompt=False)

    head = "<|im_start|>system\ntext 0.<|im_end|>\n<|im_start|>user\ntext 1.<|im_end|>\n"
    assert prompt("sus") == f"{head}<|im_start|>user\ntext 2.<|im_end|>\n"
    assert prompt("susu") == f"{head}<|im_start|>user\ntext 2.\n\ntext 3.<|im_end|>\n"
    assert prompt("ssu").startswith(
        "<|im_start|>system\ntext 0.\n\ntext 1.<|im_end|>\n<|im_start|>user\ntext 2."
    )
    calls = prompt("sucst")  # between a call and its result
    assert calls.index("text 4.") < calls.index("text 3.")


def test_ids_of_other_models_are_nine_letters_and_stay_pairs():
    prompt = found(MISTRAL_SMALL).render(chat("uct"), add_generation_prompt=False)
    short = prompt.partition("[CALL_ID]")[2][:9]

    assert short.isalnum() and f"[TOOL_RESULTS]{short}[" in prompt
    messages = chat("uct")
    for message, key in ((messages[1]["tool_calls"][0], "id"), (messages[2], "tool_call_id")):
        message[key] = "abc123DEF"
    assert "[CALL_ID]abc123DEF" in found(MISTRAL_SMALL).render(messages, add_generation_prompt=False)


def test_a_text_of_the_user_after_a_result_is_put_into_the_result():
    prompt = found(MISTRAL_SMALL).render(chat("uctua"), add_generation_prompt=False)
    assert "[TOOL_CONTENT]text 2.\n\ntext 3.[/TOOL_RESULTS]text 4.</s>" in prompt


@pytest.mark.parametrize("source", [GPT_OSS, chat_templates.LLAMA31], ids=["gpt_oss", "llama31"])
def test_a_text_beside_calls_is_shown_in_front_of_them(source: str):
    template = found(source)
    assert not template.shape.text_with_calls
    for roles in ("uct", "uacta", "uctcta", "sucttu"):
        messages = chat(roles)
        for index, message in enumerate(messages):
            if "tool_calls" in message:
                message |= {"content": f"look {index}.", "reasoning_content": "r"}
        prompt = template.render(messages, add_generation_prompt=False)
        places = [prompt.index(message["content"]) for message in messages if message["role"] != "system"]
        assert places == sorted(places)
        if source is chat_templates.LLAMA31:
            assert prompt.index("look") < prompt.index('"name": "f"')


@pytest.mark.parametrize("source", [GPT_OSS, chat_templates.LLAMA31], ids=["gpt_oss", "llama31"])
def test_parallel_calls_are_shown_one_by_one_with_their_results(source: str):
    """Llama's template refuses two calls in one message, so that a session with parallel calls never went on."""
    template = found(source)
    assert not template.shape.parallel_calls
    messages = chat("ucttau")
    function = {"name": "second", "arguments": {}}
    messages[1]["tool_calls"].append({"id": "call_2", "type": "function", "function": function})
    messages[3]["tool_call_id"] = "call_2"
    prompt = template.render(messages, add_generation_prompt=False)
    places = [
        prompt.index(text) for text in ("text 0.", "text 2.", "second", "text 3.", "text 4.", "text 5.")
    ]
    assert places == sorted(places)

    messages[2], messages[3] = messages[3], messages[2]  # each result comes after its call
    assert template.render(messages, add_generation_prompt=False) == prompt
    del messages[2]  # no result of the second call
    assert "second" in template.render(messages, add_generation_prompt=False)


@pytest.mark.parametrize("source", [MINISTRAL, MISTRAL_SMALL, NEMO])
def test_a_text_beside_calls_is_shown_by_a_template_of_roles_that_must_alternate(source: str):
    """An empty message of the user stands between the text and the calls."""
    dropping = source.replace(
        "{{- m.content + '</s>' }}\n{%- elif m.role == 'user'", "{%- elif m.role == 'user'"
    )
    template = found(dropping)
    assert dropping != source
    assert not template.shape.text_with_calls and not template.shape.text_before_calls
    for roles in ("ucta", "uauctcta", "uctu"):
        messages = chat(roles)
        for index, message in enumerate(messages):
            message["content"] = f"text {index}."
        prompt = template.render(messages, add_generation_prompt=False)
        places = [prompt.index(message["content"]) for message in messages]
        assert places == sorted(places)


def test_ids_have_the_names_of_tools_where_the_template_shows_ids_only():
    """Kimi K2: the history of another server has other ids, and the model would not see which tool was called."""
    template = found(chat_templates.KIMI_K2_IDS)
    assert template.shape.missing == ["call_names"]
    messages = chat("uctctu")
    prompt = template.render(messages, add_generation_prompt=False)
    assert "## Return of functions.f:0\ntext 2." in prompt and "## Return of functions.f:1\ntext 4." in prompt
    messages[3]["tool_calls"][0]["id"] = messages[4]["tool_call_id"] = "functions.f:7"
    prompt = template.render(messages, add_generation_prompt=False)
    assert "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>" in prompt
    assert "## Return of functions.f:0\ntext 2." in prompt
    assert "<|tool_call_begin|>functions.f:7<" in prompt and "## Return of functions.f:7\ntext 4." in prompt


def test_an_answer_is_continued_after_messages_were_joined():
    messages = [*chat("sus"), {"role": "assistant", "content": "It is "}]
    prompt = found(GEMMA2).render(messages, continue_final_message=True)
    assert prompt.startswith("<s><start_of_turn>user\ntext 0.\n\ntext 1.\n\ntext 2.<end_of_turn>")
    assert prompt.endswith("It is")
