"""`/infill` and `/completion`: the bodies of llama.vim and llama.vscode, llama-server's defaults, ends and fields."""

from __future__ import annotations

import json

import pytest

from engine.models.tokenizer.fim import FimTokens
from engine.runtime.messages import Finish, FinishKind
from engine.tokenizer_manager.http.native.llama_server import LineRules, chosen_fields

from ..conftest import Serve
from ..fake_engine import LENGTH, TOKENIZER, ids_of, row, say_all

SAMPLERS = ["top_k", "top_p", "infill"]
TIMINGS = (
    *("prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
)
FIELDS = ["content", *(f"timings/{name}" for name in TIMINGS), "truncated", "tokens_cached"]
EXTRA = [{"text": "x = 1\n", "time": [3, 4], "filename": "a.py"}]
VIM = {
    "id_slot": 0,
    "input_prefix": "a\n",
    "input_suffix": "\nb\n",
    "input_extra": EXTRA,
    "prompt": "  i",
    "n_predict": 128,
    "stop": [],
    "n_indent": 2,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": SAMPLERS,
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": FIELDS,
}
"""As llama.vim sends it at a keystroke."""
VIM_WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": EXTRA,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
"""As llama.vim sends it when it has a new piece of context."""
VSCODE = {
    "input_prefix": "a\n",
    "input_suffix": "\nb\n",
    "input_extra": EXTRA,
    "prompt": "  i",
    "n_predict": 128,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": SAMPLERS,
    "cache_prompt": True,
    "n_indent": 2,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}
VSCODE_WARM_UP = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": EXTRA,
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
NO_INFILL = "samplers: infill has no effect; the tokens of the model end the answer"


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture(autouse=True)
def fim(monkeypatch):
    """A model with tokens for it, but for the project."""
    monkeypatch.setattr(TOKENIZER, "fim", FimTokens(7, 8, 9, pad=10, sep=11))


def test_llama_vim_gets_the_fields_that_it_asks_for(serve: Serve):
    served = serve(say_all("f x:", "\n    y"))
    reply = served.client.post("/infill", json=VIM)

    body = reply.json()
    assert (reply.status_code, body.pop("warnings")) == (200, [NO_INFILL])
    assert list(body) == FIELDS
    assert (body["content"], body["truncated"]) == ("f x:\n    y", False)
    request = served.engine.next_request()
    extra = [11, *encode("a.py\nx = 1\n"), 11, *encode("filename\n")]
    assert ids_of(request) == [*extra, 7, *encode("a\n  i"), 8, *encode("\nb\n"), 9]
    assert request.sampling.stop_token_ids == (10, 11)
    sampling = request.sampling
    assert (sampling.max_new_tokens, sampling.top_k, sampling.top_p) == (128, 40, 0.9)
    assert (sampling.min_p, sampling.temperature, sampling.temperature_last) == (0.0, 1.0, True)


def test_llama_vscode_gets_the_whole_body(serve: Serve):
    served = serve(say_all("ab", finish=Finish(FinishKind.STOP, 11)))
    body = served.client.post("/infill", json=VSCODE).json()
    assert (body["content"], body["stop"], body["stop_type"], body["tokens"]) == ("ab", True, "eos", [])
    assert body["generation_settings"]["top_p"] == 0.99
    assert body["generation_settings"]["n_predict"] == 128
    assert body["tokens_evaluated"] == len(ids_of(served.engine.next_request()))
    assert body["tokens_cached"] == body["tokens_evaluated"] + body["tokens_predicted"]
    assert set(TIMINGS) < set(body["timings"])


@pytest.mark.parametrize("body", [VIM_WARM_UP, VSCODE_WARM_UP], ids=["vim", "vscode"])
def test_a_warm_up_computes_the_prompt_only(serve: Serve, body):
    served = serve(say_all("x"))
    reply = served.client.post("/infill", json=body)
    assert reply.status_code == 200
    if "response_fields" in body:
        assert reply.json() == {}
    else:
        answer = reply.json()
        assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    request = served.engine.next_request()
    assert request.sampling.max_new_tokens == 1
    assert ids_of(request)[-3:] == [7, 8, 9]


def test_the_defaults_are_llama_server_s_and_only_here(serve: Serve):
    served = serve(say_all("x"))
    assert served.client.post("/completion", json={"prompt": "hi", "seed": -1}).status_code == 200
    request = served.engine.next_request()
    sampling = request.sampling
    assert ids_of(request) == TOKENIZER.encode("hi")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert sampling.temperature_last
    assert (sampling.max_new_tokens or 0) > 100
    assert sampling.seed not in (-1, 2**63 - 1)  # drawn
    served.client.post("/v1/completions", json={"prompt": "hi"})
    sampling = served.engine.next_request().sampling
    assert (sampling.temperature, sampling.top_k, sampling.temperature_last) == (1.0, -1, False)


def test_a_stream_has_parts_and_a_last_one_without_text(serve: Serve):
    served = serve(say_all("ab", "", "c", finish=LENGTH))
    text = served.client.post("/completion", json={"prompt": [5, 6], "stream": True}).text
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert "".join(part["content"] for part in parts) == "abc"
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "limit")
    assert "timings" not in parts[0]
    fields = {"prompt": [5, 6], "stream": True, "response_fields": ["stop", "nope", "stop/x"]}
    text = served.client.post("/completion", json=fields).text
    assert json.loads(text.splitlines()[-2].removeprefix("data: ")) == {"stop": True}


def test_a_stop_string_is_named_and_tokens_are_given_on_request(serve: Serve):
    served = serve(say_all("ab", finish=Finish(FinishKind.STOP, "\n\n")))
    asked = {"prompt": "hi", "stop": ["\n\n"], "return_tokens": True}
    body = served.client.post("/completion", json=asked).json()
    assert (body["stop_type"], body["stopping_word"]) == ("word", "\n\n")
    assert body["tokens"]
    assert served.engine.next_request().sampling.stop == ("\n\n",)


def test_a_line_with_too_little_indentation_ends_the_answer_and_the_request(serve: Serve):
    def goes_on(request):
        yield from (row(request, text) for text in ("a:", "\n    b", "\n  c"))

    served = serve(goes_on)
    body = served.client.post("/infill", json=VSCODE | {"n_indent": 4}).json()
    assert (body["content"], body["stop_type"], body["has_new_line"]) == ("a:\n    b\n  ", "limit", True)
    assert served.engine.next_abort().rid == served.engine.next_request().rid


def test_samplers_that_are_left_out_are_off(serve: Serve):
    served = serve(say_all("x"))
    for samplers in ("kt", ["top_k", "temperature"]):
        asked = {"prompt": "hi", "samplers": samplers, "temperature": 0.3, "top_p": 0.5, "dry_multiplier": 2}
        assert served.client.post("/completion", json=asked).status_code == 200
        sampling = served.engine.next_request().sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.3, 40, 1.0)
        assert (sampling.min_p, sampling.dry_multiplier) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/completion", {"samplers": ["temperature", "top_k"]}, "samplers"),
        ("/completion", {"samplers": ["top_q"]}, "samplers"),
        ("/completion", {"samplers": ["top_k", "top_k"]}, "samplers"),
        ("/completion", {"n_predict": -2}, "n_predict"),
        ("/completion", {"n": 2}, "n"),
        ("/completion", {"mirostat": 2}, "mirostat"),
        ("/completion", {"repeat_penalty": 1.1}, "repeat_penalty"),
        ("/completion", {"n_probs": 3}, "n_probs"),
        ("/completion", {"temperature": -1}, "temperature"),
        ("/completion", {"prompt": ""}, "prompt"),
        ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ("/infill", {"input_suffix": None}, "input_suffix"),
    ],
)
def test_bad_input_is_refused_by_its_path(serve: Serve, path, fields, param):
    served = serve(say_all("x"))
    valid = {"prompt": "hi"} if path == "/completion" else VSCODE
    reply = served.client.post(path, json=valid | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_model_without_the_tokens_is_refused(serve: Serve, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "fim", None)
    reply = serve(say_all("x")).client.post("/infill", json=VIM)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_task")


def test_the_time_limit_waits_for_a_new_line():
    rules = LineRules(0, 1.0)
    assert [rules.add("a\n", 0.5), rules.add("b", 2.0), rules.ended] == ["a\n", "b", False]
    assert [rules.add("c\n", 2.1), rules.ended, rules.text] == ["c\n", True, "a\nbc\n"]
    without = LineRules(0, 0.0)
    without.add("\n", 99.0)
    assert not without.ended


@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        (["x\n  y\nz"], "x\n  y\n"),
        (["x\n", " ", "y"], "x\n "),
        (["x\n\n\n  y", "\n\t\tz"], None),
        (["x", "y"], None),
        (["a\n", "  b", "\n", "c\n  d"], "a\n  b\n"),
    ],
)
def test_an_indentation_is_checked_at_each_new_line_however_the_text_comes(texts, answer):
    rules = LineRules(2, 0.0)
    added = ""
    for text in texts:
        added += rules.add(text, 0.0)
        if rules.ended:
            break
    assert (added, rules.ended) == (rules.text, answer is not None)
    assert rules.text == ("".join(texts) if answer is None else answer)


def test_fields_are_found_by_path():
    body = {"a": {"b": 1}, "c": 2, "warnings": ["w"]}
    assert chosen_fields(body, ["a/b", "c", "d", "c/x"]) == {"a/b": 1, "c": 2, "warnings": ["w"]}
