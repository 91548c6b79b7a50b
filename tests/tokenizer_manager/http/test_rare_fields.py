"""Fields of rare samplers, and of what ends an answer besides `stop`: from the body to the scheduler, and back."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.tokenizer import texts_in_tokens
from engine.models.tokenizer.fim import FimTokens
from engine.runtime.messages import Finish, FinishKind
from engine.runtime.sampling_params import RepetitionDetection

from ..conftest import Serve
from ..fake_engine import TOKENIZER, ids_of, say_all
from .test_chat import events

FIELDS: dict[str, Any] = {
    "top_n_sigma": 1.5,
    "typical_p": 0.5,
    "dynatemp_range": 0.25,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "dry_penalty_last_n": 64,
    "temperature_last": True,
    "allowed_token_ids": [5, 6],
    "stop_regex": "a+b",
    "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/generate": {"text": "hi"},
}
REPEATED = Finish(FinishKind.STOP, matched="repetition_detected")


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return ENDPOINTS[path] | ({"sampling_params": fields} if path == "/generate" else fields)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_scheduler_gets_the_values_and_the_tokens_of_texts(serve: Serve, path):
    served = serve(say_all("x"))
    body = body_of(path, **FIELDS, bad_words=["ab"], dry_sequence_breakers=["b"])
    assert served.client.post(path, json=body).status_code == 200
    sampling = served.engine.next_request().sampling
    for name in (
        "top_n_sigma",
        "typical_p",
        "dynatemp_range",
        "xtc_probability",
        "dry_multiplier",
        "temperature_last",
    ):
        assert getattr(sampling, name) == FIELDS[name]
    assert (sampling.allowed_token_ids, sampling.stop_regex) == ((5, 6), ("a+b",))
    assert sampling.repetition_detection == RepetitionDetection(max_pattern_size=3, min_count=4)
    spelled = tuple(tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("ab", " ab"))
    assert sampling.bad_words_ids == spelled
    assert (TOKENIZER.encode("b", add_special_tokens=False)[0],) in sampling.dry_breaker_ids


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "param", "rule"),
    [
        ({"typical_p": 1.5}, "typical_p", "[0, 1]"),
        ({"dry_base": 0.5}, "dry_base", "[1, 100]"),
        ({"dry_penalty_last_n": 4097}, "dry_penalty_last_n", "[-1, 4096]"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must have a token"),
        ({"stop_regex": "(?=a)"}, "stop_regex", "look-around"),
        ({"stop_regex": [""]}, "stop_regex", "1 to 1024 characters"),
        ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection.min_count", "[2, 1024]"),
        ({"mirostat": 2}, "mirostat", "not supported"),
    ],
)
def test_a_wrong_value_is_a_400_with_the_range(serve: Serve, path, fields, param, rule):
    reply = serve(say_all("x")).client.post(path, json=body_of(path, **fields))
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].removeprefix("sampling_params.") == param
    assert rule in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_parameter_without_an_effect_has_a_warning(serve: Serve, path):
    served = serve(say_all("x"))
    body = served.client.post(path, json=body_of(path, xtc_probability=0.5, xtc_threshold=0.6)).json()
    assert [warning.split(" with ")[0] for warning in body["warnings"]] == ["xtc_probability has no effect"]


@pytest.mark.parametrize("path", list(ENDPOINTS)[:2])
def test_an_answer_that_repeats_itself_has_the_reason(serve: Serve, path):
    served = serve(say_all("x", finish=REPEATED))
    (choice,) = served.client.post(path, json=body_of(path)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition_detected")
    chunks = events(served.client.post(path, json=body_of(path, stream=True)).text)
    (last,) = [each for chunk in chunks for each in chunk["choices"] if each["finish_reason"]]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "repetition_detected")


def test_ollama_s_suffix_fills_in_the_middle_too(serve: Serve, monkeypatch):
    served = serve(say_all("x"))
    body = {"prompt": "hi", "suffix": "ho", "stream": False, "options": {"num_predict": 5}}
    reply = served.client.post("/api/generate", json=body)
    assert (reply.status_code, reply.json()["error"][:6]) == (400, "suffix")
    monkeypatch.setattr(TOKENIZER, "fim", FimTokens(7, 8, 9, sep=11))
    assert served.client.post("/api/generate", json=body).json()["response"] == "x"
    request = served.engine.next_request()
    assert ids_of(request) == [7, 71, 72, 8, 71, 78, 9]
    assert request.sampling.stop_token_ids == (11,)
    for other in ({"raw": True}, {"system": "x"}, {"format": "json"}):
        assert served.client.post("/api/generate", json=body | other).status_code == 400


def test_breakers_that_have_too_many_tokens_together_are_refused(serve: Serve, monkeypatch):
    served = serve(say_all("x"))
    most = max(len(TOKENIZER.texts.sequences(text)) for text in "ab")
    monkeypatch.setattr(texts_in_tokens, "MAX_DRY_SEQUENCES", most)
    body: dict[str, Any] = {"prompt": "hi", "dry_multiplier": 1, "dry_sequence_breakers": ["a", "b"]}
    response = served.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "dry_sequence_breakers"
    assert f"at most {most} tokens" in response.json()["error"]["message"]
