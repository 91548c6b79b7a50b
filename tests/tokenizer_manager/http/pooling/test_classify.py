"""`POST /classify` and `POST /pooling`: labels, vectors and scores of single texts, as vLLM has them."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest
from msgspec import structs

from engine.models.spec.encoder_spec import PoolingSpec
from engine.runtime.pooling import PoolingKind

from ...conftest import Serve
from ...fake_engine import ids_of, say_all, say_vectors
from .test_embeddings import ANSWER, EMBEDDER
from .test_rerank import LABELED, text_of

CLASSIFIER = PoolingSpec(
    task="score", pooling="cls", size=3, activation="softmax", labels=("bad", "fair", "good")
)
SCORES = say_vectors(lambda request: [0.0, 1.0, 2.0 * (len(ids_of(request)) - 1)])
WEIGHTS = [math.exp(logit) for logit in (0, 1, 2)]
PROBS = [weight / sum(WEIGHTS) for weight in WEIGHTS]


def test_a_classifier_names_the_likeliest_label(serve: Serve):
    served = serve(SCORES, pooling=CLASSIFIER)
    body = served.client.post("/classify", json={"input": ["ab", "a"]}).json()

    assert (body["object"], body["id"][:9], body["model"]) == ("list", "classify-", "org/tiny")
    assert [(each["index"], each["label"], each["num_classes"]) for each in body["data"]] == [
        (0, "good", 3),
        (1, "fair", 3),
    ]
    assert body["data"][0]["probs"] == pytest.approx(PROBS)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 3
    requests = [served.engine.next_request() for _ in range(2)]
    assert [text_of(request) for request in requests] == ["ab", "a"]
    assert all(request.pooling and request.pooling.kind is PoolingKind.SCORE for request in requests)


def test_without_names_the_label_is_null(serve: Serve):
    served = serve(SCORES, pooling=structs.replace(CLASSIFIER, labels=()))
    [data] = served.client.post("/classify", json={"input": [5, 6]}).json()["data"]
    assert data["label"] is None
    assert ids_of(served.engine.next_request()) == [5, 6]


def test_pooling_has_the_scores_of_a_classifier(serve: Serve):
    served = serve(SCORES, pooling=CLASSIFIER)
    for fields in ({}, {"task": "classify"}):
        [data] = served.client.post("/pooling", json={"input": "ab"} | fields).json()["data"]
        assert (data["index"], data["object"]) == (0, "pooling")
        assert data["data"] == pytest.approx(PROBS)


def test_pooling_has_the_vectors_of_an_embedder(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER)
    asked = {"input": ["a", "bb"], "task": "embed"}
    vectors = served.client.post("/v1/embeddings", json={"input": ["a", "bb"]}).json()["data"]
    body = served.client.post("/pooling", json=asked).json()
    assert body["id"].startswith("pool-")
    assert [each["data"] for each in body["data"]] == [each["embedding"] for each in vectors]
    written = served.client.post("/pooling", json=asked | {"encoding_format": "base64"}).json()["data"]
    read = [list(struct.unpack("<4f", base64.b64decode(each["data"]))) for each in written]
    assert read == [each["data"] for each in body["data"]]


@pytest.mark.parametrize(
    ("pooling", "path", "fields", "code"),
    [
        (None, "/classify", {}, "unsupported_task"),
        (None, "/pooling", {}, "unsupported_task"),
        (EMBEDDER, "/classify", {}, "unsupported_task"),
        (EMBEDDER, "/pooling", {"task": "classify"}, "unsupported_task"),
        (LABELED, "/classify", {}, "unsupported_task"),
        (CLASSIFIER, "/pooling", {"task": "embed"}, "unsupported_task"),
        (CLASSIFIER, "/pooling", {"task": "token_embed"}, "invalid_type"),
        (CLASSIFIER, "/pooling", {"dimensions": 2}, "invalid_value"),
        (CLASSIFIER, "/classify", {"use_activation": False}, "unsupported_field"),
        (CLASSIFIER, "/classify", {"input": ""}, "empty_prompt"),
    ],
)
def test_what_the_model_does_not_do_is_refused(serve: Serve, pooling, path, fields: dict[str, Any], code):
    served = serve(say_all("x"), pooling=pooling) if pooling else serve(say_all("x"))
    reply = served.client.post(path, json={"input": "a"} | fields)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code), reply.text
