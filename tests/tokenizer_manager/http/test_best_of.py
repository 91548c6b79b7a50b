"""`best_of`: what is generated, what is returned, and in what order."""

from __future__ import annotations

import pytest

from engine.runtime.messages import Finish, FinishKind, GenerateRequest
from engine.runtime.transport.message_base import Logprobs
from tests.tokenizer_manager.conftest import Serve
from tests.tokenizer_manager.fake_engine import LENGTH, floats, ids_of, row, say_all

PATH = "/v1/completions"
# By seed, which is 7 + i for the i-th answer to each prompt: the mean is what counts, not the sum.
ANSWERS = {
    7: ("aaaa", (-1.0, -1.0, -1.0, -1.0)),
    8: ("b", (-1.5,)),
    9: ("cc", (-0.25, -0.5)),
    10: ("dd", (-0.5, -1.5)),  # as likely as the first
}


def ranked(request: GenerateRequest):
    """Answers in two rows each, so that the mean is over rows, too."""
    assert request.sampling.seed is not None
    text, values = ANSWERS[request.sampling.seed]
    top_k = request.sampling.logprobs
    assert top_k == 0
    yield row(request, text[:1], total=1, logprobs=Logprobs(floats(*values[:1])))
    yield row(request, text[1:], total=len(text), logprobs=Logprobs(floats(*values[1:])), finish=LENGTH)


@pytest.mark.parametrize(
    ("n", "texts"), [(1, ["cc"]), (2, ["cc", "aaaa"]), (3, ["cc", "aaaa", "dd"]), (None, ["cc"])]
)
def test_the_likeliest_by_mean_come_back_best_first_and_all_are_accounted_for(serve: Serve, n, texts):
    served = serve(ranked)
    body = served.client.post(PATH, json={"prompt": "hi", "n": n, "best_of": 4}).json()

    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * len(texts)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 9)
    requests = [served.engine.next_request() for _ in range(4)]
    assert len({request.group for request in requests}) == 1
    assert requests[0].group


def test_each_prompt_has_its_own_best(serve: Serve):
    def by_prompt(request: GenerateRequest):
        # The first prompt likes its first answer, the second its second one.
        value = -1.0 if (request.sampling.seed == 7) == (ids_of(request) == [0]) else -2.0
        yield row(
            request,
            f"{ids_of(request)[0]}{request.sampling.seed}",
            finish=LENGTH,
            logprobs=Logprobs(floats(value, value)),
        )

    body = serve(by_prompt).client.post(PATH, json={"prompt": [[0], [1]], "best_of": 2}).json()

    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "07"), (1, "18")]


def test_log_probabilities_are_those_of_the_answer_they_stand_with(serve: Serve):
    body = {"prompt": "hi", "n": 2, "best_of": 4, "logprobs": 0, "echo": False}
    choices = serve(ranked).client.post(PATH, json=body).json()["choices"]

    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[-0.25, -0.5], [-1.0] * 4]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["c", "c"], ["a"] * 4]


def test_an_answer_without_tokens_is_the_worst(serve: Serve):
    def script(request: GenerateRequest):
        if request.sampling.seed == 7:
            yield row(request, "", finish=Finish(FinishKind.STOP, matched="x"))
        else:
            yield row(request, "a", finish=LENGTH, logprobs=Logprobs(floats(-50.0)))

    choices = serve(script).client.post(PATH, json={"prompt": "hi", "best_of": 2}).json()["choices"]
    assert [choice["text"] for choice in choices] == ["a"]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_ranked_where_all_are_returned(serve: Serve, stream):
    served = serve(say_all("x"))
    body = {"prompt": "hi", "n": 2, "best_of": 2, "stream": stream}
    assert served.client.post(PATH, json=body).status_code == 200
    assert served.engine.next_request().sampling.logprobs is None


def test_the_native_api_has_it_too(serve: Serve):
    served = serve(ranked)
    body = {"text": "hi", "sampling_params": {"best_of": 4, "n": 2}}
    answers = served.client.post("/generate", json=body).json()

    assert [answer["text"] for answer in answers] == ["cc", "aaaa"]
    assert [answer["meta_info"]["seed"] for answer in answers] == [9, 7]
    assert all("output_token_logprobs" not in answer["meta_info"] for answer in answers)
    one = served.client.post("/generate", json={"text": "hi", "sampling_params": {"best_of": 4}}).json()
    assert one["text"] == "cc"
    shown = served.client.post("/generate", json=body | {"return_logprob": True}).json()
    assert [entry[0] for entry in shown[0]["meta_info"]["output_token_logprobs"]] == [-0.25, -0.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"best_of": 1, "n": 2}}, "sampling_params.best_of is 1, but n is 2"),
        ({"sampling_params": {"best_of": 2}, "stream": True}, "sampling_params.best_of is 2, but n is 1"),
    ],
)
def test_the_native_api_names_its_own_field(serve: Serve, fields, message):
    reply = serve(say_all("x")).client.post("/generate", json={"text": "hi", **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "sampling_params.best_of"
    assert reply.json()["error"]["message"].startswith(message)
