"""The chat at `/` in a real browser: stopping, settings, tools, JSON, errors, keys, export."""

from __future__ import annotations

import json

import pytest

from engine.runtime.messages import Finish, FinishKind
from engine.runtime.sampling_defaults import SamplingDefaults
from tests.tokenizer_manager.fake_engine import LENGTH, STOP, WAIT_S, row, say_all
from tests.tokenizer_manager.http.serving import CALL

from .chat_page import ANSWERED, ask, choose, fill, kept, prompt_of

pytestmark = pytest.mark.slow

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize("way", ["button", "key"])
def test_a_stopped_answer_keeps_its_text_and_its_tokens_and_ends_on_the_server(open_page, way):
    tab, served = open_page()
    ask(tab, "Count")
    request = served.engine.next_request()
    served.engine.say(row(request, "1, 2", total=4))
    tab.wait("document.querySelector('.assistant .text')?.innerText.includes('1, 2')")

    if way == "button":
        tab.click("#stop")
    else:
        tab.press("Escape")

    assert served.engine.next_abort().rid == request.rid
    tab.wait(ANSWERED)
    assert tab.text(".assistant .note") == "Stopped."
    assert "4 out" in tab.text(".assistant .figures")
    assert kept(tab)[1]["content"] == "1, 2"


def test_the_conversation_goes_on_after_a_reload(open_page):
    tab, served = open_page(say_all("Hello."))
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    served.engine.next_request()
    tab.go(served.url + "/")
    tab.wait("document.documentElement.dataset.ready")
    tab.wait(ANSWERED)
    assert tab.text(".assistant .text") == "Hello."
    ask(tab, "Again")
    tab.wait(f"document.querySelectorAll('.assistant').length === 2 && {ANSWERED}")
    assert "assistant\nHello.<|im_end|>" in prompt_of(served.engine.next_request())


def test_settings_show_the_defaults_of_the_model(open_page):
    of_model = SamplingDefaults(temperature=0.2, top_p=0.9, source="the model card")
    tab, _ = open_page(say_all("x"), of_model=of_model)
    tab.click("#open-settings")
    names = ("temperature", "top_p", "top_k", "max_tokens")
    shown = {name: tab.run(f"document.querySelector('#set-{name}').placeholder") for name in names}
    expected = ("default: 0.2", "default: 0.9", "default: -1", "default: none")
    assert shown == dict(zip(names, expected, strict=True))
    tab.click("#settings .title button")  # Reset all
    assert tab.run("document.querySelector('#set-temperature').placeholder") == "default: 0.2"


def test_settings_show_the_defaults_and_reach_the_request(open_page):
    tab, served = open_page(say_all("x"))
    tab.click("#open-settings")
    placeholders = {
        name: tab.run(f"document.querySelector('#set-{name}').placeholder")
        for name in ("temperature", "top_p", "top_k", "max_tokens", "repetition_penalty")
    }
    assert placeholders == {
        "temperature": "default: 1",
        "top_p": "default: 1",
        "top_k": "default: -1",
        "max_tokens": "default: none",
        "repetition_penalty": "default: 1",
    }
    fill(tab, "system", "Be brief.")
    for name, value in {"temperature": "0.5", "top_k": "7", "max_tokens": "9", "seed": "3"}.items():
        fill(tab, name, value)
    fill(tab, "stop", "END")
    ask(tab, "Hi")
    tab.wait(ANSWERED)

    request = served.engine.next_request()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (0.5, 7, 9)
    assert (sampling.seed, sampling.stop) == (3, ("END",))
    assert prompt_of(request).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert tab.text("#open-settings") == "Settings (6)"

    tab.go(served.url + "/")  # they are kept
    tab.wait("document.documentElement.dataset.ready")
    assert tab.text("#open-settings") == "Settings (6)"
    tab.click("#open-settings")
    tab.click("#settings .title button")
    assert tab.text("#open-settings") == "Settings"
    ask(tab, "Hi again")
    tab.wait(f"document.querySelectorAll('.assistant').length === 2 && {ANSWERED}")
    assert served.engine.next_request().sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("temperature", "2.5", "temperature must be at most 2."),
        ("top_p", "-1", "top_p must be at least 0."),
        ("repetition_penalty", "0", "repetition_penalty must be above 0."),
        ("max_tokens", "2.5", "max_tokens must be a whole number."),
        ("seed", "x", "seed must be a number."),
    ],
)
def test_a_value_out_of_range_is_named_at_its_field(open_page, field, value, problem):
    tab, _ = open_page()
    fill(tab, field, value)
    assert tab.wait(f"document.querySelector('#set-{field}').getAttribute('aria-invalid') === 'true'")
    assert problem in tab.text("#settings")


def test_an_error_is_shown_in_the_server_s_words_and_can_be_tried_again(open_page):
    tab, _served = open_page(say_all("x"))
    fill(tab, "temperature", "101")
    ask(tab, "Hi")
    tab.wait("document.querySelector('#messages .error')")
    text = tab.text("#messages .error")
    assert "temperature is 101.0" in text
    assert "status 400" in text
    assert "field temperature" in text
    assert tab.run("document.querySelector('#messages .error').getAttribute('role')") == "alert"

    fill(tab, "temperature", "0")
    tab.click("#messages .error button")
    tab.wait(ANSWERED)
    assert tab.run("document.querySelector('#messages .error')") is None
    assert [message["role"] for message in kept(tab)] == ["user", "assistant"]


def test_an_error_in_the_stream_keeps_what_had_arrived(open_page):
    tab, served = open_page()
    ask(tab, "Hi")
    request = served.engine.next_request()
    served.engine.say(row(request, "Half", total=1))
    tab.wait("document.querySelector('.assistant .text')?.innerText === 'Half'")
    failed = Finish(FinishKind.ERROR, message="out of luck", status=500)
    served.engine.say(row(request, "", total=1, finish=failed))
    tab.wait("document.querySelector('#messages .error')")
    assert "out of luck" in tab.text("#messages .error")
    assert tab.text(".assistant .text") == "Half"


def test_the_end_at_a_limit_is_said(open_page):
    tab, _ = open_page(say_all("abc", finish=LENGTH))
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert "Longest answer" in tab.text(".assistant .note")


def test_an_answer_in_one_piece_has_no_rate(open_page):
    tab, _ = open_page(say_all("one piece"))
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert "9 out" in tab.text(".assistant .figures")
    assert "tok/s" not in tab.text(".assistant .figures")


def test_a_warning_of_the_server_is_shown(open_page):
    tab, _ = open_page(say_all("x"))
    choose(tab, "reasoning_effort", "low")
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert "reasoning_effort" in tab.text(".assistant .note")


def test_a_tool_is_called_its_result_entered_and_the_answer_goes_on(open_page):
    tab, served = open_page(say_all(CALL))
    fill(tab, "tools", json.dumps([TOOL]))
    ask(tab, "What is f of 1?")
    tab.wait("document.querySelector('.call .result-form')")
    assert "Calls f" in tab.text(".call h3")
    assert json.loads(tab.text(".call pre")) == {"a": 1}
    assert '"f"' in prompt_of(served.engine.next_request())

    served.engine.script = say_all("It is 42.")
    tab.click(".result-form textarea")
    tab.type("42")
    tab.click(".result-form [type=submit]")
    tab.wait("[...document.querySelectorAll('.assistant .text')].at(-1).innerText === 'It is 42.'")
    assert tab.text(".call pre.result") == "42"
    assert "42" in prompt_of(served.engine.next_request())
    assert [message["role"] for message in kept(tab)] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("field", "text", "problem"),
    [("tools", "[{", "not JSON"), ("tools", "[1]", "a name and parameters"), ("schema", "{x", "not JSON")],
)
def test_definitions_that_cannot_be_read_are_named_before_anything_is_sent(open_page, field, text, problem):
    tab, served = open_page(say_all("x"))
    if field == "schema":
        choose(tab, "form", "schema")
    fill(tab, field, text)
    ask(tab, "Hi")
    tab.wait("document.querySelector('#messages .error')")
    assert problem in tab.text("#messages .error")
    assert problem in tab.text("#settings .problem:not([hidden])")
    assert served.engine.generate.empty()


def test_json_of_a_schema_is_asked_for(open_page):
    tab, served = open_page(say_all('{"n": 1, "s": "*no* `markdown`"}'))
    choose(tab, "form", "schema")
    fill(tab, "schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    ask(tab, "A number")
    tab.wait(f"({ANSWERED}) || document.querySelector('#messages .error')")
    assert tab.run("document.querySelector('#messages .error')?.innerText ?? ''") == ""
    grammar = served.engine.next_request().grammar
    assert grammar is not None
    assert tab.text(".assistant .text pre") == '{"n": 1, "s": "*no* `markdown`"}'


def test_reasoning_is_folded_once_the_answer_begins(open_page):
    tab, served = open_page(answers={"reasoning_parser": "think"})
    ask(tab, "Hi")
    request = served.engine.next_request()
    served.engine.say(row(request, "<think>Let me see.", total=2))
    tab.wait("document.querySelector('.thought')?.innerText.includes('Let me see')")
    assert tab.run("document.querySelector('.reasoning').open")
    served.engine.say(row(request, "</think>\n\nYes.", total=5, finish=STOP))
    tab.wait(ANSWERED)
    assert not tab.run("document.querySelector('.reasoning').open")
    assert tab.text(".assistant .text") == "Yes."
    tab.click(".reasoning summary")
    assert tab.text(".thought") == "Let me see."


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(open_page):
    tab, served = open_page(say_all("Hello."), api_key=("sk-1",))
    tab.wait("document.querySelector('#keys').open")
    assert "This server needs a key. The person who runs it can give you one." in tab.text("#keys")
    tab.type("sk-wrong")
    tab.press("Enter")
    tab.wait(
        "document.querySelector('#keys').open && document.querySelector('#keys').innerText.includes('does not accept')"
    )
    tab.type("sk-1")
    tab.press("Enter")
    tab.wait("document.documentElement.dataset.ready")
    assert tab.text("#model") == "tiny"
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert "sk-1" not in json.dumps(tab.run("({ ...localStorage })"))
    assert tab.run("sessionStorage.getItem('engine.api-key')") == "sk-1"
    assert served.engine.next_request().tenant.startswith("key-")


def test_the_export_is_a_request_that_can_be_sent_again(open_page):
    tab, served = open_page(say_all("Hello."))
    fill(tab, "system", "Be brief.")
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    tab.run(
        "(() => { const make = URL.createObjectURL; URL.createObjectURL = (blob) => { window.saved = blob; "
        "return make.call(URL, blob); }; })()"
    )
    tab.click("#export")
    saved = json.loads(tab.run("window.saved.text()"))
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    saved.pop("figures")
    assert saved.pop("models") == [saved["model"]]
    reply = served.client.post("/v1/chat/completions", json=saved, timeout=WAIT_S)
    assert reply.status_code == 200
