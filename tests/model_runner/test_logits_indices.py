"""Behind the last layer's attention only those tokens are computed whose hidden states somebody looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.runtime.sampling_params import SamplingParams

from .conftest import Driver, SeeingExecutor, TinyModel

ASKS = SamplingParams(temperature=0.0, seed=0, max_new_tokens=64, prompt_logprobs=1)


class Seen:
    """In the place of an executor's `forward`: keeps each step's batches, and what the model gave."""

    def __init__(self, driver: Driver) -> None:
        self.model = driver.runner.model
        self.batches: list[Any] = []
        self.hidden: list[Tensor] = []
        driver.run_eagerly()
        driver.runner.executor.forward = self
        self.inputs = SeeingExecutor(driver).batches

    def __call__(self, batch: Any) -> Tensor:
        hidden: Tensor = self.model.forward(batch)
        self.batches.append(batch)
        self.hidden.append(hidden.clone())
        return hidden

    def wanted(self) -> list[list[int] | None]:
        return [
            None if batch.logits_indices is None else batch.logits_indices.tolist() for batch in self.batches
        ]


@pytest.fixture
def seen(driver: Driver) -> Seen:
    return Seen(driver)


def numbers(tensor: Any) -> list[int] | None:
    return None if tensor is None else tensor.tolist()


def test_the_last_token_of_each_request_is_wanted(driver, seen):
    first, second, third = (driver.start(range(3, 3 + length)) for length in (5, 20, 4))
    driver.step([(first, 5), (third, 4)])
    driver.step([(second, 8), (first, 1), (third, 1)])  # the prompt of one goes on
    driver.step([(second, 7), (first, 1)])
    driver.step([(second, 5)])
    assert seen.wanted() == [[4, 8], [7, 8, 9], [6, 7], [4]]
    assert [numbers(batch.sample_indices) for batch in seen.inputs] == [None, [1, 2], [1], None]
    assert [batch.cut_indices.tolist() for batch in seen.inputs] == [[], [0], [0], []]
    assert [len(hidden) for hidden in seen.hidden] == [2, 3, 2, 1]


def test_a_step_in_which_nobody_samples_wants_some_too(driver, seen):
    """Their numbers say whether what they left in the KV pool is finite."""
    reqs = [driver.start(range(3, 30)) for _ in range(2)]
    driver.step([(reqs[0], 6), (reqs[1], 3)])
    assert seen.wanted() == [[5, 8]]
    assert numbers(seen.inputs[0].cut_indices) == [0, 1]


def test_decodes_want_all_and_take_nothing(driver, seen):
    reqs = [driver.start(range(3, 8)) for _ in range(3)]
    driver.step([(req, 5) for req in reqs])
    takes: list[int] = []
    take_rows = seen.model.take_rows

    def counting(table: Tensor, indices: Tensor) -> Tensor:
        takes.append(len(indices))
        taken: Tensor = take_rows(table, indices)
        return taken

    seen.model.take_rows = counting
    driver.step([(req, 1) for req in reqs])
    assert seen.wanted()[-1] is None and not takes
    driver.step([(driver.start(range(3, 8)), 5), *((req, 1) for req in reqs)])
    assert takes == [4, 4], "attention's result and the residual stream"


def test_tokens_that_predict_a_prompt_are_wanted(driver, seen):
    asking, other = driver.start(range(3, 23), ASKS), driver.start(range(3, 12))
    driver.step([(other, 9), (asking, 6)])  # six tokens predict six
    driver.step([(asking, 4), (other, 1)])
    driver.step([(asking, 10), (driver.start(range(3, 9)), 6)])  # nine predict nine, the last one samples
    assert seen.wanted() == [[8, *range(9, 15)], None, [*range(10), 15]]
    spans = [batch.prompt_spans for batch in seen.inputs]
    assert [[(span.start, len(span.targets)) for span in each] for each in spans] == [
        [(1, 6)],
        [(0, 4)],
        [(0, 9)],
    ]
    assert numbers(seen.inputs[2].sample_indices) == [9, 10]


@pytest.mark.parametrize(
    ("model_type", "shape"),
    [
        ("llama", {}),
        ("gemma3_text", {"head_dim": 16}),
        ("phi3", {"num_attention_heads": 3, "num_key_value_heads": 1}),
        (
            "qwen3_moe",
            {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_last_block_sees_nothing_else(
    make_tiny_model: Callable[..., TinyModel], make_driver: Callable[..., Driver], model_type: str, shape: Any
):
    tiny = make_tiny_model(model_type, **shape)
    driver = make_driver(tiny.spec, tiny.folder)
    seen = Seen(driver)
    layers = seen.model.layers
    rows: list[list[int]] = [[], []]

    def counting(mlp: Any, numbers_of_rows: list[int], x: Tensor, *adapters: Any) -> Any:
        numbers_of_rows.append(len(x))
        return mlp(x, *adapters)

    for layer, numbers_of_rows in zip((layers[0], layers[-1]), rows, strict=True):
        layer.mlp = partial(counting, layer.mlp, numbers_of_rows)
    decoding, chunked = driver.start(range(3, 14)), driver.start(range(5, 45))
    driver.step([(decoding, 11)])
    driver.step([(driver.start(range(7, 20)), 13), (chunked, 22), (decoding, 1)])
    assert rows == [[11, 36], [1, 3]]

    batch, hidden = seen.batches[-1], seen.hidden[-1]
    with torch.inference_mode():  # once more: keys and values are written as they were
        of_all = seen.model.forward(replace(batch, logits_indices=None))
    assert len(of_all) == 36
    torch.testing.assert_close(of_all[batch.logits_indices], hidden, rtol=1e-4, atol=1e-4)
