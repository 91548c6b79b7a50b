"""Answers: the part that is shown, the stream it goes to, and the part that a conversation keeps."""

from __future__ import annotations

import io
import json

import pytest

from engine.cli.chat.answer import Answer
from engine.cli.chat.backend import AnswerChunk, Call, _chunk_of
from engine.cli.chat.screen import Screen
from engine.cli.chat.settings import read_form
from engine.runtime.errors import ConfigError, RequestError
from engine.runtime.messages import Usage

WEATHER = {"name": "get_weather", "parameters": {"type": "object"}}


def shown(*chunks: AnswerChunk, shows_text: bool = True) -> tuple[Answer, str, str]:
    out, err = io.StringIO(), io.StringIO()
    view = Answer(Screen(out, err), shows_text=shows_text)
    for chunk in chunks:
        view.add(chunk)
    view.end()
    return view, out.getvalue(), err.getvalue()


def test_reasoning_is_not_among_the_answers():
    view, out, err = shown(
        AnswerChunk("", reasoning="Hm, "), AnswerChunk("", reasoning="yes."), AnswerChunk("4")
    )

    assert (out, err) == ("4\n", "Hm, yes.\n")
    assert view.text == view.stored_text() == "4"


def test_calls_are_joined_and_written_one_per_line():
    view, out, _ = shown(
        AnswerChunk("I look.", calls=(Call(0, "get_weather", ""),)),
        AnswerChunk("", calls=(Call(0, "", '{"city": '),)),
        AnswerChunk("", calls=(Call(0, "", '"Rome"}'), Call(1, "now", ""))),
    )

    lines = out.splitlines()
    assert lines[0] == "I look."
    assert [json.loads(line) for line in lines[1:]] == [
        {"name": "get_weather", "arguments": {"city": "Rome"}},
        {"name": "now", "arguments": {}},
    ]
    assert view.stored_text() == out.strip()


def test_a_call_that_was_cut_is_shown_as_it_is():
    _, out, _ = shown(AnswerChunk("", calls=(Call(0, "f", '{"a": "b'),)))

    assert json.loads(out) == {"name": "f", "arguments": '{"a": "b'}


def test_a_caller_that_prints_the_answer_itself_gets_nothing_shown():
    view, out, err = shown(AnswerChunk("x", reasoning="y", calls=(Call(0, "f", "{}"),)), shows_text=False)

    assert (out, err) == ("", "")
    assert view.text == "x" and view.calls


def test_chunks_of_a_server_with_calls_and_reasoning():
    delta = {"reasoning_content": "r", "tool_calls": [{"index": 1, "function": {"arguments": "{"}}]}

    chunk = _chunk_of({"choices": [{"delta": delta, "finish_reason": None}]})

    assert chunk == AnswerChunk("", reasoning="r", calls=(Call(1, "", "{"),))


def test_the_form_of_answers_becomes_fields_of_a_request(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER, {"type": "function", "function": WEATHER}]))

    body = read_form(tmp_path / "schema.json", tmp_path / "tools.json")

    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["tools"] == [{"type": "function", "function": WEATHER}] * 2
    assert read_form(None, None) == {}


@pytest.mark.parametrize(
    ("schema", "tools", "reason"),
    [
        ("{", None, "--schema .* is not JSON"),
        ("[]", None, "which is an object"),
        (None, '["get_weather"]', "entry 0 is no tool"),
        (None, "", "--tools .* is not JSON"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, schema, tools, reason):
    paths = []
    for name, text in (("schema.json", schema), ("tools.json", tools)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        paths.append(None if text is None else path)

    with pytest.raises((ConfigError, RequestError), match=reason):
        read_form(*paths)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_form(tmp_path / "missing", None)


@pytest.mark.parametrize(("ends_s", "rate"), [((0.0, 0.0), None), ((0.0, 0.015), None), ((0.0, 0.5), 12.0)])
def test_an_answer_that_came_at_once_has_no_rate(ends_s: tuple[float, float], rate: float | None):
    times = iter((0.0, *ends_s))  # of the question, and of each piece
    view = Answer(Screen(io.StringIO(), io.StringIO()), clock=lambda: next(times))
    view.add(AnswerChunk("Rome "))
    view.add(AnswerChunk("is fine.", usage=Usage(prompt_tokens=3, completion_tokens=7)))

    assert view.tokens_per_s == rate
