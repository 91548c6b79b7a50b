from __future__ import annotations

import re

import pytest

from engine.runtime.messages import Finish, FinishKind
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.transport.message_base import Logprobs
from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import EOS, LENGTH, TOKENIZER, WAIT_S, floats, row, say_all
from tests.tokenizer_manager.http.test_chat import events


def test_generate_from_text(serve: Serve):
    served = serve(say_all("Hel", "lo"))
    sampling = {
        "max_new_tokens": 8,
        "min_new_tokens": 1,
        "temperature": 0,
        "sampling_seed": None,
        "no_stop_trim": True,
    }
    body = served.client.post(
        "/generate", json={"text": "hi", "sampling_params": sampling | {"seed": 4}}
    ).json()
    request = served.engine.next_request()

    assert request.sampling == SamplingParams(
        max_new_tokens=8, min_new_tokens=1, temperature=0.0, seed=4, include_stop_str_in_output=True
    )
    assert body["text"] == "Hello"
    assert body["output_ids"] == TOKENIZER.encode("Hello")
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert body["meta_info"]["seed"] == 4
    assert body["meta_info"]["prompt_tokens"] == 2
    assert "warnings" in body  # sampling_seed


def test_generate_from_ids_and_in_batches(serve: Serve):
    served = serve(say_all("x"))
    assert served.client.post("/generate", json={"input_ids": [1, 2]}).json()["text"] == "x"
    assert served.engine.next_request().sampling.max_new_tokens == 128
    for batch, num_answers in [({"input_ids": [[1], [2]]}, 2), ({"text": ["a"]}, 1)]:
        assert len(served.client.post("/generate", json=batch).json()) == num_answers
    assert len(served.client.post("/generate", json={"text": "a", "sampling_params": {"n": 2}}).json()) == 2


def test_sampling_parameters_of_each_prompt(serve: Serve):
    served = serve(say_all("x"))
    params = [{"temperature": 0, "max_new_tokens": 3}, {"top_k": 5}]
    reply = served.client.post("/generate", json={"text": ["a", "b"], "sampling_params": params})
    first, second = (served.engine.next_request().sampling for _ in params)

    assert reply.status_code == 200, reply.text
    assert len(reply.json()) == 2
    assert (first.temperature, first.max_new_tokens, first.top_k) == (0.0, 3, -1)
    assert (second.temperature, second.max_new_tokens, second.top_k) == (1.0, 128, 5)
    one = {"input_ids": [1], "sampling_params": [{"max_new_tokens": 2}]}
    assert served.client.post("/generate", json=one).status_code == 200
    assert served.engine.next_request().sampling.max_new_tokens == 2


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ([{}], "sampling_params"),
        ([{}, {}, {}], "sampling_params"),
        ([{}, {"temperature": -1}], "sampling_params[1].temperature"),
        ([{}, {"temperature": "x"}], "sampling_params[1].temperature"),
        ([{}, {"max_new_tokens": 0}], "sampling_params[1].max_new_tokens"),
        ([{}, {"logit_bias": {"99999999": 1}}], "sampling_params.logit_bias"),
        ([{}, {"n": 2}], "sampling_params[1].n"),
        ([{}, {"regex": "a"}], "sampling_params[1]"),
        ([{}, 5], "sampling_params[1]"),
    ],
)
def test_lists_of_sampling_parameters_that_are_refused(serve: Serve, params, param):
    reply = serve().client.post("/generate", json={"text": ["a", "b"], "sampling_params": params})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_stream_holds_all_so_far_or_what_is_new(serve: Serve):
    served = serve(say_all("Hel", "lo"))
    for incremental, texts in [(False, ["Hel", "Hello"]), (True, ["Hel", "lo"])]:
        body = {"text": "hi", "stream": True, "incremental": incremental}
        chunks = events(served.client.post("/generate", json=body).text)
        assert [chunk["text"] for chunk in chunks] == texts
        assert [chunk["output_ids"] for chunk in chunks] == [TOKENIZER.encode(text) for text in texts]
        assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, False]


def test_logprobs(serve: Serve):
    def script(request):
        yield row(
            request,
            "a",
            logprobs=Logprobs(floats(-0.5), (64).to_bytes(4, "little"), floats(-0.5), 1),
            prompt_logprobs=Logprobs(floats(-2), (65).to_bytes(4, "little"), floats(-1), 1),
            finish=LENGTH,
        )

    served = serve(script)
    fields = {"text": "hi", "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0}
    meta = served.client.post("/generate", json=fields).json()["meta_info"]

    assert meta["input_token_logprobs"] == [[None, 71, "h"], [-2.0, 72, "i"]]
    assert meta["input_top_logprobs"] == [None, [[-1.0, 65, "b"]]]
    assert meta["output_token_logprobs"] == [[-0.5, 64, "a"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 64, "a"]]]


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens", "^sampling_params.max_new_tokens is 0"),
        ({"max_new_tokens": "x"}, "max_new_tokens", "must be an integer"),
        ({"regex": 5}, "regex", "must be a string"),
        ({"regex": "(?=a)"}, "regex", "^sampling_params.regex: look-around"),
        ({"top_p": 1.5}, "top_p", "^sampling_params.top_p is 1.5"),
        (
            {"max_new_tokens": 1000},
            "max_new_tokens",
            "sampling_params.max_new_tokens is 1000: .* lower samp",
        ),
        ({"n": 0}, "n", "^sampling_params.n is 0"),
        ({"n": 100}, "n", "100 answers"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "^sampling_params.logit_bias has the key"),
        ({"stop": [""]}, "stop", "^sampling_params.stop contains"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens",
            r"^sampling_params.min_new_tokens is 9, .* sampling_params.max_new_tokens \(8\)",
        ),
    ],
)
def test_errors_name_the_field_inside_sampling_params(answering: Served, sampling, param, message):
    reply = answering.client.post("/generate", json={"text": "hi", "sampling_params": sampling})
    error = reply.json()["error"]

    assert (reply.status_code, error["param"]) == (400, f"sampling_params.{param}")
    assert re.search(message, error["message"]), error["message"]
    assert error["code"] is not None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "text", "exactly one"),
        ({"text": ["a", "x" * 300]}, "text[1]", r"^text\[1\] has 300 tokens"),
        ({"input_ids": [[1], [999]]}, "input_ids[1]", "999"),
        (
            {"text": "a", "return_logprob": True, "top_logprobs_num": 21},
            "top_logprobs_num",
            "^top_logprobs_num is 21",
        ),
        ({"text": "a", "return_logprob": True, "stream": True}, "incremental", "set it, or leave out"),
    ],
)
def test_errors_name_fields_as_they_are_called_here(answering: Served, fields, param, message):
    error = answering.client.post("/generate", json=fields).json()["error"]

    assert error["param"] == param
    assert re.search(message, error["message"]), error["message"]
    assert error["code"] is not None


def test_log_probabilities_are_streamed_in_parts(serve: Serve):
    def script(request):
        for text in "ab":
            finish = LENGTH if text == "b" else None
            yield row(request, text, logprobs=Logprobs(floats(-0.5)), finish=finish)

    served = serve(script)
    body = {"text": "hi", "stream": True, "incremental": True, "return_logprob": True}
    chunks = events(served.client.post("/generate", json=body).text)

    assert [chunk["meta_info"]["output_token_logprobs"] for chunk in chunks] == [
        [[-0.5, 64, "a"]],
        [[-0.5, 65, "b"]],
    ]


def test_wishes_reach_the_scheduler(serve: Serve):
    served = serve(say_all("x"))
    body = {
        "text": "hi",
        "priority": "low",
        "cache_salt": "s",
        "user": "u",
        "queue_timeout": 2,
        "timeout": 0.5,
    }
    served.client.post("/generate", json=body)
    request = served.engine.next_request()

    assert (request.priority, request.extra_key, request.tenant) == (-20, "s", "u")
    assert (request.queue_timeout_s, request.timeout_s) == (2.0, 0.5)


def test_an_id_of_the_clients_is_said_to_be_ignored(serve: Serve):
    served = serve(say_all("x"), strict=True)
    body = served.client.post("/generate", json={"text": "hi", "rid": "mine"}).json()

    assert body["warnings"][0].startswith("rid was ignored")
    assert body["meta_info"]["id"] != "mine"


def test_tokenize_and_detokenize_are_inverse(serve: Serve):
    served = serve()
    body = served.client.post("/tokenize", json={"prompt": "hé<|im_end|>"}).json()

    ids = TOKENIZER.encode("hé<|im_end|>")
    assert body == {"tokens": ids, "count": 4, "max_model_len": 256, "prompt": "hé<|im_end|>"}
    assert served.client.post("/detokenize", json={"tokens": ids}).json()["text"] == "hé<|im_end|>"
    visible = {"tokens": ids, "skip_special_tokens": True}
    assert served.client.post("/detokenize", json=visible).json()["text"] == "hé"
    assert served.client.post("/detokenize", json={"tokens": [999]}).status_code == 400
    too_many = served.client.post("/detokenize", json={"tokens": [1] * 257}).json()["error"]
    assert (too_many["param"], "at most 256" in too_many["message"]) == ("tokens", True)
    assert served.client.post("/tokenize", json={}).status_code == 400
    strange = served.client.post("/detokenize", json={"tokens": ids, "color": "red"})
    assert strange.json()["warnings"] == ["unknown field color was ignored"]


def test_tokenize_shows_the_rendered_chat(serve: Serve):
    served = serve()
    body = served.client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()

    assert body["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert body["count"] == len(body["tokens"]) == 21


def test_abort_request_ends_the_answer(serve: Serve):
    served = serve()
    reply = served.post_later("/v1/completions", json={"prompt": "hi"})
    request = served.engine.next_request()
    answer_id = request.rid.rpartition("-")[0]
    assert served.client.post("/abort_request", json={"rid": answer_id[:-1]}).json() == {"aborted": 0}
    assert served.client.post("/abort_request", json={"rid": answer_id}).json() == {"aborted": 1}
    assert served.engine.next_abort().rid == request.rid
    served.engine.say(row(request, "part", finish=Finish(FinishKind.ABORT)))
    body = reply.result(WAIT_S).json()

    assert body["id"] == answer_id
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("part", "abort")
    assert served.client.post("/abort_request", json={}).status_code == 400
    assert served.client.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}


@pytest.mark.parametrize(
    ("from_tiers", "by_tier"),
    [((0, 0), None), ((32, 0), {"disk": 32}), ((0, 16), {"host": 16}), ((32, 16), {"host": 16, "disk": 32})],
)
def test_cached_tokens_are_counted_by_tier(serve: Serve, from_tiers, by_tier):
    served = serve(
        lambda request: [row(request, "x", cached=64, finish=LENGTH, from_tiers=from_tiers)],
        cache={"kv_disk": "folder"},
    )
    meta = served.client.post("/generate", json={"text": "a"}).json()["meta_info"]
    assert (meta["cached_tokens"], meta.get("cached_tokens_by_tier")) == (64, by_tier)


def test_flush_cache(serve: Serve):
    assert serve().client.post("/flush_cache").json() == {
        "flushed_tokens": 32,
        "kept_tokens": 8,
        "success": False,
    }
