"""The real MiniLM: vectors beside those of sentence-transformers. Skipped unless the model is in the cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM
from engine.models.hub.built_in.fetch import cached_model
from engine.models.hub.built_in.models import MINILM

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NUM_TEXTS = 200
MAX_LEN = 256
WORDS = (  # noqa: SIM905
    "the of a request token page cache bread water train moon river music doctor garden window market stock price war "
    "law theorem matrix kernel compiler naïve façade größe 東京 привет 3.14 (a-b) don't http://x.y and or not in on"
).split()
LEAST_COSINE = {"float32": 0.99999, "bfloat16": 0.9995}


@pytest.fixture(scope="module")
def folder() -> Path:
    if (place := cached_model(MINILM)) is None:
        pytest.skip("minilm is not in the cache; `engine pull minilm` downloads it")
    return place


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def texts(reference: Any) -> list[str]:
    """Random words, of every length up to the model's."""
    chosen = random.Random(0)
    lengths = [3 + n * (MAX_LEN - 3) // (NUM_TEXTS - 1) for n in range(NUM_TEXTS)]
    found = []
    for length in lengths:
        words = ["a"]
        while len(reference.tokenizer(" ".join(words))["input_ids"]) < length:
            words.append(chosen.choice(WORDS))
        if len(reference.tokenizer(" ".join(words))["input_ids"]) > MAX_LEN:
            words.pop()
        found.append(" ".join(words))
    return found


@pytest.fixture(scope="module")
def expected(reference: Any, texts: list[str]) -> Any:
    return reference.encode(texts, batch_size=16)


@pytest.fixture(scope="module", params=list(LEAST_COSINE))
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("minilm", dtype=request.param, show_progress=False) as llm:
        yield llm


def test_vectors_are_those_of_sentence_transformers(llm, texts, expected):
    lengths = [len(llm.tokenizer.encode(text)) for text in texts]
    assert min(lengths) == 3 and MAX_LEN - 8 <= max(lengths) <= MAX_LEN

    vectors = llm.embed(texts)

    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    cosines = np.sum(vectors.astype(np.float64) * expected, axis=1)
    assert cosines.min() >= LEAST_COSINE[llm.config.model.dtype]


def test_the_meaning_of_words(llm):
    cat, kitten, stocks = llm.embed(["a cat", "a kitten", "the stock market"])
    assert cat @ kitten > 0.7 > 0.3 > cat @ stocks
    assert [document.index for document in llm.rerank("feline", ["the stock market", "a kitten"])] == [1, 0]


def test_a_text_that_is_too_long_is_cut_as_sentence_transformers_does(llm, reference):
    text = "word " * 1000
    cosine = float(llm.embed(text, truncate=True) @ reference.encode(text))
    assert cosine >= LEAST_COSINE[llm.config.model.dtype]
