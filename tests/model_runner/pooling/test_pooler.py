"""Vectors and label probabilities of decoders against transformers: in one chunk, in several, beside generations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch

from engine.models.spec.encoder_spec import PoolingSpec
from engine.runtime.config.model_choice import PoolingType
from engine.runtime.pooling import PoolingKind, PoolingParams

from ..conftest import Driver, TinyModel

PROMPTS = [
    [5, 9, 11, 3, 60, 61, 62, 63, 64],
    [7],
    [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12, 13, 14, 15, 16, 17, 18, 19],
]
LAST = PoolingParams(normalize=False)
MEAN = PoolingParams(all_tokens=True)

MakeModel = Callable[..., TinyModel]
MakeDriver = Callable[..., Driver]


def pooling_spec(tiny: TinyModel, pooling: PoolingType) -> TinyModel:
    """The model as an embedder."""
    spec = PoolingSpec(task="embed", pooling=pooling, size=tiny.spec.hidden_size)
    return dataclasses.replace(tiny, spec=msgspec.structs.replace(tiny.spec, pooling=spec))


@torch.inference_mode()
def hidden(tiny: TinyModel, tokens: Sequence[int]) -> np.ndarray:
    """Final hidden states by transformers: [len, hidden]."""
    states: torch.Tensor = tiny.reference.model(torch.tensor([tokens])).last_hidden_state[0].float()
    return states.numpy()


def expected(tiny: TinyModel, tokens: Sequence[int], pooling: PoolingType) -> np.ndarray:
    states = hidden(tiny, tokens)
    vector: np.ndarray = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling]
    return vector


def vector(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.float32)


@pytest.mark.parametrize(
    ("model_type", "pooling", "chunk"),
    [
        *(("llama", "last", 4), ("llama", "mean", 4), ("llama", "cls", 4)),
        *(("qwen3", "last", 100), ("gemma3_text", "mean", 100)),
    ],
)
def test_vectors_are_those_of_transformers(
    make_tiny_model: MakeModel, make_driver: MakeDriver, model_type: str, pooling: PoolingType, chunk: int
) -> None:
    tiny = pooling_spec(make_tiny_model(model_type, head_dim=16), pooling)
    driver = make_driver(tiny.spec, tiny.folder)
    params = LAST if pooling == "last" else MEAN
    reqs = [driver.start(prompt, pooling=params) for prompt in PROMPTS]
    found: dict[int, np.ndarray] = {}
    while len(found) < len(reqs):
        work = [(req, min(chunk, len(req.tokens) - req.computed)) for req in reqs]
        work = sorted([each for each in work if each[1]], key=lambda each: each[1] == 1)
        result = driver.step(work)
        assert not result.errors
        found |= {work[idx][0].row: vector(data) for idx, data in result.vectors.items()}

    for req, prompt in zip(reqs, PROMPTS, strict=True):
        np.testing.assert_allclose(found[req.row], expected(tiny, prompt, pooling), rtol=1e-4, atol=1e-5)


def test_beside_generations_that_decode(make_tiny_llama: MakeModel, make_driver: MakeDriver) -> None:
    tiny = pooling_spec(make_tiny_llama(), "mean")
    driver = make_driver(tiny.spec, tiny.folder)
    text = driver.start([1, 2, 3])
    driver.step([(text, 3)])
    reqs = [driver.start(prompt, pooling=MEAN) for prompt in PROMPTS]

    result = driver.step([*((req, len(req.tokens)) for req in reqs), (text, 1)])

    assert sorted(result.vectors) == [0, 1, 2]
    for idx, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(
            vector(result.vectors[idx]), expected(tiny, prompt, "mean"), rtol=1e-4, atol=1e-5
        )
    assert text.output == tiny.greedy([1, 2, 3], 2)


def test_a_cached_prefix_changes_no_last_token(make_tiny_llama: MakeModel, make_driver: MakeDriver) -> None:
    tiny = pooling_spec(make_tiny_llama(), "last")
    driver = make_driver(tiny.spec, tiny.folder)
    prompt = PROMPTS[2]
    donor = driver.start(prompt, pooling=LAST)
    whole = driver.step([(donor, len(prompt))]).vectors[0]

    shared = driver.step(
        [(driver.start(prompt, pooling=LAST, prefix=(donor, 16)), len(prompt) - 16)]
    ).vectors[0]

    np.testing.assert_allclose(vector(shared), vector(whole), rtol=1e-4, atol=1e-5)


def test_a_vector_is_cut_and_then_normalized(make_tiny_llama: MakeModel, make_driver: MakeDriver) -> None:
    tiny = pooling_spec(make_tiny_llama(), "last")
    driver = make_driver(tiny.spec, tiny.folder)
    plain, cut, unit = (
        vector(driver.step([(driver.start(PROMPTS[0], pooling=params), 9)]).vectors[0])
        for params in (LAST, PoolingParams(dimensions=8), PoolingParams(dimensions=8, normalize=True))
    )

    np.testing.assert_array_equal(cut, plain[:8])
    np.testing.assert_allclose(unit, plain[:8] / np.linalg.norm(plain[:8]), rtol=1e-6)


def test_labels_have_the_log_probabilities_of_the_next_token(
    make_tiny_llama: MakeModel, make_driver: MakeDriver
) -> None:
    tiny = make_tiny_llama()
    driver = make_driver(tiny.spec, tiny.folder)
    labels = [(5, 6), (7,), (8, 9)]
    reqs = [
        driver.start(prompt, pooling=PoolingParams(PoolingKind.LABELS, label_ids=ids))
        for prompt, ids in zip(PROMPTS, labels, strict=True)
    ]

    result = driver.step([(req, len(req.tokens)) for req in reqs])

    for idx, (prompt, ids) in enumerate(zip(PROMPTS, labels, strict=True)):
        logprobs = tiny.logprobs(prompt)[-1][list(ids)].numpy()
        np.testing.assert_allclose(vector(result.vectors[idx]), logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("params", [LAST, MEAN])
def test_a_vector_that_is_not_finite_fails_alone(
    make_tiny_llama: MakeModel, make_driver: MakeDriver, params: PoolingParams
) -> None:
    tiny = pooling_spec(make_tiny_llama(), "mean" if params.all_tokens else "last")
    driver = make_driver(tiny.spec, tiny.folder)
    reqs = [driver.start(tokens, pooling=params) for tokens in ([5, 6, 7], [8, 9, 10])]
    driver.step([(req, 2) for req in reqs])
    driver.runner.kv_pool.v[0][driver.slots(reqs[0].pages, 1, 2)] = torch.nan

    result = driver.step([(req, 1) for req in reqs])

    assert list(result.errors) == [0] and list(result.vectors) == [1]


def test_a_texts_bits_do_not_depend_on_its_batch_in_fixed_order(
    make_tiny_llama: MakeModel, make_driver: MakeDriver
) -> None:
    tiny = pooling_spec(make_tiny_llama(head_dim=16, hidden_size=96, intermediate_size=128), "mean")
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", deterministic=True)
    alone = []
    for prompt in PROMPTS:
        req = driver.start(prompt, pooling=MEAN)
        alone.append(driver.step([(req, len(prompt))]).vectors[0])

    reqs = [driver.start(prompt, pooling=MEAN) for prompt in PROMPTS]
    together = driver.step([(req, len(req.tokens)) for req in reqs]).vectors

    assert [together[idx] for idx in range(3)] == alone
