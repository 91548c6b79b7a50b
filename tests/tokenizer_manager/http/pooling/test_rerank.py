"""`POST /v1/rerank`: order, shapes and errors, for each way in which models score pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import structs

from engine.models.spec.encoder_spec import PoolingSpec
from engine.runtime.messages import GenerateRequest
from engine.runtime.pooling import PoolingKind

from ...conftest import Serve
from ...fake_engine import TOKENIZER, ids_of, say_all, say_vectors
from .test_embeddings import EMBEDDER

HEAD = PoolingSpec(task="score", pooling="cls", size=1, activation="sigmoid")
LABELED = PoolingSpec(
    task="score",
    pooling="last",
    size=1,
    label_tokens=("y", "n"),
    template="<{instruction}|{query}|{document}>",
    instruction="judge",
)
DOCUMENTS = ["aa", "b", "cccc"]


def text_of(request: GenerateRequest) -> str:
    return TOKENIZER.decode(ids_of(request))


def body_for(**fields: Any) -> dict[str, Any]:
    return {"query": "q", "documents": DOCUMENTS} | fields


LENGTH = say_vectors(lambda request: [len(ids_of(request)) - 3.0])
"""A logit that grows with the prompt."""


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(serve: Serve, path: str):
    served = serve(LENGTH, pooling=HEAD)

    body = served.client.post(path, json=body_for(model="org/tiny")).json()

    assert body["model"] == "org/tiny"
    assert [each["index"] for each in body["results"]] == [2, 0, 1]
    expected = [1 / (1 + math.exp(-logit)) for logit in (2, 0, -1)]
    assert [each["relevance_score"] for each in body["results"]] == pytest.approx(expected)
    assert all("document" not in each for each in body["results"])
    assert body["usage"]["total_tokens"] == 3 + 2 + 5
    request = served.engine.next_request()
    assert text_of(request) == "qaa" and request.pooling is not None
    assert request.pooling.kind is PoolingKind.SCORE and request.pooling.all_tokens


def test_top_n_and_documents_in_the_answer(serve: Serve):
    served = serve(LENGTH, pooling=HEAD)
    documents = [{"text": "aa", "id": 5}, "b", "cccc"]

    body = served.client.post(
        "/v1/rerank", json=body_for(documents=documents, top_n=2, return_documents=True)
    ).json()

    assert [each["document"] for each in body["results"]] == [{"text": "cccc"}, {"text": "aa"}]


def test_equal_scores_keep_their_order(serve: Serve):
    served = serve(say_vectors(lambda request: [0.0]), pooling=HEAD)

    results = served.client.post("/v1/rerank", json=body_for()).json()["results"]

    assert [each["index"] for each in results] == [0, 1, 2]


def test_a_reranker_with_labels_fills_its_template_and_compares_them(serve: Serve):
    served = serve(say_vectors(lambda request: [-1.0, -2.0]), pooling=LABELED)

    body = served.client.post("/v1/rerank", json=body_for(instruction="find")).json()
    served.client.post("/v1/rerank", json=body_for())

    requests = [served.engine.next_request() for _ in range(6)]
    assert text_of(requests[0]) == "<find|q|aa>"
    assert text_of(requests[3]) == "<judge|q|aa>"
    assert requests[0].pooling is not None
    assert requests[0].pooling.label_ids == tuple(TOKENIZER.encode("yn"))
    assert not requests[0].pooling.all_tokens
    assert body["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-1)))


def test_an_embedder_scores_by_the_angle_and_computes_each_text_once(serve: Serve):
    vectors = {"Q: q": [1.0, 0, 0, 0], "aa": [0.6, 0.8, 0, 0], "b": [0, 1.0, 0, 0]}
    served = serve(say_vectors(lambda request: vectors[text_of(request)]), pooling=EMBEDDER)

    results = served.client.post("/v1/rerank", json=body_for(documents=["b", "aa", "aa"])).json()["results"]

    assert [(each["index"], round(each["relevance_score"], 6)) for each in results] == [
        (1, 0.6),
        (2, 0.6),
        (0, 0.0),
    ]
    assert served.engine.generate.qsize() == 3


def test_the_length_of_vectors_does_not_change_their_scores(serve: Serve):
    served = serve(LENGTH, pooling=structs.replace(EMBEDDER, normalize=False, size=1))

    served.client.post("/v1/rerank", json=body_for()).raise_for_status()

    requests = [served.engine.next_request() for _ in range(4)]
    assert all(request.pooling is not None and request.pooling.normalize for request in requests)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"query": None}, "query", "string"),
        ({"query": ["q"]}, "query", "string"),
        ({"documents": None}, "documents", "a list"),
        ({"documents": []}, "documents", "at least one"),
        ({"documents": ["a", 5]}, "documents[1]", "must be a string"),
        ({"documents": ["a", {"body": "x"}]}, "documents[1]", "under text"),
        ({"documents": ["a", "b" * 400]}, "documents[1]", "401 tokens"),
        ({"documents": ["a"] * 2049}, "documents", "2048"),
        ({"top_n": -1}, "top_n", "-1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ({"max_tokens_per_doc": -2}, "max_tokens_per_doc", "-2"),
        ({"max_tokens_per_doc": 9, "truncate_prompt_tokens": 5}, "max_tokens_per_doc", "one of them"),
        ({"rank_fields": ["a"]}, "rank_fields", "not supported"),
        ({"instruction": "find"}, "instruction", "leave it out"),
        ({"model": "other"}, "model", "org/tiny"),
    ],
)
def test_bad_input_is_refused(serve: Serve, fields: dict[str, Any], param: str, words: str):
    served = serve(LENGTH, pooling=HEAD, max_queued_requests=4096)

    response = served.client.post("/v1/rerank", json=body_for(**fields))

    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param and words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"truncate_prompt_tokens": -1}, {"max_tokens_per_doc": 100}, {"truncate": True}]
)
def test_long_documents_are_cut_if_the_request_wants_it(serve: Serve, fields: dict[str, Any]):
    served = serve(LENGTH, pooling=HEAD)

    response = served.client.post("/v1/rerank", json=body_for(documents=["a", "b" * 400]) | fields)

    assert response.status_code == 200
    lengths = [len(ids_of(served.engine.next_request())) for _ in range(2)]
    assert lengths == [2, min(fields.get("max_tokens_per_doc", 256), 256)]


@pytest.mark.parametrize("fields", [{"truncate_prompt_tokens": 9}, {"max_tokens_per_doc": 9}])
def test_a_cut_document_leaves_the_end_of_the_template(serve: Serve, fields: dict[str, Any]):
    pooling = structs.replace(LABELED, template="<{query}|{document}|yes?>")
    served = serve(say_vectors(lambda request: [-1.0, -2.0]), pooling=pooling)

    served.client.post("/v1/rerank", json=body_for(documents=["b" * 400]) | fields)

    assert text_of(served.engine.next_request()) == "<q||yes?>"


def test_other_models_say_what_they_do(serve: Serve):
    generator = serve(say_all("x"))
    assert (
        "serve a reranker" in generator.client.post("/v1/rerank", json=body_for()).json()["error"]["message"]
    )
    classifier = serve(LENGTH, pooling=PoolingSpec(task="score", pooling="cls", size=3))
    assert "/v1/score" in classifier.client.post("/v1/rerank", json=body_for()).json()["error"]["message"]


def test_an_error_of_an_embedder_names_the_document_and_not_its_vector(serve: Serve):
    served = serve(say_vectors(lambda _: [1.0]), pooling=EMBEDDER)
    for query, documents, param in (
        ("q", ["a", "a", "x" * 10_000], "documents[2]"),
        ("x" * 10_000, ["a", "b"], "query"),
    ):
        reply = served.client.post("/v1/rerank", json={"query": query, "documents": documents})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert error["message"].removeprefix("the ").startswith(f"{param} has ")


def test_a_text_that_looks_like_a_name_of_the_template_stays_as_it_is(serve: Serve):
    served = serve(say_vectors(lambda request: [-1.0, -2.0]), pooling=LABELED)

    served.client.post("/v1/rerank", json={"query": "{document} {instruction}", "documents": ["{query}"]})

    assert text_of(served.engine.next_request()) == "<judge|{document} {instruction}|{query}>"


def test_a_head_with_a_template(serve: Serve):
    pooling = PoolingSpec(
        task="score", pooling="last", size=1, template="<{query}|{document}>", activation="sigmoid"
    )
    served = serve(LENGTH, pooling=pooling)

    served.client.post("/v1/rerank", json=body_for())

    request = served.engine.next_request()
    assert text_of(request) == "<q|aa>" and request.pooling is not None
    assert request.pooling.kind is PoolingKind.SCORE
