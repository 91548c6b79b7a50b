"""Small sums through memory that GPUs share: which sums, what when it cannot be had. Two GPUs were never at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory  # registers the operations
from torch import Tensor

from engine.model_runner.distributed import one_shot_group
from engine.model_runner.distributed.one_shot_group import OneShotGroup, with_one_shot_sums
from engine.model_runner.distributed.tp_group import SINGLE_RANK
from engine.runtime.sampling_params import SamplingParams

from .test_tensor_parallel import generate
from .thread_group import ThreadGroup, on_ranks

CPU = torch.device("cpu")


class Counted:
    """A one-shot sum that the group itself computes."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group
        self.shapes: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.bfloat16 and x.dim() == 1 and x.is_contiguous() and x.data_ptr() % 16 == 0
        self.shapes.append(x.numel())
        return self._group.all_reduce(x.clone())


def test_the_operation_is_called_as_torch_declares_it():
    schema = str(torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema)
    declared = "(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name) -> Tensor"
    assert schema == f"symm_mem::one_shot_all_reduce_copy{declared}"


@pytest.mark.parametrize(
    ("x", "is_one_shot"),
    [
        (torch.ones(4, 32, dtype=torch.bfloat16), True),
        (torch.ones(8, 32, dtype=torch.bfloat16)[::2], True),  # not contiguous
        (torch.ones(512, dtype=torch.bfloat16), True),
        (torch.ones(520, dtype=torch.bfloat16), False),  # too large
        (torch.ones(3, 5, dtype=torch.bfloat16), False),  # no whole vectors
        (torch.ones(0, 8, dtype=torch.bfloat16), False),
        (torch.ones(4, 32), False),  # float32
    ],
)
def test_small_sums_of_bfloat16_are_one_shot(x, is_one_shot):
    def run(group: ThreadGroup) -> tuple[Any, list[int]]:
        counted = Counted(group)
        sum_ = OneShotGroup(group, counted, 1024).all_reduce(x * (group.rank + 1))
        assert sum_.dtype == x.dtype
        return sum_.tolist(), counted.shapes

    expected = (x * 3).tolist()
    assert on_ranks(2, run) == [(expected, [x.numel()] if is_one_shot else [])] * 2


def test_a_sum_of_numbers_that_are_not_aligned_is_one_of_a_copy():
    def run(group: ThreadGroup) -> tuple[list[float], int]:
        counted = Counted(group)
        x = torch.full((129,), float(group.rank + 1), dtype=torch.bfloat16)[1:]
        return OneShotGroup(group, counted, 1024).all_reduce(x).tolist(), len(counted.shapes)

    assert on_ranks(2, run) == [([3.0] * 128, 1)] * 2


def test_a_model_says_the_same_and_its_steps_use_it(make_tiny_model):
    tiny = make_tiny_model("llama")
    params = SamplingParams(temperature=0.0, max_new_tokens=8)

    def run(group: ThreadGroup, max_bytes: int) -> tuple[Any, int]:
        counted = Counted(group)
        own = OneShotGroup(group, counted, max_bytes)
        return generate(tiny, params, own, dtype="bfloat16")[0], len(counted.shapes)

    (without, none), _ = on_ranks(2, lambda group: run(group, 0))
    (tokens, some), _ = on_ranks(2, lambda group: run(group, 1 << 20))
    assert tokens == without
    assert none == 0 < some


def made(monkeypatch: pytest.MonkeyPatch, sum_of: Callable[[ThreadGroup], Any]) -> list[bool]:
    """For each of two ranks, whether the group has one-shot sums; `sum_of` a rank or its error."""

    def run(group: ThreadGroup) -> bool:
        return isinstance(with_one_shot_sums(group, group, 512 << 10, CPU), OneShotGroup)

    def make(group: ThreadGroup, max_bytes: int, device: torch.device) -> Any:
        assert max_bytes == 512 << 10
        return sum_of(group)

    monkeypatch.setattr(one_shot_group, "SymmetricSum", make)
    return on_ranks(2, run)


def test_all_ranks_use_it_or_none(monkeypatch, caplog):
    def on_the_first(group: ThreadGroup) -> Any:
        if group.rank == 1:
            raise RuntimeError("CUDA driver error: peer access is not supported\nmore")
        return pytest.fail  # a sum would wait for the other rank for ever

    assert made(monkeypatch, Counted) == [True, True]
    assert made(monkeypatch, on_the_first) == [False, False]
    assert "one_shot_all_reduce_kib is 512: CUDA driver error: peer access is not supported" in caplog.text
    assert "another rank cannot read the memory of this one" in caplog.text


def test_a_wrong_sum_is_found_at_the_start(monkeypatch, caplog):
    assert made(monkeypatch, lambda group: lambda x: x) == [False, False]
    assert "a sum of 3 was 1" in caplog.text
    assert made(monkeypatch, lambda group: lambda x: x * (3 if group.rank == 0 else 1)) == [False, False]


def test_nothing_is_tried_where_there_is_nothing_to_add():
    assert with_one_shot_sums(SINGLE_RANK, None, 512 << 10, CPU) is SINGLE_RANK
