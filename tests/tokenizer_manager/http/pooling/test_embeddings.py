"""`POST /v1/embeddings`: shapes, prompts, dimensions, and every error before and after the model."""

from __future__ import annotations

import base64
import struct
from typing import Any

import openai
import pytest
from msgspec import structs

from engine.models.spec.encoder_spec import PoolingSpec
from engine.runtime.messages import Finish, FinishKind, GenerateRequest, TextOutput, Usage

from ...conftest import Serve
from ...fake_engine import CAPACITY, TOKENIZER, WAIT_S, ids_of, say_all, say_vectors

PATH = "/v1/embeddings"
EMBEDDER = PoolingSpec(
    task="embed",
    pooling="last",
    size=4,
    normalize=True,
    dimensions=(2,),
    prompts={"query": "Q: ", "document": "", "code": "C: "},
)
RERANKER = PoolingSpec(task="score", pooling="cls", size=1)


def vector_of(request: GenerateRequest) -> list[float]:
    """A vector that tells its prompt: length, first token."""
    ids = ids_of(request)
    return [len(ids), ids[0], 0.5, -1.0]


ANSWER = say_vectors(vector_of)


def text_of(request: GenerateRequest) -> str:
    return TOKENIZER.decode(ids_of(request))


def test_more_inputs_than_can_wait_name_their_field(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER, max_queued_requests=4)

    response = served.client.post(PATH, json={"input": ["a"] * 13})  # 8 run, 4 wait

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "input" and "13 results (input)" in error["message"]
    assert "--max-queued-requests" in error["message"]
    assert served.client.post(PATH, json={"input": ["a"] * 12}).status_code == 200


def test_a_text(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER)

    body = served.client.post(PATH, json={"input": "hello", "model": "org/tiny"}).json()

    assert body["object"] == "list" and body["model"] == "org/tiny" and body["id"].startswith("embd-")
    assert body["data"] == [
        {"object": "embedding", "index": 0, "embedding": [5.0, float(TOKENIZER.encode("h")[0]), 0.5, -1.0]}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    request = served.engine.next_request()
    assert request.pooling is not None and request.pooling.normalize and not request.pooling.all_tokens
    assert request.sampling.max_new_tokens == 1


@pytest.mark.parametrize(
    ("value", "lengths"), [("hi", [2]), (["a", "bcd"], [1, 3]), ([1, 2, 3], [3]), ([[1], [2, 3]], [1, 2])]
)
def test_all_forms_of_the_input_keep_their_order(serve: Serve, value, lengths):
    served = serve(ANSWER, pooling=EMBEDDER)

    data = served.client.post(PATH, json={"input": value}).json()["data"]

    assert [each["index"] for each in data] == list(range(len(lengths)))
    assert [each["embedding"][0] for each in data] == lengths


def test_the_official_client_gets_the_same_numbers_in_both_encodings(serve: Serve):
    """It asks for base64 by itself, and decodes it."""
    served = serve(ANSWER, pooling=EMBEDDER)
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")

    by_client = client.embeddings.create(model="org/tiny", input=["hello", "you"])
    plain = served.client.post(PATH, json={"input": ["hello", "you"], "encoding_format": "float"}).json()
    packed = served.client.post(PATH, json={"input": ["hello", "you"], "encoding_format": "base64"}).json()

    expected = [each["embedding"] for each in plain["data"]]
    assert [each.embedding for each in by_client.data] == expected
    decoded = [struct.unpack("<4f", base64.b64decode(each["embedding"])) for each in packed["data"]]
    assert [list(each) for each in decoded] == expected


@pytest.mark.parametrize(
    ("fields", "dimensions", "normalize"),
    [
        ({}, 0, True),
        ({"dimensions": 4}, 0, True),
        ({"dimensions": 2}, 2, True),
        ({"normalize": False}, 0, False),
        ({"dimensions": None, "encoding_format": None, "user": "me"}, 0, True),
    ],
)
def test_dimensions_and_normalize_go_to_the_runner(
    serve: Serve, fields: dict[str, Any], dimensions, normalize
):
    served = serve(ANSWER, pooling=EMBEDDER)

    assert served.client.post(PATH, json={"input": "x"} | fields).status_code == 200

    pooling = served.engine.next_request().pooling
    assert pooling is not None
    assert (pooling.dimensions, pooling.normalize) == (dimensions, normalize)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "x"),
        ({"prompt_name": "query"}, "Q: x"),
        ({"input_type": "search_query"}, "Q: x"),
        ({"input_type": "query"}, "Q: x"),
        ({"input_type": "document"}, "x"),
        ({"input_type": "passage"}, "x"),
        ({"input_type": "code"}, "C: x"),
    ],
)
def test_a_prompt_is_put_before_the_input(serve: Serve, fields: dict[str, Any], text: str):
    served = serve(ANSWER, pooling=EMBEDDER)

    assert served.client.post(PATH, json={"input": "x"} | fields).status_code == 200

    assert text_of(served.engine.next_request()) == text


def test_a_default_prompt(serve: Serve):
    served = serve(
        ANSWER,
        pooling=PoolingSpec(task="embed", pooling="mean", size=4, prompts={"d": "D: "}, default_prompt="d"),
    )

    served.client.post(PATH, json={"input": ["x", "y"]})
    served.client.post(PATH, json={"input": "z", "input_type": "query"})  # has no prompt of its own
    served.client.post(PATH, json={"input": [5, 6]})

    requests = [served.engine.next_request() for _ in range(4)]
    assert [text_of(request) for request in requests[:3]] == ["D: x", "D: y", "D: z"]
    assert ids_of(requests[3]) == [5, 6]
    assert all(request.pooling and request.pooling.all_tokens for request in requests)


LONG = CAPACITY.max_model_len + 1


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": None}, "input", "missing"),
        ({}, "input", "missing"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": "x" * LONG}, "input", f"{LONG} tokens"),
        ({"input": ["ok", "x" * LONG]}, "input[1]", f"input[1] has {LONG} tokens"),
        ({"input": [[1], [999]]}, "input[1]", "999"),
        ({"input": "x", "dimensions": 3}, "dimensions", "trained for 2, 4"),
        ({"input": "x", "dimensions": 5}, "dimensions", "4 numbers"),
        ({"input": "x", "dimensions": 0}, "dimensions", "at most"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "x", "prompt_name": "nope"}, "prompt_name", "code, document, query"),
        ({"input": [5, 6], "prompt_name": "query"}, "prompt_name", "inputs are token ids"),
        ({"input": [[5], [6]], "input_type": "query"}, "input_type", "inputs are token ids"),
        ({"input": "x", "input_type": "nope"}, "input_type", "search_query"),
        ({"input": "x", "model": "other"}, "model", "org/tiny"),
        ({"input": "x", "priority": "urgent"}, "priority", "high"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages", "not supported"),
    ],
)
def test_bad_input_is_refused_with_value_and_rule(serve: Serve, fields: dict[str, Any], param, words):
    served = serve(ANSWER, pooling=EMBEDDER)

    response = served.client.post(PATH, json=fields)

    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_an_input_may_fill_the_context(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER)
    assert served.client.post(PATH, json={"input": "x" * (LONG - 1)}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"truncate_prompt_tokens": -1}, LONG - 1),
        ({"truncate": True}, LONG - 1),
        ({"truncate_prompt_tokens": 7}, 7),
    ],
)
@pytest.mark.parametrize("long", ["x" * LONG, [7] * LONG])
def test_a_long_input_is_cut_if_the_request_wants_it(serve: Serve, fields: dict[str, Any], num_tokens, long):
    served = serve(ANSWER, pooling=EMBEDDER)
    short = "ab" if isinstance(long, str) else [1, 2]

    body = served.client.post(PATH, json={"input": [short, long]} | fields).json()

    assert [each["embedding"][0] for each in body["data"]] == [2, num_tokens]


def test_one_failed_input_fails_the_call_with_its_index(serve: Serve):
    def script(request: GenerateRequest) -> list[TextOutput]:
        if ids_of(request) == [7]:
            finish = Finish(FinishKind.ERROR, message="the model's output is not finite")
            return [TextOutput(request.rid, "", b"", Usage(1, 0), finish)]
        return list(ANSWER(request))

    served = serve(script, pooling=EMBEDDER)

    response = served.client.post(PATH, json={"input": [[1], [7], [3]]})

    assert response.status_code == 500
    assert response.json()["error"]["param"] == "input[1]"
    assert response.json()["error"]["message"] == "input[1]: the model's output is not finite"


def test_vectors_have_the_order_of_their_inputs_and_not_of_their_ends(serve: Serve):
    arrived: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> list[TextOutput]:
        arrived.append(request)
        if len(arrived) < 3:
            return []
        return [row for each in reversed(arrived) for row in ANSWER(each)]

    served = serve(script, pooling=EMBEDDER)

    data = served.client.post(PATH, json={"input": [[1], [2], [3]]}).json()["data"]

    assert [(each["index"], each["embedding"][1]) for each in data] == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_scheduling_fields_reach_the_scheduler(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER)
    fields = {"priority": 3, "cache_salt": "salt", "user": "me", "timeout": 7.5, "queue_timeout": 2.5}

    served.client.post(PATH, json={"input": "x"} | fields).raise_for_status()
    served.client.post(PATH, json={"input": "x"}).raise_for_status()

    request, plain = served.engine.next_request(), served.engine.next_request()
    assert (request.priority, request.timeout_s, request.queue_timeout_s) == (3, 7.5, 2.5)
    assert request.extra_key != plain.extra_key and request.tenant != plain.tenant


@pytest.mark.parametrize(("fields", "dimensions"), [({}, 2), ({"dimensions": 4}, 0), ({"dimensions": 2}, 2)])
def test_a_model_with_shorter_vectors_by_default_still_has_whole_ones(
    serve: Serve, fields: dict[str, Any], dimensions: int
):
    served = serve(ANSWER, pooling=structs.replace(EMBEDDER, default_dimensions=2))

    served.client.post(PATH, json={"input": "x"} | fields).raise_for_status()

    pooling = served.engine.next_request().pooling
    assert pooling is not None and pooling.dimensions == dimensions


def test_an_aborted_call_is_an_error_and_has_no_empty_vectors(serve: Serve):
    served = serve(None, pooling=EMBEDDER)
    waiting = served.post_later(PATH, json={"input": "x"})
    request = served.engine.next_request()

    reply = served.client.post("/abort_request", json={"rid": request.rid})
    finish = Finish(FinishKind.ABORT, message="aborted by request")
    served.engine.say(TextOutput(request.rid, "", b"", Usage(1, 0), finish))

    assert reply.json()["aborted"] == 1
    response = waiting.result(WAIT_S)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "aborted")


def test_many_inputs(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER, max_queued_requests=4096)

    data = served.client.post(PATH, json={"input": [[1 + n % 200] for n in range(2048)]}).json()["data"]

    assert [each["embedding"][1] for each in data] == [1 + n % 200 for n in range(2048)]
    error = served.client.post(PATH, json={"input": ["x"] * 2049}).json()["error"]
    assert "2049" in error["message"] and "2048" in error["message"]


def test_a_model_does_only_its_task(serve: Serve):
    embedder, generator, reranker = (
        serve(say_all("x") if pooling is None else ANSWER, pooling=pooling)
        for pooling in (EMBEDDER, None, RERANKER)
    )
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "x"}),
        ("/generate", {"text": "x"}),
    ):
        error = embedder.client.post(path, json=body).json()["error"]
        assert error["code"] == "unsupported_task" and "/v1/embeddings" in error["message"], path
    assert "--task embed" in generator.client.post(PATH, json={"input": "x"}).json()["error"]["message"]
    assert "/v1/rerank" in reranker.client.post(PATH, json={"input": "x"}).json()["error"]["message"]
    tasks = [
        served.client.get("/v1/models").json()["data"][0]["task"]
        for served in (embedder, generator, reranker)
    ]
    assert tasks == ["embed", "generate", "score"]
    assert embedder.client.get("/v1/models").json()["data"][0]["embedding_size"] == 4


def test_the_health_check_of_an_embedder_makes_a_vector(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER)

    assert served.client.get("/health_generate").status_code == 200

    assert served.engine.next_request().pooling is not None
