"""Constraints, tools and reasoning of `LLM`, over the real parts and a tiny random model."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

import pydantic
import pytest

from engine import LLM, ConfigError, EngineConfig, RequestError, SamplingParams
from engine.offline.options import checked_constraint
from engine.offline.prompts import own_names

PARAMS = SamplingParams(max_new_tokens=256, seed=3)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "pick", "strict": True, "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


class Pair(pydantic.BaseModel, extra="forbid"):
    """The same schema as a class."""

    a: Literal["x", "y"]
    b: bool


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(
        str(tiny_model), dtype="float32", num_threads=1, max_running_requests=8, json_whitespace="compact"
    ) as llm:
        yield llm


def is_pick(text: str) -> bool:
    return re.fullmatch(r'\{"a":"[xy]","b":(true|false)\}', text) is not None


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "[ab]{3,5}c"}, "[ab]{3,5}c"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, "ab|ac"),
        ({"grammar": 'start: "a" /[0-9]/'}, "a[0-9]"),
        ({"json_schema": SCHEMA}, r'\{"a":"[xy]","b":(true|false)\}'),
        ({"json_schema": Pair}, r'\{"a":"[xy]","b":(true|false)\}'),
        ({"json_schema": json.dumps(SCHEMA)}, r'\{"a":"[xy]","b":(true|false)\}'),
        ({"response_format": FORM}, r'\{"a":"[xy]","b":(true|false)\}'),
    ],
)
def test_answers_match_the_constraint(llm, options, pattern):
    outputs = [
        llm.generate("one", PARAMS, **options),
        *llm.generate(["two", "three"], PARAMS, **options),
        *llm.sample("four", 2, PARAMS, **options),
        llm.chat(HI, PARAMS, **options),
    ]
    for output in outputs:
        assert re.fullmatch(pattern, output.text), output.text
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_processed_logprobs_are_those_after_the_grammar(tiny_model, speculative):
    settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "logprobs_mode": "processed_logprobs"}
    asks = SamplingParams(max_new_tokens=8, seed=3, temperature=1.5, logprobs=3, prompt_logprobs=0)
    with LLM(str(tiny_model), speculative=speculative, **settings) as llm:
        guided = llm.generate("one", asks, regex="zq[ab]")
        free = llm.generate("one", SamplingParams(max_new_tokens=1, logprobs=2))
    assert guided.logprobs is not None and guided.prompt_logprobs is not None and free.logprobs is not None
    z, q, last = guided.logprobs[:3]
    assert (z.token, z.logprob, q.token, q.logprob) == ("z", 0.0, "q", 0.0)
    assert sum(map(math.exp, last.top.values())) == pytest.approx(1.0, abs=1e-5)  # two of the three may come
    assert last.logprob in last.top.values() and last.logprob < 0
    assert all(entry.logprob < -1 for entry in guided.prompt_logprobs)  # the model's own in both modes
    assert free.logprobs[0].logprob < -1


def test_a_constrained_stream_is_the_output_in_pieces(llm):
    chunks = list(llm.generate("one", PARAMS, json_schema=SCHEMA, stream=True))

    assert is_pick("".join(chunk.text for chunk in chunks))
    assert chunks[-1].finish_reason == "stop"


def test_free_and_constrained_requests_share_a_batch(llm):
    greedy = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    before = llm.generate("one", greedy).text
    llm.generate("one", greedy, regex="a{12}")

    assert llm.generate("one", greedy).text == before


def test_a_required_call(llm):
    output = llm.chat(HI, PARAMS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)

    assert output.finish_reason == "tool_calls"
    [call] = output.tool_calls
    assert (call.index, call.name) == (0, "pick")
    assert call.id.startswith("call_")
    assert is_pick(call.arguments)
    assert output.text == ""


def test_a_streamed_call_joins_to_the_whole_one(llm):
    options: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "pick"}},
    }
    [whole] = llm.chat(HI, PARAMS, **options).tool_calls
    chunks = list(llm.chat(HI, PARAMS, stream=True, **options))
    pieces = [piece for chunk in chunks for piece in chunk.tool_calls]

    assert [piece.name for piece in pieces if piece.name] == ["pick"]
    assert {piece.index for piece in pieces} == {0}
    assert "".join(piece.arguments for piece in pieces) == whole.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_tools_are_in_the_prompt_and_their_results_too(llm):
    call = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": '{"a":"x"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "result"}]},
    ]
    text = llm.tokenizer.decode(llm.render_chat(messages, tools=[TOOL]), skip_special_tokens=False)

    assert "pick" in text and "result" in text


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"regex": "a", "choice": ["b"]}, "choice", "conflicting_constraints"),
        ({"regex": "(?=a)"}, "regex", "invalid_regex"),
        ({"regex": 5}, "regex", "invalid_type"),
        ({"choice": ["a", 5]}, "choice[1]", "invalid_type"),
        ({"choice": "yes"}, "choice", "invalid_type"),
        ({"json_schema": {"type": "strin"}}, "json_schema", "invalid_schema"),
        ({"json_schema": "{"}, "json_schema", "invalid_schema"),
        ({"response_format": {"type": "x"}}, "response_format.type", "invalid_value"),
        ({"grammar": "nothing"}, "grammar", "invalid_grammar"),
    ],
)
def test_a_bad_constraint_is_refused_before_anything_runs(llm, options, param, code):
    for ask in (lambda: llm.generate(["a", "b"], **options), lambda: llm.chat(HI, **options)):
        with pytest.raises(RequestError) as caught:
            ask()
        assert (caught.value.param, caught.value.code) == (param, code), caught.value.message
        assert "guided_choice" not in caught.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"enum": ["a", "b"], "format": "date"}}, "json_schema: the schema allows no text: "),
        ({"json_schema": {"type": "string", "pattern": "^a$", "maxLength": 0}}, "json_schema: the schema "),
        ({"regex": r"[^\x00-\u{10ffff}]"}, "regex: the regular expression allows no text"),
        ({"grammar": "start: start"}, "grammar: the grammar allows no text"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["a"], "format": "date"}},
                }
            },
            "response_format.json_schema.schema: the schema allows no text: ",
        ),
    ],
)
def test_a_constraint_that_only_the_compiler_refuses_names_its_field(llm, options, message):
    for ask in (lambda: llm.generate("a", PARAMS, **options), lambda: llm.chat(HI, PARAMS, **options)):
        output = ask()
        assert output.finish_reason == "error"
        assert output.error.startswith(message)


def test_a_tool_that_only_the_compiler_refuses_is_named(llm):
    function = {
        "name": "pick",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": ["a"], "format": "date"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    tools = [{"type": "function", "function": function}]
    output = llm.chat(HI, PARAMS, tools=tools, tool_choice="required")
    assert output.finish_reason == "error"
    assert output.error.startswith("tools: ")


def test_a_class_of_pydantic_has_no_other_fields():
    class Person(pydantic.BaseModel):
        name: str
        tags: dict[str, int] = {}

    constraint = checked_constraint({"json_schema": Person}, EngineConfig())

    assert constraint is not None and constraint.use.spec is not None
    schema = json.loads(constraint.use.spec.text)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["tags"]["additionalProperties"] == {"type": "integer"}


def test_a_limit_below_the_shortest_answer_is_refused(llm):
    short = SamplingParams(max_new_tokens=5)
    for ask in (
        lambda: llm.generate("a", short, json_schema=SCHEMA),
        lambda: llm.sample("a", 2, short, json_schema=SCHEMA),
        lambda: llm.chat(HI, short, json_schema=SCHEMA),
    ):
        with pytest.raises(RequestError, match="the shortest answer to json_schema has") as caught:
            ask()
        assert caught.value.code == "max_tokens_too_small"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"tools": 5}, "tools"),
    ],
)
def test_bad_options_of_a_chat_are_refused(llm, options, param):
    with pytest.raises(RequestError) as caught:
        llm.chat(HI, **options)

    assert caught.value.param == param, caught.value.message


def test_an_unknown_option_of_a_chat_is_a_type_error(llm):
    for ask in (llm.chat, llm.render_chat):
        with pytest.raises(TypeError, match="unexpected keyword argument 'tool'"):
            ask(HI, tool=[TOOL])


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("sampling_params", "the sampling parameters are `params`"),
        ("use_tqdm", "use progress_bar"),
        ("prompt_token_ids", "generate([1, 2, 3])"),
        ("max_tokens", "params=SamplingParams(max_new_tokens=...)"),
        ("temperature", "params=SamplingParams(temperature=...)"),
        ("temprature", "params=SamplingParams(temperature=...)"),
        ("n", "LLM.sample(prompt, n)"),
        ("tools", "an option of `chat`"),
        ("json_shema", "did you mean 'json_schema'?"),
        ("frobnicate", "the options of a call are priority, tenant"),
    ],
)
def test_an_argument_of_another_library_is_answered(llm, argument, hint):
    with pytest.raises(TypeError, match=re.escape(hint)) as caught:
        llm.generate("a", **{argument: 1})
    assert str(caught.value).startswith(f"unexpected keyword argument {argument!r}; ")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", 'messages is \'Hello\', but it must be a list .*; pass \\[{"role": "user"'),
        (HI[0], 'messages is {.*}, but it must be a list .*; pass \\[{"role": "user"'),
        ([HI, HI[0]], r"messages\[0\] is a list beside messages; pass one conversation, or a list"),
        ([HI, []], r"conversation 1: messages "),
        ([HI, [{"role": "user"}]], r"conversation 1: messages\[0\]"),
        (None, "messages is None, but it must be a list of messages, each with a role and a content$"),
    ],
)
def test_messages_in_another_form_are_refused_with_the_right_one(llm, messages, message):
    with pytest.raises(RequestError, match=message):
        llm.chat(messages)


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_list_of_conversations_is_one_batch(llm):
    other = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    params: Any = [SamplingParams(max_new_tokens=3, temperature=0), {"max_tokens": 5, "temperature": 0}]
    outputs = llm.chat([HI, other], params, tools=[WEATHER])
    assert outputs[0].token_ids == llm.chat(HI, params[0], tools=[WEATHER]).token_ids
    assert outputs[1].token_ids == llm.chat(other, params[1], tools=[WEATHER]).token_ids
    (schema,) = llm.chat([HI], {"max_tokens": 40}, json_schema={"enum": ["x"]})
    assert schema.text == '"x"'
    chunks = list(llm.chat([HI, other], {"max_tokens": 2}, stream=True))
    assert {chunk.index for chunk in chunks} == {0, 1}
    with pytest.raises(RequestError, match="there are 2 prompts and 1 params"):
        llm.chat([HI, other], [{"max_tokens": 2}])


@pytest.mark.parametrize(
    ("message", "own"),
    [
        ("too much; lower it, or raise --mem-fraction", "too much; lower it, or raise mem_fraction"),
        ("for this model --tp can be 1, 3", "for this model tp can be 1, 3"),
        ("start the server with --task embed", 'make the LLM with task="embed"'),
        ("pass --no-radix-cache, or --tp 2", "pass radix_cache=False, or tp=2"),
        ("start `engine serve m --tp 2` and use its API", "start `engine serve m --tp 2` and use its API"),
        ("this model makes vectors; use /v1/embeddings", "this model makes vectors; use LLM.embed"),
        ("raise --max-model-len or --no-such-flag", "raise max_model_len or --no-such-flag"),
    ],
)
@pytest.mark.parametrize("kind", [RequestError, ConfigError])
def test_errors_are_in_the_words_of_a_program(kind, message, own):
    with pytest.raises(kind) as caught, own_names():
        raise kind(message)
    assert str(caught.value) == getattr(caught.value, "message", own) == own


@pytest.mark.parametrize(
    ("settings", "own"),
    [({"max_model_len": 9999}, "lower max_model_len"), ({"mem_fraction": 7}, "mem_fraction")],
)
def test_a_start_that_fails_names_arguments(tiny_model, settings, own):
    with pytest.raises(ConfigError, match=own) as caught:
        LLM(str(tiny_model), **settings)
    assert "--" not in str(caught.value)


class Person:
    """As a class of pydantic's."""

    @staticmethod
    def model_json_schema():
        return {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}


def test_a_class_is_a_response_format_and_a_schema(llm):
    for option in ("json_schema", "response_format"):
        assert llm.generate("a", {"max_tokens": 40}, **{option: Person}).text == '{"a":"x"}'


@pytest.mark.parametrize(
    ("shows", "options", "num_bars"),
    [(True, {}, 1), (True, {"progress_bar": False}, 0), (False, {}, 0), (False, {"progress_bar": True}, 1)],
)
def test_several_prompts_have_a_bar_on_a_terminal(llm, monkeypatch, capsys, shows, options, num_bars):
    monkeypatch.setattr("engine.offline.batch.shows_live", lambda: shows)
    llm.generate(["a", "b"], {"max_tokens": 1}, **options)
    assert capsys.readouterr().err.count("2/2") == num_bars
    llm.chat([HI, HI], {"max_tokens": 1}, **options)
    assert capsys.readouterr().err.count("2/2") == num_bars
    llm.generate("a", {"max_tokens": 1})
    assert capsys.readouterr().err == ""


def test_a_batch_of_conversations_is_a_batch_of_their_tokens(llm):
    greedy = SamplingParams(max_new_tokens=4, temperature=0)
    (first, second) = llm.generate([llm.render_chat(messages) for messages in (HI, HI)], greedy)
    assert first.token_ids == second.token_ids == llm.chat(HI, greedy).token_ids


def test_the_reprs_fit_a_notebook(tiny_model):
    with LLM(tiny_model, dtype="float32", num_threads=1, max_running_requests=2) as llm:
        name = f"<LLM {tiny_model.name}: float32 on cpu, context {llm.max_model_len} tokens"
        assert repr(llm) == f"{name}>"
        output = llm.generate(
            "a", SamplingParams(max_new_tokens=40, temperature=0, logprobs=3, ignore_eos=True)
        )
        assert repr(output) == (
            f"GenerationOutput(text={output.text!r}, finish_reason='length', prompt_tokens=1, completion_tokens=40, "
            "cached_tokens=0, request_id='llm-0')"
        )
    assert repr(llm) == f"{name}, ended>"
    assert repr(LLM.__new__(LLM)) == "<LLM, not started>"
