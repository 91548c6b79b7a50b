"""Texts for requests of vectors."""

import pytest

from engine import ConfigError
from engine.cli.bench.workloads.datasets import LengthRange
from engine.cli.bench.workloads.texts import _WORDS, text_requests
from engine.cli.bench.workloads.workload import DatasetName, WorkloadSettings


def test_lengths_and_batches_follow_from_the_seed():
    requests = text_requests(20, 4, LengthRange(16, 256), seed=1)
    assert [len(request.texts) for request in requests] == [4] * 20
    lengths = [len(text.split()) + 2 for request in requests for text in request.texts]
    assert 16 <= min(lengths) < 40 and 230 < max(lengths) <= 256
    assert sum(lengths) == sum(request.prompt_len for request in requests)
    assert requests == text_requests(20, 4, LengthRange(16, 256), seed=1)
    assert requests != text_requests(20, 4, LengthRange(16, 256), seed=2)


def test_words_differ():
    assert len(set(_WORDS)) == len(_WORDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embed_batch": 0}, "--embed-batch is 0"),
        ({"embed_len": "2:9"}, "--embed-len begins with 2"),
        ({"embed_len": "x"}, "--embed-len is 'x'"),
        ({"dataset_path": "x"}, "--dataset-path has no effect on --dataset-name embed"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        WorkloadSettings(dataset_name=DatasetName.EMBED, **settings).check()


def test_the_workload_needs_no_tokenizer():
    settings = WorkloadSettings(dataset_name=DatasetName.EMBED, num_prompts=3, embed_batch=2, embed_len="8")
    settings.check()
    requests = settings.requests(None)
    assert [request.prompt_len for request in requests] == [16] * 3
    assert settings.warmup(None)[0].texts != requests[0].texts
