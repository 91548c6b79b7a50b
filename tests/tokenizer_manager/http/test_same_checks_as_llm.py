"""The same inputs over HTTP and through `LLM`: both take them, or both refuse them and name the same field."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from engine import LLM, RequestError, SamplingParams
from engine.tokenizer_manager.http.app import App

from ..fake_engine import WAIT_S, FakeEngine, make_services, say_all
from .calling import call


class Verdict(NamedTuple):
    """Whether an input is taken; for a refused one the field that is named, and the rule."""

    taken: bool
    param: str = ""
    rule: str = ""


class Both:
    """An `LLM`, and the HTTP side of a server of the same model."""

    def __init__(self, llm: LLM, app: App) -> None:
        self.llm = llm
        self._app = app

    def http(self, path: str, body: dict[str, Any]) -> Verdict:
        """What the server says."""

        async def run() -> Verdict:
            reply = await asyncio.wait_for(call(self._app, path, body), WAIT_S)
            if reply.status == 200:
                return Verdict(True)
            assert reply.status == 400, reply
            return _refused(reply.error["param"] or "", reply.error["message"])

        return asyncio.run(run())

    def python(self, method: str, *arguments: Any, **options: Any) -> Verdict:
        """What `LLM` says; nothing is generated."""
        prepared = getattr(self.llm, method)
        try:
            prepared(*arguments, stream=True, **options).close()
        except RequestError as error:
            return _refused(error.param or "", error.message)
        except TypeError as error:  # a name that is none
            return _refused("", str(error))
        return Verdict(True)


def _refused(param: str, message: str) -> Verdict:
    """The field and the rule in the words that both sides share."""
    param = re.sub(r"^sampling_params\.", "", param)
    param = re.sub(r"^(text|input_ids)\b", "prompt", param).replace("top_logprobs_num", "logprobs")
    rule = message.partition(", but ")[2].replace("--max-model-len", "max_model_len")
    return Verdict(False, param, rule)


@pytest.fixture(scope="module")
def both(tiny_model) -> Iterator[Both]:
    settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 512}
    with LLM(str(tiny_model), **settings) as llm:
        services = make_services(
            FakeEngine(say_all("x")),
            tokenizer=llm.tokenizer,
            capacity=llm._engine.capacity,
            chat_template=llm.tokenizer.chat_template,
        )
        yield Both(llm, App(services))
        services.close()


NUMBERS = [0, 1, 0.5, 2, -1, -0.5, 99, 1000, 10**30, 1e308, "1", "", True, None, [1], {}]
SAMPLING: dict[str, list[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"), NUMBERS),
    **dict.fromkeys(("presence_penalty", "top_k", "seed", "max_new_tokens", "min_new_tokens"), NUMBERS),
    "stop": ["", "x", [], ["x"], [""], ["x", ""], [1], 5, None, {}],
    "stop_token_ids": [[], [5], [271], [272], [-1], ["5"], [2.5], 5, None, "5"],
    "logit_bias": [{}, {"5": 1}, {"272": 1}, {"5": 101}, {"5": "1"}, None, [1], "x"],
    "ignore_eos": [True, False, None, 0, 1, "yes"],
    "skip_special_tokens": [True, False, None, 0, "yes"],
    "temprature": [1],
}


def cases() -> Iterator[Any]:
    for field, values in SAMPLING.items():
        for value in values:
            yield pytest.param(field, value, id=f"{field}-{json.dumps(value)}"[:60])


@pytest.mark.fast_cases(100)
@pytest.mark.parametrize(("field", "value"), list(cases()))
def test_sampling_parameters(both: Both, field: str, value: Any):
    http = both.http("/generate", {"text": "a", "sampling_params": {field: value}})
    if field == "logit_bias" and isinstance(value, dict):  # keys of JSON are strings
        value = {int(key): bias for key, bias in value.items()}
    python = both.python("generate", "a", {field: value})

    if field not in SamplingParams.__struct_fields__:  # a warning over HTTP, an error in a program
        assert http.taken and not python.taken
        return
    assert python.taken == http.taken, (python, http)
    assert python.param == re.sub(r"\[\d+\]$", "", http.param)


@pytest.mark.parametrize("length", [1, 5, 400, 510, 511, 512, 600])
@pytest.mark.parametrize("max_new_tokens", [None, 1, 2, 112, 113, 511, 512])
def test_lengths(both: Both, length: int, max_new_tokens: int | None):
    params = {"max_new_tokens": max_new_tokens}
    if max_new_tokens is None:  # 128 are the default of /generate
        params = {"max_new_tokens": 128}
    http = both.http("/generate", {"input_ids": [5] * length, "sampling_params": params})
    python = both.python("generate", [5] * length, params)

    assert python.taken == http.taken, (python, http)


PROMPTS: list[Any] = [
    *("a", "", "a" * 600, ["a", "b"], ["a", ""], [None], {}),
    *([5], [271], [272], [-1], [[5], [6]], [[5], [999]], [1.5], [True], [[]]),
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts(both: Both, prompt: Any):
    name = "input_ids" if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str) else "text"
    params = {"max_new_tokens": 1}
    http = both.http("/generate", {name: prompt, "sampling_params": params})
    python = both.python("generate", prompt, params)

    assert python.taken == http.taken, (python, http)


def text_part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


USER = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATS: list[Any] = [
    [USER],
    [],
    "a",
    [5],
    [{"role": "developer", "content": "a"}, USER],
    [{"role": "system", "content": ""}, USER],
    [{"role": "usr", "content": "a"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [USER, {"role": "assistant", "content": None}, USER],
    [USER, {"role": "assistant"}, USER],
    [{"role": "user", "content": [text_part("a"), text_part("b")]}],
    [{"role": "user", "content": [text_part(None)]}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": 5}],
    [{"content": "a"}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}],
    [{"role": "user", "content": "a", "tool_calls": [CALL]}],
    [USER, {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f"}}]}, USER],
    [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}, USER],
    [{"role": "user", "content": "a", "name": None, "audio": None}],
    [{"role": "user", "content": "a", "audio": {"id": "x"}}],
    [{"role": "function", "name": "f", "content": "1"}],
    [{"role": "user", "content": "a", "wibble": 1}],
]


@pytest.mark.parametrize("messages", CHATS, ids=[json.dumps(each)[:70] for each in CHATS])
def test_chats(both: Both, messages: Any):
    http = both.http("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    python = both.python("chat", messages, {"max_new_tokens": 1})

    assert (python.taken, python.param) == (http.taken, http.param), (python, http)
    assert python.rule == http.rule or messages in ("a", [5])


OPTIONS: list[dict[str, Any]] = [
    {"priority": 3},
    {"priority": "high"},
    {"priority": "hi"},
    {"priority": 10**9},
    {"priority": True},
    {"queue_timeout": 0},
    {"timeout": -1},
    {"timeout": "5"},
    {"timeout": None},
    {"cache_salt": "s"},
    {"cache_salt": 5},
    {"cache_salt": "s" * 5000},
    {"response_format": {"type": "text", "json_schema": None}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_object"}},
    {"json_schema": {"type": "object", "minProperties": -1}},
    {"regex": "(?=a)"},
    {"regex": "a+"},
    {"regex": ""},
    {"regex": 5},
    {"regex": "a", "grammar": 'root ::= "a"'},
    {"reasoning_effort": "high"},
    {"reasoning_effort": "extreme"},
    {"reasoning_effort": ""},
    {"tool_choice": "sometimes"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tools": [{"type": "function", "function": {}}]},
    {"tools": [5]},
    {"chat_template_kwargs": {"messages": 1}},
    {"thinking_token_budget": -1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[json.dumps(each)[:60] for each in OPTIONS])
def test_options(both: Both, options: dict[str, Any]):
    http = both.http("/v1/chat/completions", {"messages": [USER], "max_tokens": 8} | options)
    python = both.python("chat", [USER], {"max_new_tokens": 8}, **options)

    assert python.taken == http.taken, (python, http)
    assert python.param == http.param


def test_errors_use_the_words_of_a_program(both: Both):
    with pytest.raises(RequestError, match=r"raise max_model_len$"):
        both.llm.generate("a" * 2000)
    with pytest.raises(RequestError, match="max_new_tokens is 4000: .* lower max_new_tokens to "):
        both.llm.generate("a", {"max_new_tokens": 4000})
    wrong: Any = ["a", 5]
    with pytest.raises(RequestError, match="^choice") as refused:
        both.llm.generate("a", choice=wrong)
    assert refused.value.param == "choice[1]"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean 'temperature'"),
        ("n", r"LLM\.sample\(prompt, n\)"),
        ("guided_json", "pass json_schema to the call"),
        ("regex", "pass it to the call"),
        ("zzz", "the fields are max_new_tokens"),
    ],
)
def test_a_wrong_name_has_a_hint(both: Both, name: str, hint: str):
    given: dict[str, Any] = {name: 1}
    for make in (lambda: SamplingParams(**given), lambda: both.llm.generate("a", {name: 1})):
        with pytest.raises(TypeError, match=hint):
            make()


def test_a_token_beyond_the_model_is_refused_before_anything_starts(both: Both, monkeypatch):
    capacity = msgspec.structs.replace(both.llm._engine.capacity, vocab_size=100)
    monkeypatch.setattr(both.llm._preparer, "_capacity", capacity)
    known, unknown = both.llm.tokenizer.decode([70]), both.llm.tokenizer.decode([180])

    assert both.python("generate", known, {"max_new_tokens": 1}).taken
    with pytest.raises(
        RequestError, match=r"prompt 1: .* for the tokenizer, but the model's ids lie in \[0, 100\)"
    ):
        both.llm.generate([known, unknown])
