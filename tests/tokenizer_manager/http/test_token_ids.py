"""Token ids in answers, and the log-probabilities of prompts, in the forms of vLLM and SGLang."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from engine.runtime.messages import GenerateRequest
from engine.runtime.transport.message_base import Logprobs
from engine.tokenizer_manager.http.openai.chunks import prompt_logprobs_of
from engine.tokenizer_manager.http.token_logprobs import TokenLogprob

from ..conftest import Serve
from ..fake_engine import LENGTH, TOKENIZER, floats, ids_of, row, say_all
from .test_chat import HI, events
from .test_completions import PATH, with_logprobs

CHAT = "/v1/chat/completions"
IDS = {"return_token_ids": True}


def ints(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def ranked(request: GenerateRequest):
    """One token after the prompt "abc", whose second token has the rank 7 and whose third is the likeliest."""
    _, b, c = TOKENIZER.encode("abc")
    [x] = TOKENIZER.encode("x")
    prompt = Logprobs(
        floats(-4, -0.5), ints(c, x, c, b), floats(-1, -2, -0.5, -1.5), top_k=2, ranks=ints(7, 1)
    )
    yield row(request, "x", token_ids=[x], finish=LENGTH, prompt_logprobs=prompt)


def test_a_completion_with_ids(serve: Serve):
    served = serve(say_all("lo", " you"))
    choice = served.client.post(PATH, json={"prompt": ["hel", "x"], "n": 2} | IDS).json()["choices"]
    assert [each["prompt_token_ids"] for each in choice] == [TOKENIZER.encode("hel")] * 2 + [
        TOKENIZER.encode("x")
    ] * 2
    assert [each["token_ids"] for each in choice] == [TOKENIZER.encode("lo you")] * 4
    [plain] = served.client.post(PATH, json={"prompt": "hel"}).json()["choices"]
    assert plain.keys() & {"token_ids", "prompt_token_ids", "prompt_logprobs"} == set()


def test_a_streamed_completion_has_the_ids_of_the_prompt_once(serve: Serve):
    served = serve(say_all("lo", " you"))
    body = {"prompt": "hel", "stream": True, "n": 2} | IDS
    parts = [chunk["choices"][0] for chunk in events(served.client.post(PATH, json=body).text)]
    for index in range(2):
        own = [part for part in parts if part["index"] == index]
        prompts = [part["prompt_token_ids"] for part in own if "prompt_token_ids" in part]
        assert prompts == [TOKENIZER.encode("hel")]
        assert [*chain.from_iterable(part.get("token_ids", []) for part in own)] == TOKENIZER.encode("lo you")


def test_ids_of_text_that_is_held_back_come_when_the_tokens_do(serve: Serve):
    served = serve(with_logprobs)
    stream = served.client.post(PATH, json={"prompt": "hé", "stream": True} | IDS)
    parts = [chunk["choices"][0] for chunk in events(stream.text)]
    assert [(part["text"], part.get("token_ids")) for part in parts] == [
        ("a", TOKENIZER.encode("a")),
        ("", TOKENIZER.encode("b")),
        ("b", []),
        ("", None),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_ids(serve: Serve, stream: bool):
    served = serve(say_all("lo", " you"))
    reply = served.client.post(CHAT, json=HI | IDS | {"stream": stream, "n": 2})
    prompt = ids_of(served.engine.next_request())
    bodies: list[Any] = events(reply.text) if stream else [reply.json()]

    assert [body["prompt_token_ids"] for body in bodies if "prompt_token_ids" in body] == [prompt]
    assert "prompt_token_ids" in bodies[0]
    for index in range(2):
        choices = [choice for body in bodies for choice in body["choices"] if choice["index"] == index]
        assert [*chain.from_iterable(each.get("token_ids", []) for each in choices)] == TOKENIZER.encode(
            "lo you"
        )


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_as_ids(serve: Serve, stream: bool):
    served = serve(with_logprobs)
    body = {"prompt": "hé", "logprobs": 2, "return_tokens_as_token_ids": True, "stream": stream}
    reply = served.client.post(PATH, json=body)
    bodies: list[Any] = events(reply.text) if stream else [reply.json()]
    found = [each["choices"][0]["logprobs"] for each in bodies]
    a, b = TOKENIZER.encode("ab")
    assert [*chain.from_iterable(each["tokens"] for each in found if each)] == [
        f"token_id:{a}",
        f"token_id:{b}",
    ]
    assert found[0]["top_logprobs"][0] == {f"token_id:{a}": -0.5, f"token_id:{b}": -1.0}

    chat = HI | {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "stream": stream}
    reply = served.client.post(CHAT, json=chat)
    bodies = events(reply.text) if stream else [reply.json()]
    logprobs = [choice["logprobs"] for each in bodies for choice in each["choices"] if choice["logprobs"]]
    [first, second] = [*chain.from_iterable(each["content"] for each in logprobs)]
    assert (first["token"], first["bytes"], second["token"]) == (f"token_id:{a}", [97], f"token_id:{b}")
    assert [top["token"] for top in first["top_logprobs"]] == [f"token_id:{a}", f"token_id:{b}"]


def test_prompt_logprobs_of_a_completion(serve: Serve):
    served = serve(ranked)
    reply = served.client.post(PATH, json={"prompt": "abc", "prompt_logprobs": 2, "max_tokens": 1})
    sampling = served.engine.next_request().sampling
    _, b, c = map(str, TOKENIZER.encode("abc"))
    [x] = map(str, TOKENIZER.encode("x"))

    assert (sampling.prompt_logprobs, sampling.logprobs) == (2, None)
    assert reply.json()["choices"][0]["prompt_logprobs"] == [
        None,
        {
            b: {"logprob": -4.0, "rank": 7, "decoded_token": "b"},
            c: {"logprob": -1.0, "rank": 1, "decoded_token": "c"},
            x: {"logprob": -2.0, "rank": 2, "decoded_token": "x"},
        },
        {
            c: {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            b: {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_equal_log_probabilities_have_one_rank():
    entry = TokenLogprob(5, -1.0, [(4, -1.0), (5, -1.0)], rank=1)
    _, tokens = prompt_logprobs_of([entry], 2, TOKENIZER)
    assert tokens is not None and [tokens[5].rank, tokens[4].rank] == [1, 1]


def test_prompt_logprobs_of_a_chat_and_beside_an_echo(serve: Serve):
    served = serve(ranked)
    # The fake engine's logprobs are those of three tokens: the chat's prompt ends with them.
    whole = served.client.post(CHAT, json=HI | {"prompt_logprobs": 1, "max_tokens": 1}).json()
    assert served.engine.next_request().sampling.prompt_logprobs == 1
    assert [None if each is None else len(each) for each in whole["prompt_logprobs"]] == [None, 2, 2]

    body = {"prompt": "abc", "prompt_logprobs": 2, "logprobs": 1, "echo": True, "max_tokens": 1}
    [choice] = served.client.post(PATH, json=body).json()["choices"]
    assert served.engine.next_request().sampling.prompt_logprobs == 2
    assert [None if each is None else len(each) for each in choice["prompt_logprobs"]] == [None, 3, 2]
    assert choice["logprobs"]["top_logprobs"] == [None, {"c": -1.0, "b": -4.0}, {"c": -0.5}]


def test_a_server_may_allow_more_likeliest_tokens(serve: Serve):
    served = serve(ranked, limits={"max_logprobs": 100})

    for path, body in ((PATH, {"prompt": "abc", "logprobs": 100}), (CHAT, HI | {"top_logprobs": 100})):
        asked = body | ({"logprobs": True} if path == CHAT else {})
        served.client.post(path, json=asked | {"max_tokens": 1}).raise_for_status()
        assert served.engine.next_request().sampling.logprobs == 100
    reply = served.client.post(PATH, json={"prompt": "abc", "logprobs": 101})
    assert "[0, 100]" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs is 2, but stream is true"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
@pytest.mark.parametrize(("path", "prompt"), [(PATH, {"prompt": "abc"}), (CHAT, HI)])
def test_wrong_values(serve: Serve, path: str, prompt: dict[str, Any], fields: dict[str, Any], error: str):
    reply = serve(say_all("x")).client.post(path, json=prompt | fields)
    assert reply.status_code == 400
    assert error in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] in fields


def test_logprobs_of_a_prompt_from_a_position_on(serve: Serve):
    served = serve(ranked)
    body = {"input_ids": [9, 9, *TOKENIZER.encode("abc")], "return_logprob": True, "logprob_start_len": 2}
    meta = served.client.post("/generate", json=body).json()["meta_info"]
    sampling = served.engine.next_request().sampling

    assert (sampling.prompt_logprobs, sampling.prompt_logprobs_start) == (0, 2)
    a, b, c = TOKENIZER.encode("abc")
    assert meta["input_token_logprobs"] == [[None, a, "a"], [-4.0, b, "b"], [-0.5, c, "c"]]
    refused = served.client.post("/generate", json=body | {"logprob_start_len": 5})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(
        "logprob_start_len is 5, but must be below the prompt's length, 5 tokens"
    )


def with_chosen(request: GenerateRequest):
    """One token, with the log-probabilities of "a" and "b"."""
    [x] = TOKENIZER.encode("x")
    ids = ints(*TOKENIZER.encode("ab"))
    logprobs = Logprobs(floats(-0.5), ints(x), floats(-0.5), 1, chosen_ids=ids, chosen=floats(-2, -3))
    prompt = Logprobs(floats(-4, -1), ranks=ints(7, 1), chosen_ids=ids, chosen=floats(-5, -6, -7, -8))
    yield row(request, "x", token_ids=[x], finish=LENGTH, logprobs=logprobs, prompt_logprobs=prompt)


def test_log_probabilities_of_given_tokens(serve: Serve):
    served = serve(with_chosen)
    a, b = TOKENIZER.encode("ab")
    body = {"prompt": "abc", "logprobs": 1, "prompt_logprobs": 0, "logprob_token_ids": [a, b]}
    [choice] = served.client.post(PATH, json=body).json()["choices"]
    assert served.engine.next_request().sampling.logprob_token_ids == (a, b)
    assert choice["logprobs"]["top_logprobs"] == [{"x": -0.5, "a": -2.0, "b": -3.0}]
    assert choice["prompt_logprobs"][2][str(b)] == {"logprob": -8.0, "rank": None, "decoded_token": "b"}

    chat = HI | {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": [a, b]}
    [entry] = served.client.post(CHAT, json=chat).json()["choices"][0]["logprobs"]["content"]
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("x", -0.5),
        ("a", -2),
        ("b", -3),
    ]

    native = {"text": "abc", "return_logprob": True, "token_ids_logprob": [a, b], "logprob_start_len": 0}
    meta = served.client.post("/generate", json=native).json()["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-2.0, a, "a"], [-3.0, b, "b"]]]
    assert meta["input_token_ids_logprobs"] == [
        None,
        [[-5.0, a, "a"], [-6.0, b, "b"]],
        [[-7.0, a, "a"], [-8.0, b, "b"]],
    ]

    for path, wrong in ((PATH, {"prompt": "abc"}), (CHAT, HI)):
        refused = served.client.post(path, json=wrong | {"logprob_token_ids": [a]})
        assert refused.status_code == 400
        assert "logprob_token_ids" in refused.json()["error"]["message"]
        assert "needs logprobs" in refused.json()["error"]["message"]
