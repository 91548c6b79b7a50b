from __future__ import annotations

import json

import pytest

from engine.models.tokenizer.fim import FimTokens
from engine.runtime.messages import Finish, FinishKind, GenerateRequest
from engine.runtime.transport.message_base import Logprobs
from engine.tokenizer_manager.scheduling_options import tenant_of

from ..conftest import Serve
from ..fake_engine import LENGTH, TOKENIZER, floats, ids_of, row, say_all
from .test_chat import events

PATH = "/v1/completions"


def test_an_answer_in_one_piece(serve: Serve):
    served = serve(say_all("lo", " you"))
    body = served.client.post(PATH, json={"model": "org/tiny", "prompt": "hel"}).json()

    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "lo you", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert served.engine.next_request().sampling.max_new_tokens == 16


def test_a_stream_is_texts_and_a_finish_chunk(serve: Serve):
    served = serve(say_all("lo", "", " you"))
    body = {"prompt": "hel", "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(served.client.post(PATH, json=body).text)

    assert [(chunk["choices"] or [{}])[0].get("text") for chunk in chunks] == ["lo", " you", "", None]
    assert [(chunk["choices"] or [{}])[0].get("finish_reason") for chunk in chunks] == [
        None,
        None,
        "stop",
        None,
    ]
    assert [chunk["usage"] is None for chunk in chunks] == [True, True, True, False]


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[71, 72]]),
        (["hi", "ho"], [[71, 72], [71, 78]]),
        ([1, 2.0], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_all_forms_of_a_prompt(serve: Serve, prompt, ids):
    served = serve(say_all("x"))
    body = served.client.post(PATH, json={"prompt": prompt, "n": 2}).json()

    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(ids)))
    assert [ids_of(served.engine.next_request()) for _ in body["choices"]] == [
        p for p in ids for _ in range(2)
    ]


def test_a_suffix_makes_a_prompt_that_fills_in_the_middle(serve: Serve, monkeypatch):
    served = serve(say_all("x"))
    body = {"prompt": ["hi", "ha"], "suffix": "ho", "stop_token_ids": [4]}
    refused = served.client.post(PATH, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")
    assert refused.json()["error"]["param"] == "suffix"

    monkeypatch.setattr(TOKENIZER, "fim", FimTokens(7, 8, 9, pad=10, sep=11))
    assert served.client.post(PATH, json=body).status_code == 200
    requests = [served.engine.next_request() for _ in range(2)]
    assert [ids_of(each) for each in requests] == [[7, 71, 72, 8, 71, 78, 9], [7, 71, 64, 8, 71, 78, 9]]
    assert served.client.post(PATH, json={"prompt": [5, 6], "suffix": "ho"}).status_code == 200
    assert ids_of(served.engine.next_request()) == [7, 5, 6, 8, 71, 78, 9]
    assert requests[0].sampling.stop_token_ids == (4, 10, 11)
    long = {"prompt": "h" * 5000, "suffix": "o" * 5000, "max_tokens": 20}
    assert served.client.post(PATH, json=long).status_code == 200
    capacity = served.services.manager.capacity
    assert capacity.max_model_len - 20 - 512 < len(ids_of(served.engine.next_request()))
    echo = served.client.post(PATH, json=body | {"echo": True})
    assert (echo.status_code, echo.json()["error"]["param"]) == (400, "echo")


def test_echo_puts_the_prompt_before_each_answer(serve: Serve):
    served = serve(say_all("!", "?"))
    prompts = {"prompt": ["hi", "ho"], "echo": True, "n": 2}
    body = served.client.post(PATH, json=prompts).json()
    chunks = events(served.client.post(PATH, json=prompts | {"stream": True}).text)
    streamed = [""] * 4
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]

    assert [choice["text"] for choice in body["choices"]] == ["hi!?", "hi!?", "ho!?", "ho!?"]
    assert streamed == ["hi!?", "hi!?", "ho!?", "ho!?"]


def test_echo_of_token_ids_is_their_text(serve: Serve):
    served = serve(say_all("!"))
    body = served.client.post(PATH, json={"prompt": TOKENIZER.encode("hé"), "echo": True}).json()

    assert body["choices"][0]["text"] == "hé!"


def with_logprobs(request: GenerateRequest):
    """Two rows after the prompt "hé" (three tokens), with the two likeliest of each token."""
    _, e1, e2 = TOKENIZER.encode("hé")
    a, b = TOKENIZER.encode("ab")

    def pack(*ids: int) -> bytes:
        return b"".join(i.to_bytes(4, "little") for i in ids)

    prompt = Logprobs(floats(-1, -2), pack(e1, a, b, a), floats(-1, -3, -0.5, -0.75), 2)
    yield row(
        request,
        "a",
        token_ids=[a],
        logprobs=Logprobs(floats(-0.5), pack(a, b), floats(-0.5, -1), 2),
        prompt_logprobs=prompt,
    )
    yield row(request, "", token_ids=[b], logprobs=Logprobs(floats(-4), pack(a, e2), floats(-0.5, -1), 2))
    yield row(request, "b", token_ids=[], total=2, finish=LENGTH)


def test_logprobs_are_parallel_lists_with_offsets_into_the_text(serve: Serve):
    served = serve(with_logprobs)
    body = {"prompt": "hé", "echo": True, "logprobs": 2, "max_tokens": 2}
    choice = served.client.post(PATH, json=body).json()["choices"][0]
    request = served.engine.next_request()

    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (2, 2)
    assert choice["text"] == "héab"
    assert choice["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "a", "b"],
        "token_logprobs": [None, -1.0, -2.0, -0.5, -4.0],
        "top_logprobs": [
            None,
            {"bytes:\\xc3": -1.0, "a": -3.0},
            {"b": -0.5, "a": -0.75, "bytes:\\xa9": -2.0},
            {"a": -0.5, "b": -1.0},
            {"a": -0.5, "bytes:\\xa9": -1.0, "b": -4.0},
        ],
        "text_offset": [0, 1, 1, 2, 3],
    }


def test_streamed_logprobs_are_the_same_in_parts(serve: Serve):
    served = serve(with_logprobs)
    body = {"prompt": "hé", "echo": True, "logprobs": 2, "max_tokens": 2}
    whole = served.client.post(PATH, json=body).json()["choices"][0]
    chunks = events(served.client.post(PATH, json=body | {"stream": True}).text)
    parts = [chunk["choices"][0] for chunk in chunks]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]

    assert "".join(part["text"] for part in parts) == whole["text"]
    for field, values in whole["logprobs"].items():
        assert [value for part in logprobs for value in part[field]] == values


def test_logprobs_zero_gives_the_sampled_token_alone(serve: Serve):
    def script(request):
        yield row(request, "a", logprobs=Logprobs(floats(-0.5)), finish=LENGTH)

    served = serve(script)
    choice = served.client.post(PATH, json={"prompt": "x", "logprobs": 0}).json()["choices"][0]

    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5}]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]


def test_a_stop_string_ends_the_answer_and_frees_the_scheduler(serve: Serve):
    served = serve(say_all("some", " text", finish=Finish(FinishKind.STOP, matched="END")))
    choice = served.client.post(PATH, json={"prompt": "x", "stop": "END"}).json()["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("some text", "stop")
    assert served.engine.next_request().sampling.stop == ("END",)
    assert served.engine.next_abort().reason == "stop string"


@pytest.mark.parametrize(
    "fields", [{"best_of": 2, "n": 2}, {"best_of": 1}, {"best_of": None}, {"suffix": None}, {"suffix": ""}]
)
def test_fields_with_neutral_values_pass(serve: Serve, fields):
    served = serve(say_all("x"))

    assert served.client.post(PATH, json={"prompt": "x"} | fields).status_code == 200


def test_wishes_reach_the_scheduler(serve: Serve):
    served = serve(say_all("x"))
    wishes = {"priority": 3, "cache_salt": "s", "user": "u", "queue_timeout": 86400, "timeout": 575.0}
    assert served.client.post(PATH, json={"prompt": "hi"} | wishes).status_code == 200
    request = served.engine.next_request()

    assert (request.priority, request.extra_key, request.tenant) == (3, "s", "u")
    assert (request.queue_timeout_s, request.timeout_s) == (86400.0, 575.0)


@pytest.mark.parametrize(
    ("priority", "level"), [("high", 20), ("normal", 0), ("low", -20), (None, 0), (-7, -7)]
)
def test_priorities_are_numbers_or_classes(serve: Serve, priority, level):
    served = serve(say_all("x"))
    assert served.client.post(PATH, json={"prompt": "hi", "priority": priority}).status_code == 200
    assert served.engine.next_request().priority == level


def test_the_tenant_is_the_user_or_the_api_key_without_showing_it(serve: Serve):
    served = serve(say_all("x"), api_key=("sk-secret",))

    def tenant(key: str = "sk-secret", **fields: str) -> str:
        served.client.post(PATH, json={"prompt": "hi"} | fields, headers={"Authorization": f"Bearer {key}"})
        return served.engine.next_request().tenant

    assert tenant(user="u") == tenant(user="u", safety_identifier="s") == "u"
    assert tenant(user="", safety_identifier="s") == tenant(safety_identifier="s") == "s"
    assert tenant() == tenant(user="") == tenant_of(None, b"sk-secret")
    assert "secret" not in tenant()


@pytest.mark.parametrize(("status", "code"), [(503, "queue_timeout"), (504, "request_timeout")])
def test_timeouts_are_openai_errors_before_and_in_a_stream(serve: Serve, status, code):
    over = Finish(FinishKind.ERROR, message="it took 3.0 s, the limit is 2 s", status=status)

    def script(request: GenerateRequest):
        if request.sampling.max_new_tokens == 2:
            yield row(request, "a")
        yield row(request, "", total=1, finish=over)

    client = serve(script).client
    error = {"message": over.message, "type": "server_error", "param": None, "code": code}
    for stream in (False, True):
        reply = client.post(PATH, json={"prompt": "hi", "max_tokens": 1, "stream": stream})
        assert (reply.status_code, reply.json()) == (status, {"error": error})
    reply = client.post(PATH, json={"prompt": "hi", "max_tokens": 2, "stream": True})
    assert reply.status_code in (200, status)  # both rows may come before the stream has begun
    assert json.dumps(error, separators=(",", ":")) in reply.text
    assert "[DONE]" not in reply.text


@pytest.mark.parametrize("texts", [["x", "y"], ["", "x"], ["", ""]])
@pytest.mark.parametrize("stream_options", [{}, {"include_usage": True}])
def test_warnings_stand_in_the_first_event_of_a_stream(serve: Serve, texts, stream_options):
    served = serve(say_all(*texts))
    body = {"prompt": "hi", "stream": True, "stream_options": stream_options, "color": "red"}
    chunks = events(served.client.post(PATH, json=body).text)

    assert chunks[0]["warnings"] == ["unknown field color was ignored"]
    assert all("warnings" not in chunk for chunk in chunks[1:])


@pytest.mark.parametrize(("sent", "seed"), [(-1, 2**63 - 1), (-(2**63), 0), (5, 5), (2**63 - 1, 2**63 - 1)])
def test_every_64_bit_integer_is_a_seed(serve: Serve, sent, seed):
    served = serve(say_all("x"))

    assert served.client.post(PATH, json={"prompt": "hi", "seed": sent}).status_code == 200
    assert served.engine.next_request().sampling.seed == seed


@pytest.mark.parametrize("top_p", [0, 0.0])
def test_no_probability_mass_is_the_likeliest_token(serve: Serve, top_p):
    served = serve(say_all("x"))
    served.client.post(PATH, json={"prompt": "hi", "top_p": top_p, "top_k": 5})

    assert served.engine.next_request().sampling.greedy
