"""`POST /api/embed` and `POST /api/embeddings`."""

from __future__ import annotations

import ollama
import pytest

from ...conftest import Serve
from ...fake_engine import CAPACITY
from ..pooling.test_embeddings import ANSWER, EMBEDDER


def test_the_official_client(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER)
    with ollama.Client(served.url) as client:
        answer = client.embed(model="org/tiny", input=["hello", "you"])
        old = client.embeddings(model="org/tiny", prompt="hello")

    assert [vector[0] for vector in answer.embeddings] == [5.0, 3.0]
    assert answer.prompt_eval_count == 8
    assert list(old.embedding) == list(answer.embeddings[0])


def test_long_inputs_are_cut_unless_the_request_forbids_it(serve: Serve):
    served = serve(ANSWER, pooling=EMBEDDER)
    body = {"model": "org/tiny", "input": "x" * 300}

    cut = served.client.post("/api/embed", json=body)
    refused = served.client.post("/api/embed", json=body | {"truncate": False})

    assert cut.json()["embeddings"][0][0] == CAPACITY.max_model_len
    assert refused.status_code == 400 and "300 tokens" in refused.json()["error"]


@pytest.mark.parametrize(("fields", "dimensions"), [({}, 0), ({"dimensions": 2}, 2)])
def test_dimensions(serve: Serve, fields, dimensions):
    served = serve(ANSWER, pooling=EMBEDDER)

    served.client.post("/api/embed", json={"input": "x"} | fields)

    request = served.engine.next_request()
    assert request.pooling is not None and request.pooling.dimensions == dimensions


def test_a_model_that_generates_text_says_so(serve: Serve):
    response = serve(ANSWER).client.post("/api/embed", json={"input": "x"})

    assert response.status_code == 400 and "--task embed" in response.json()["error"]
