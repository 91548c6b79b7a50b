from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.runtime.config.answer_config import AnswerConfig
from engine.runtime.errors import RequestError
from engine.runtime.grammar_use import GrammarKind, GrammarSpec, GrammarUse, ReasoningBlock
from engine.tokenizer_manager.conversation.chat_template import ChatTemplate
from engine.tokenizer_manager.conversation.conversation import (
    ChoiceMode,
    Conversation,
    ReasoningOptions,
    Tool,
    ToolChoice,
)
from engine.tokenizer_manager.conversation.deltas import CallBegin, Content, Reasoning
from engine.tokenizer_manager.conversation.detection import AnswerFormats, detect_formats
from engine.tokenizer_manager.conversation.parsing.families import FAMILIES
from engine.tokenizer_manager.conversation.planner import AnswerPlan, Planner
from tests.tokenizer_manager.conversation import chat_templates
from tests.tokenizer_manager.conversation.parsing.answers import LOOSE, NOW, SHELL, WEATHER, parse
from tests.tokenizer_manager.fake_engine import TOKENIZER

USER = {"role": "user", "content": "hi"}
CALL = {
    "id": "abc123DEF",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "x"}'},
}
ANSWER = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
BYTES = LLTokenizer("byte")


def planned(
    source: str, *messages: dict[str, Any], config: AnswerConfig | None = None, **fields: Any
) -> AnswerPlan:
    """The plan of a conversation, with the prompt as the template renders it."""
    config = config or AnswerConfig()
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    planner = Planner(detect_formats(template, TOKENIZER, config), TOKENIZER, config)
    conversation = Conversation(messages=list(messages or [USER]), **fields)
    given = planner.render_input(conversation)
    prompt = template.render(
        given.messages,
        add_generation_prompt=given.add_generation_prompt,
        variables=given.variables,
        tools=given.tools,
        documents=given.documents,
        continue_final_message=given.continue_final_message,
    )
    return planner.plan(conversation, prompt)


def matches(spec: GrammarSpec | None, text: str) -> bool:
    assert spec is not None
    matcher = LLMatcher(BYTES, spec.text, log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_a_chat_without_tools_is_free_text():
    plan = planned(chat_templates.SMOLLM2)

    assert plan.grammar is None and plan.reasoning is None
    assert plan.keep_special_ids == () and plan.warnings == []
    assert plan.prompt.endswith("<|im_start|>assistant\n")
    assert plan.parser().feed("<tool_call> {", True) == [Content("<tool_call> {")]


def test_a_schema_is_the_grammar_of_the_answer():
    assert planned(chat_templates.SMOLLM2, spec=ANSWER).grammar == GrammarUse(spec=ANSWER)


# ---------------------------------------------------------------- tools


def test_auto_sleeps_until_the_trigger():
    plan = planned(chat_templates.QWEN3, tools=(WEATHER, NOW))

    assert plan.grammar is not None and plan.grammar.spec is None and not plan.grammar.ends_after_first
    assert [each.trigger for each in plan.grammar.triggered] == [b"<tool_call>"]
    assert '"name": "get_weather"' in plan.prompt
    assert isinstance(plan.parser().feed('<tool_call>\n{"name": "now", ', True)[0], CallBegin)


def test_calls_may_end_the_reasoning():
    def calls(source: str) -> tuple[bytes, ...]:
        block = planned(source, tools=(NOW,)).reasoning
        return () if block is None else block.calls

    assert calls(chat_templates.QWEN3) == (b"<tool_call>",)
    assert len(calls(chat_templates.GPT_OSS)) == 2
    assert calls(chat_templates.SMOLLM2) == ()


def test_none_renders_and_parses_no_tools():
    plan = planned(chat_templates.QWEN3, tools=(WEATHER,), tool_choice=ToolChoice(mode=ChoiceMode.NONE))

    assert plan.grammar is None
    assert "get_weather" not in plan.prompt
    text = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    assert plan.parser().feed(text, True) == [Content(text)]


@pytest.mark.parametrize("source", [chat_templates.QWEN3, chat_templates.SMOLLM2])
def test_named_is_exactly_one_call_of_that_tool(source: str):
    plan = planned(source, tools=(WEATHER, NOW), tool_choice=ToolChoice(mode=ChoiceMode.NAMED, name="now"))
    call = '{"name": "now", "arguments": {}}'
    one, two, other = {
        chat_templates.QWEN3: (
            f"<tool_call>\n{call}\n</tool_call>",
            f"<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>',
        ),
        chat_templates.SMOLLM2: (
            f'{{"tool_calls": [{call}]}}',
            f'{{"tool_calls": [{call}, {call}]}}',
            '{"response": "x"}',
        ),
    }[source]

    assert plan.grammar is not None
    assert matches(plan.grammar.spec, one)
    assert not matches(plan.grammar.spec, two)
    assert not matches(plan.grammar.spec, other)


def test_allowed_tools_are_a_subset_that_is_callable_while_all_are_rendered():
    plan = planned(chat_templates.QWEN3, tools=(WEATHER, NOW), tool_choice=ToolChoice(allowed=("now",)))

    assert plan.grammar is not None
    assert "get_weather" in plan.prompt
    assert "get_weather" not in plan.grammar.triggered[0].spec.text
    text = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    assert plan.parser().feed(text, True) == [Content(text)]


def test_parallel_false_ends_with_the_first_call():
    plan = planned(chat_templates.QWEN3, tools=(NOW,), tool_choice=ToolChoice(parallel=False))

    assert plan.grammar is not None and plan.grammar.ends_after_first


def test_auto_and_a_schema_is_a_call_or_an_answer():
    plan = planned(chat_templates.QWEN3, tools=(NOW,), spec=ANSWER)

    assert plan.grammar is not None and plan.grammar.triggered == ()
    assert matches(plan.grammar.spec, '{"a": 1}')
    assert matches(plan.grammar.spec, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize("mode", [ChoiceMode.REQUIRED, ChoiceMode.NAMED])
def test_a_required_call_and_a_schema_exclude_each_other(mode: ChoiceMode):
    with pytest.raises(RequestError, match="exclude each other") as caught:
        planned(
            chat_templates.QWEN3, tools=(NOW,), spec=ANSWER, tool_choice=ToolChoice(mode=mode, name="now")
        )

    assert caught.value.code == "conflicting_constraints"


def test_without_a_parser_tools_are_rendered_and_answers_are_content():
    config = AnswerConfig(tool_call_parser="none")
    plan = planned(chat_templates.QWEN3, tools=(WEATHER,), config=config)

    assert plan.grammar is None and "get_weather" in plan.prompt
    assert plan.parser().feed("<tool_call>", True) == [Content("<tool_call>")]
    with pytest.raises(RequestError, match="--tool-call-parser none"):
        planned(
            chat_templates.QWEN3,
            tools=(NOW,),
            tool_choice=ToolChoice(mode=ChoiceMode.REQUIRED),
            config=config,
        )


def test_generic_puts_tools_calls_and_results_into_the_messages():
    plan = planned(
        chat_templates.SMOLLM2,
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "2"}]},
        {"role": "tool", "tool_call_id": "abc123DEF", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": "sun"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "fine"},
        USER,
        tools=(WEATHER,),
    )

    turns = plan.prompt.split("<|im_end|>\n")
    assert turns[0].startswith(
        '<|im_start|>system\nBe brief.\n\nYou can call these tools:\n{"name": "get_weather"'
    )
    call = {"name": "get_weather", "arguments": {"city": "x"}}
    assert turns[2] == "<|im_start|>assistant\n" + json.dumps({"tool_calls": [call, call]})
    results = "Result of get_weather: rain\nResult of get_weather: sun"
    assert turns[3] == f"<|im_start|>user\n{results}\n\nand?"
    assert turns[4] == '<|im_start|>assistant\n{"response": "fine"}'
    assert plan.grammar is not None and plan.grammar.spec is not None
    assert plan.parser().feed('{"response": "a', True) == [Content("a")]


def test_history_with_calls_but_no_tools_still_renders_on_the_default_model():
    plan = planned(
        chat_templates.SMOLLM2,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123DEF", "content": "rain"},
    )

    assert "Result of get_weather: rain" in plan.prompt
    assert "You can call" not in plan.prompt
    message = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    assert 'assistant\nI look.\n{"tool_calls": [' in planned(chat_templates.SMOLLM2, USER, message).prompt
    assert plan.grammar is None


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (chat_templates.QWEN3, '"arguments": {"city": "x"}}'),
        (chat_templates.DEEPSEEK_R1, '```json\n{"city": "x"}\n```'),
        (chat_templates.MISTRAL, '"arguments": {"city": "x"}, "id": "abc123DEF"}'),
    ],
)
def test_arguments_in_the_history_have_the_form_of_the_template(source: str, shown: str):
    plan = planned(source, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, tools=(WEATHER,))

    assert shown in plan.prompt
    assert plan.warnings == []


def test_calls_of_the_history_are_text_where_the_template_shows_nothing_of_them():
    plan = planned(
        chat_templates.GRANITE33,
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123DEF", "content": "rain"},
        tools=(WEATHER,),
    )

    assert 'I look.\n<|tool_call|>[{"name": "get_weather", "arguments": {"city": "x"}}]<' in plan.prompt
    assert "rain" in plan.prompt


def test_arguments_that_are_no_json_are_passed_on_with_a_warning():
    """Truncated arguments of an earlier answer do not refuse the next request."""
    broken = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "x'}}
    for source in (chat_templates.QWEN3, chat_templates.SMOLLM2):
        plan = planned(
            source, USER, {"role": "assistant", "content": "", "tool_calls": [broken]}, tools=(WEATHER,)
        )

        assert '{"city": "x' in plan.prompt or json.dumps('{"city": "x') in plan.prompt
        assert plan.warnings == [
            "messages[1].tool_calls[0].function.arguments: this is no JSON object; it is passed on as it is"
        ]


def test_custom_tools_are_functions_of_one_text():
    lark = Tool(name="sql", custom=True, custom_grammar=GrammarSpec(GrammarKind.LARK, 'start: "a"'))
    plan = planned(chat_templates.QWEN3, tools=(SHELL, lark))

    assert '"required": ["input"]' in plan.prompt
    assert plan.warnings == [
        "tools[1]: the grammar of a custom tool is enforced only if it is a regular expression"
    ]


@pytest.mark.parametrize(
    ("path", "place"),
    [("tools[{}].function", "tools[1].custom.format"), ("tools[{}]", "tools[1].format")],
    ids=["chat", "responses"],
)
@pytest.mark.parametrize("source", [chat_templates.QWEN3, chat_templates.SMOLLM2], ids=["hermes", "generic"])
@pytest.mark.parametrize(
    "choice",
    [
        ToolChoice(mode=ChoiceMode.NAMED, name="sql"),
        ToolChoice(mode=ChoiceMode.REQUIRED),
        ToolChoice(mode=ChoiceMode.REQUIRED, allowed=("sql",)),
    ],
    ids=["named", "required", "allowed"],
)
def test_a_grammar_that_cannot_be_enforced_is_refused_where_the_tool_must_be_called(
    source, choice, path, place
):
    lark = Tool(name="sql", custom=True, custom_grammar=GrammarSpec(GrammarKind.LARK, 'start: "a"'))
    with pytest.raises(RequestError, match="lark grammar, which cannot be enforced in a call") as caught:
        planned(source, tools=(SHELL, lark), tool_choice=choice, tool_path=path)
    assert caught.value.param == place and caught.value.message.startswith(f"{place} is")


def test_a_grammar_of_a_tool_that_is_not_called_refuses_nothing():
    lark = Tool(name="sql", custom=True, custom_grammar=GrammarSpec(GrammarKind.LARK, 'start: "a"'))
    for choice in (
        ToolChoice(mode=ChoiceMode.NAMED, name=SHELL.name),
        ToolChoice(mode=ChoiceMode.REQUIRED, allowed=(SHELL.name,)),
    ):
        planned(chat_templates.QWEN3, tools=(SHELL, lark), tool_choice=choice)


def test_limits_of_tools_are_checked_and_errors_have_the_path_of_the_client():
    with pytest.raises(RequestError, match="names must be unique") as caught:
        planned(chat_templates.QWEN3, tools=(NOW, NOW))
    assert caught.value.param == "tools[1].function.name"

    bad = Tool(name="x", parameters={"type": "array"})
    with pytest.raises(RequestError) as caught:
        planned(chat_templates.QWEN3, tools=(bad,), tool_path="tools[{}]", schema_field="input_schema")
    assert caught.value.param == "tools[0].input_schema"


def test_schemas_of_strict_tools_are_checked_and_replaced():
    """The schemas of strict tools, and of all tools that a demanded call may be of."""
    asked: list[tuple[str, bool]] = []

    def check(schema: dict[str, Any], at: str, strict: bool) -> tuple[dict[str, Any], list[str]]:
        asked.append((at, strict))
        return {**schema, "properties": {"checked": {"type": "integer"}}, "required": ["checked"]}, [
            f"{at}: note"
        ]

    formats = AnswerFormats(tools=FAMILIES["hermes"], template_tools=True)
    planner = Planner(formats, TOKENIZER, AnswerConfig(), check_schema=check)
    choice = ToolChoice(mode=ChoiceMode.REQUIRED)
    first, second = "tools[0].function.parameters", "tools[1].function.parameters"
    planner.plan(Conversation(messages=[USER], tools=(LOOSE, WEATHER)), "prompt")
    assert asked == [(second, True)]
    plan = planner.plan(Conversation(messages=[USER], tools=(LOOSE, WEATHER), tool_choice=choice), "prompt")

    assert asked[1:] == [(first, False), (second, True)]
    assert plan.warnings == [f"{first}: note", f"{second}: note"]
    assert plan.grammar is not None
    call = '<tool_call>\n{{"name": "get_weather", "arguments": {}}}\n</tool_call>'
    assert matches(plan.grammar.spec, call.format('{"checked": 1}'))
    assert not matches(plan.grammar.spec, call.format('{"city": "x"}'))


PAINT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "color": {"enum": ["red", "blue"]}},
    "required": ["ok", "color"],
}


@pytest.mark.parametrize("mode", [ChoiceMode.REQUIRED, ChoiceMode.NAMED])
@pytest.mark.parametrize("source", ["QWEN3", "QWEN3_CODER", "LLAMA31", "GLM45", "GPT_OSS", "SMOLLM2"])
def test_a_demanded_call_follows_the_schema_without_strict(source: str, mode: ChoiceMode):
    tool = Tool(name="paint", parameters=PAINT)
    plan = planned(
        getattr(chat_templates, source), tools=(tool,), tool_choice=ToolChoice(mode=mode, name="paint")
    )

    assert plan.tools[0].strict and plan.warnings == []
    calls = {
        "QWEN3": ("<tool_call>\n", "\n</tool_call>"),
        "SMOLLM2": ('{"tool_calls": [', "]}"),
        "LLAMA31": ("", ""),
    }
    assert plan.grammar is not None
    if source in calls:
        key = "parameters" if source == "LLAMA31" else "arguments"
        begin, end = calls[source]
        call = begin + '{"name": "paint", "' + key + '": %s}' + end
        assert matches(plan.grammar.spec, call % '{"ok": true, "color": "red"}')
        assert not matches(plan.grammar.spec, call % '{"ok": 1, "color": "red"}')
        assert not matches(plan.grammar.spec, call % "{}")


UNTYPED = {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {"type": "integer"}}}


def test_what_a_format_cannot_enforce_is_an_error_of_strict_tools_and_a_warning_of_others():
    choice = ToolChoice(mode=ChoiceMode.REQUIRED)
    place = "tools[0].function.parameters"
    tool = Tool(name="f", parameters=UNTYPED)

    for parser in ("qwen3_coder", "pythonic"):
        config = AnswerConfig(tool_call_parser=parser)
        text = (
            f"{place}: the format of calls {parser} cannot enforce patternProperties at the top of its schema"
        )
        strict = Tool(name="f", parameters=UNTYPED, strict=True)
        with pytest.raises(RequestError, match=re.escape(text)) as caught:
            planned(chat_templates.QWEN3_CODER, tools=(strict,), config=config)
        assert (caught.value.param, caught.value.code) == (place, "unsupported_schema")

        plan = planned(chat_templates.QWEN3_CODER, tools=(tool,), config=config, tool_choice=choice)
        assert plan.warnings == [f"{text}; the arguments of f do not follow this schema"]
        assert not plan.tools[0].strict
    assert planned(chat_templates.QWEN3, tools=(tool,), tool_choice=choice).warnings == []


# ---------------------------------------------------------------- reasoning


def test_whether_the_block_is_open_is_read_off_the_prompt():
    def block(source: str, **options: Any) -> ReasoningBlock | None:
        return planned(source, reasoning=ReasoningOptions(**options)).reasoning

    think = ReasoningBlock(b"<think>", b"</think>", opened=False)
    assert block(chat_templates.QWEN3) == think
    assert block(chat_templates.DEEPSEEK_R1) == ReasoningBlock(b"<think>", b"</think>", opened=True)
    assert block(chat_templates.QWEN3, enabled=False) is None
    assert block(chat_templates.SMOLLM2) is None
    harmony = block(chat_templates.GPT_OSS)
    assert harmony is not None and harmony.begin == b"<|channel|>analysis<|message|>" and not harmony.opened


def test_a_marker_that_the_user_writes_opens_no_block():
    plan = planned(chat_templates.QWEN3, {"role": "user", "content": "what does <think> mean?"})

    assert plan.reasoning is not None and not plan.reasoning.opened


def test_reasoning_is_turned_off_by_the_variable_of_the_template():
    for options in (
        ReasoningOptions(enabled=False),
        ReasoningOptions(effort="none"),
        ReasoningOptions(budget=0),
    ):
        plan = planned(chat_templates.QWEN3, reasoning=options)

        assert plan.prompt.endswith("<think>\n\n</think>\n\n")
        assert plan.prompt.count("<think>") == 1
        assert plan.reasoning is None and plan.grammar is None
        assert plan.parser().feed("x", True) == [Content("x")]


def test_reasoning_is_turned_off_by_an_empty_block_where_the_template_has_no_variable():
    plan = planned(chat_templates.DEEPSEEK_R1, reasoning=ReasoningOptions(budget=0))
    assert plan.prompt.endswith("<｜Assistant｜><think>\n\n</think>\n\n")
    assert plan.reasoning is None

    plan = planned(chat_templates.GPT_OSS, reasoning=ReasoningOptions(effort="none"))
    assert plan.prompt.endswith("<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant")


def test_a_budget_is_in_the_block_of_the_grammar():
    plan = planned(chat_templates.QWEN3, reasoning=ReasoningOptions(budget=64))
    block = ReasoningBlock(b"<think>", b"</think>", opened=False, budget=64)

    assert plan.grammar == GrammarUse(reasoning=block)
    assert planned(
        chat_templates.QWEN3, spec=ANSWER, reasoning=ReasoningOptions(budget=64)
    ).grammar == GrammarUse(spec=ANSWER, reasoning=block)
    assert planned(chat_templates.SMOLLM2, reasoning=ReasoningOptions(budget=64)).grammar is None


def test_reasoning_leaves_tokens_for_a_constrained_answer():
    config = AnswerConfig()
    template = ChatTemplate(chat_templates.QWEN3, {})
    planner = Planner(detect_formats(template, TOKENIZER, config), TOKENIZER, config)
    conversation = Conversation(messages=[USER], spec=ANSWER)
    grammar = planner.plan(conversation, "<|im_start|>assistant\n", max_tokens=100).grammar

    assert grammar is not None and grammar.reasoning is not None and grammar.reasoning.budget == 90


def test_effort_is_a_variable_of_the_template_or_a_warning():
    def plan(source: str, effort: str) -> AnswerPlan:
        return planned(source, reasoning=ReasoningOptions(effort=effort))

    assert "Reasoning: high" in plan(chat_templates.GPT_OSS, "xhigh").prompt
    assert "Reasoning: low" in plan(chat_templates.GPT_OSS, "minimal").prompt
    assert plan(chat_templates.GPT_OSS, "low").warnings == []
    assert "only turns the reasoning on" in plan(chat_templates.QWEN3, "low").warnings[0]
    assert "has no reasoning" in plan(chat_templates.SMOLLM2, "low").warnings[0]
    assert plan(chat_templates.SMOLLM2, "none").warnings == []


def test_variables_of_the_request_override_those_of_the_options():
    plan = planned(
        chat_templates.QWEN3, reasoning=ReasoningOptions(enabled=True), variables={"enable_thinking": False}
    )

    assert plan.prompt.endswith("</think>\n\n")


def test_a_schema_of_harmony_is_in_the_final_channel():
    plan = planned(chat_templates.GPT_OSS, spec=ANSWER)

    assert plan.grammar is not None
    assert matches(plan.grammar.spec, '<|channel|>final<|message|>{"a": 1}')
    assert matches(plan.grammar.spec, '<|start|>assistant<|channel|>final<|message|>{"a": 1}')


# ---------------------------------------------------------------- continuing a message


def test_the_final_message_is_continued():
    answer = {"role": "assistant", "content": "It is "}
    plan = planned(chat_templates.SMOLLM2, USER, answer, continue_final_message=True)
    assert plan.prompt.endswith("<|im_start|>assistant\nIt is ")

    plan = planned(chat_templates.GLM45, USER, answer, continue_final_message=True)
    assert plan.prompt.endswith("\nIt is")  # this template strips contents

    with pytest.raises(RequestError, match="without a tool template"):
        planned(chat_templates.SMOLLM2, USER, answer, continue_final_message=True, tools=(NOW,))


def test_a_message_may_be_continued_inside_its_reasoning():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    plan = planned(template, {"role": "assistant", "content": "<think>hm"}, continue_final_message=True)

    assert plan.prompt == "<think>hm"
    assert plan.reasoning == ReasoningBlock(b"<think>", b"</think>", opened=True)
    assert plan.parser().feed("m</think>x", True) == [Reasoning("m"), Content("x")]


def test_documents_and_tools_reach_the_template():
    template = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"

    assert planned(template, documents=({"text": "one"}, {"text": "two"})).prompt == "[one][two]hi"
    assert planned(template).prompt == "hi"


def test_each_choice_has_a_parser_of_its_own():
    plan = planned(chat_templates.QWEN3, tools=(LOOSE,))
    first, second = plan.parser(), plan.parser()

    assert first.feed("<tool_") == []
    assert second.feed("a") == [Content("a")]
    assert parse(["<tool_"], "hermes") == []
