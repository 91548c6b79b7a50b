"""`POST /v1/score`: pairs in all forms, classifiers, and labels of a generating model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.models.spec.encoder_spec import PoolingSpec

from ...conftest import Serve
from ...fake_engine import TOKENIZER, ids_of, say_vectors
from .test_rerank import HEAD, LENGTH, text_of


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"text_1": "a", "text_2": "b"}, ["ab"]),
        ({"text_1": "a", "text_2": ["b", "cc"]}, ["ab", "acc"]),
        ({"text_1": ["a", "x"], "text_2": ["b", "cc"]}, ["ab", "xcc"]),
        ({"queries": "a", "documents": ["b", "cc"]}, ["ab", "acc"]),
    ],
)
def test_all_forms_of_pairs(serve: Serve, fields: dict[str, Any], prompts: list[str]):
    served = serve(LENGTH, pooling=HEAD)

    body = served.client.post("/v1/score", json=fields).json()

    assert body["object"] == "list"
    assert [text_of(served.engine.next_request()) for _ in prompts] == prompts
    expected = [1 / (1 + math.exp(3 - len(prompt))) for prompt in prompts]
    assert [each["score"] for each in body["data"]] == pytest.approx(expected)
    assert [each["index"] for each in body["data"]] == list(range(len(prompts)))


def test_a_classifier_has_a_number_for_each_label(serve: Serve):
    pooling = PoolingSpec(task="score", pooling="cls", size=3, activation="softmax")
    served = serve(say_vectors(lambda request: [0.0, 1.0, 2.0]), pooling=pooling)

    [data] = served.client.post("/v1/score", json={"text_1": "a", "text_2": "b"}).json()["data"]

    weights = [math.exp(logit) for logit in (0, 1, 2)]
    assert data["score"] == pytest.approx([weight / sum(weights) for weight in weights])


@pytest.mark.parametrize(
    ("fields", "prompts", "scores"),
    [
        ({"label_token_ids": [5, 6]}, ["qa", "qbb"], [0.5, 0.25]),
        ({"label_token_ids": [5, 6], "apply_softmax": True}, ["qa", "qbb"], [2 / 3, 1 / 3]),
        ({"label_token_ids": [5, 6], "item_first": True}, ["aq", "bbq"], [0.5, 0.25]),
        ({"labels": ["y", "n"]}, ["qa", "qbb"], [0.5, 0.25]),
    ],
)
def test_labels_as_the_next_token_of_a_generating_model(
    serve: Serve, fields: dict[str, Any], prompts, scores
):
    served = serve(say_vectors(lambda request: [math.log(0.5), math.log(0.25)]))

    body = served.client.post("/v1/score", json={"query": "q", "items": ["a", "bb"]} | fields).json()

    assert body["object"] == "scoring"
    assert body["scores"] == [pytest.approx(scores)] * 2
    requests = [served.engine.next_request() for _ in prompts]
    assert [text_of(request) for request in requests] == prompts
    expected = tuple(TOKENIZER.encode("yn")) if "labels" in fields else (5, 6)
    assert all(request.pooling and request.pooling.label_ids == expected for request in requests)


def test_token_ids_as_query_and_items(serve: Serve):
    served = serve(say_vectors(lambda request: [-1.0]))

    served.client.post("/v1/score", json={"query": [1, 2], "items": [[3], [4, 5]], "label_token_ids": [7]})

    assert [ids_of(served.engine.next_request()) for _ in range(2)] == [[1, 2, 3], [1, 2, 4, 5]]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "queries", "text_1 and text_2"),
        ({"text_1": "a"}, "text_2", "missing"),
        ({"text_1": [], "text_2": "b"}, "text_1", "at least one"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "2 texts"),
        ({"text_1": [5], "text_2": "b"}, "text_1", "must be a string"),
        ({"text_1": "a", "text_2": "b" * 300}, "text_2", "301 tokens"),
        ({"text_1": "a", "text_2": "b", "documents": ["c"]}, "documents", "no effect on text_1"),
        ({"text_1": "a", "text_2": "b", "label_token_ids": [5]}, "label_token_ids", "no effect on pairs"),
        ({"queries": "a", "documents": "b", "apply_softmax": True}, "apply_softmax", "no effect on pairs"),
    ],
)
def test_bad_pairs_are_refused(serve: Serve, fields: dict[str, Any], param: str, words: str):
    response = serve(LENGTH, pooling=HEAD).client.post("/v1/score", json=fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "label_token_ids", "missing"),
        ({"labels": ["yes"]}, "labels", "3 tokens"),
        ({"label_token_ids": [-1]}, "label_token_ids", "-1"),
        ({"label_token_ids": [258]}, "label_token_ids", "[0, 258)"),
        ({"label_token_ids": [5], "items": [[3]]}, "items", "different forms"),
        ({"label_token_ids": [5], "items": []}, "items", "empty"),
        ({"label_token_ids": [5], "query": None}, "query", "missing"),
        ({"label_token_ids": [5], "query": ["q", "r"]}, "query", "2 texts"),
        ({"label_token_ids": [5], "text_1": "a"}, "text_1", "no effect on query and items"),
        ({"label_token_ids": [5], "instruction": "find"}, "instruction", "no effect on query and items"),
    ],
)
def test_bad_items_are_refused(serve: Serve, fields: dict[str, Any], param: str, words: str):
    served = serve(say_vectors(lambda request: [-1.0]))

    response = served.client.post("/v1/score", json={"query": "q", "items": ["a"]} | fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param and words in response.json()["error"]["message"]


def test_pairs_need_a_scorer_and_items_a_generator(serve: Serve):
    generator, scorer = serve(LENGTH), serve(LENGTH, pooling=HEAD)
    pairs, items = {"text_1": "a", "text_2": "b"}, {"query": "q", "items": ["a"], "label_token_ids": [5]}
    for served, body in ((generator, pairs), (scorer, items)):
        assert served.client.post("/v1/score", json=body).json()["error"]["code"] == "unsupported_task"
