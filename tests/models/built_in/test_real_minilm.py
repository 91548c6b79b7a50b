"""The real MiniLM: its facts, and its tokens against sentence-transformers. Skipped unless it is in the cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.launch.resolve.model_resolution import read_model
from engine.models.hub.built_in.fetch import cached_model
from engine.models.hub.built_in.models import MINILM
from engine.models.source import resolve_source
from engine.models.tokenizer.tokenizer import load_tokenizer
from engine.runtime.config.engine_config import ModelConfig

pytestmark = pytest.mark.model

EDGES = [
    "",
    " ",
    "\n",
    "a",
    "。",
    "🙂",
    "👩\u200d👩\u200d👧",
    "e\u0301",
    "\x00",
    "\ufeff",
    "[SEP]",
    "x" * 300,
    "ＡＢＣ ①②",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    if (place := cached_model(MINILM)) is None:
        pytest.skip("minilm is not in the cache; `engine pull minilm` downloads it")
    return place


def texts(number: int) -> list[str]:
    """Texts of 1 to 600 words of many scripts, and the edges."""
    chosen = random.Random(5)
    words = [
        "the",
        "quick",
        "Brown",
        "fox's",
        "naïve",
        "façade",
        "größe",
        "東京",
        "中文字符",
        "한국어",
        "привет",
        "مرحبا",
        "🙂",
        "3.14",
        "(a-b)",
    ]
    lengths = [chosen.choice((1, 3, 20, 100)) for _ in range(number)] + [600]
    return EDGES + [" ".join(chosen.choices(words, k=length)) for length in lengths]


def test_what_a_start_reads(folder: Path) -> None:
    source = resolve_source("minilm", fetch=False)
    assert (source.kind, source.name, source.path) == ("hf", "all-MiniLM-L6-v2", str(folder))

    spec = read_model(ModelConfig(), source).spec

    pooling = spec.pooling
    assert pooling is not None
    assert (pooling.task, pooling.pooling, pooling.size, pooling.normalize) == ("embed", "mean", 384, True)
    assert spec.max_position_embeddings == 256


def test_tokens_are_those_of_sentence_transformers(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(folder), device="cpu").tokenizer
    tokenizer = load_tokenizer(resolve_source("minilm", fetch=False), encode_only=True)
    all_texts = texts(300)

    assert tokenizer.encode_batch(all_texts) == reference(all_texts, truncation=False)["input_ids"]

    pairs = list(zip(all_texts, reversed(all_texts), strict=True))
    expected = reference(pairs, truncation="longest_first", max_length=256)
    encoded = tokenizer.encode_pairs(pairs, 256)
    assert [pair.ids for pair in encoded] == expected["input_ids"]
    assert [pair.second_start for pair in encoded] == [types.index(1) for types in expected["token_type_ids"]]
