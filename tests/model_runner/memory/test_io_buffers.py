"""How arrays travel: their values, dtypes and shapes survive, and it takes one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model_runner.memory.io_buffers import InputBuffers, OutputBuffers, fill, layout, views
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.model_runner.sampling.triton_backend import TritonSamplerBackend

ARRAYS: list[Any] = [
    np.arange(5, dtype=np.int64),
    np.arange(3, dtype=np.int32),
    np.empty(0, dtype=np.int64),
    np.array([[0.5], [-np.inf]], dtype=np.float32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    np.array([True, False, True]),
    np.array([7], dtype=np.uint64),
]


def check(tensors: list[torch.Tensor]) -> None:
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


def test_arrays_behind_each_other_are_what_they_were():
    starts, num_bytes = layout(ARRAYS)
    staging = torch.empty(num_bytes, dtype=torch.uint8)
    fill(staging.numpy(), ARRAYS, starts)

    check(views(staging, ARRAYS, starts))
    assert all(start % 16 == 0 for start in starts)


def test_on_the_cpu_nothing_is_copied():
    tensors = InputBuffers(torch.device("cpu")).put_all(ARRAYS)

    check(tensors)
    assert all(
        tensor.data_ptr() == array.ctypes.data
        for tensor, array in zip(tensors, ARRAYS, strict=True)
        if array.size
    )


def test_one_copy_takes_all():
    class Copies(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += func is torch.ops.aten._to_copy.default
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        tensors = InputBuffers(torch.device("meta")).put_all(ARRAYS)

    assert copies.num == 1
    assert [(tensor.shape, tensor.dtype) for tensor in tensors] == [
        (array.shape, torch.from_numpy(array).dtype) for array in ARRAYS
    ]


@pytest.mark.gpu
def test_on_a_gpu_the_values_arrive():
    buffers = InputBuffers(torch.device("cuda"))
    check(buffers.put_all(ARRAYS))
    check([buffers.put(np.ascontiguousarray(array)) for array in ARRAYS])


class Copies(OutputBuffers):
    """As on a GPU, where the results are in other memory; counts the copies."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._is_host = False
        self.num_bytes: list[int] = []

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes.append(tensor.nbytes)
        return tensor.clone()


@pytest.mark.parametrize("num", [1, 2, 7, 256])
def test_tokens_and_flags_of_a_gpu_come_with_one_copy(num):
    """It took two allocations of page-locked memory and two copies per step."""
    outputs = Copies()
    backend = TritonSamplerBackend(TokenCounts(9, InputBuffers(torch.device("cpu"))))
    token_ids, finite = backend.results(num)
    assert token_ids.data_ptr() % 16 == finite.data_ptr() % 16 == 0
    token_ids.copy_(torch.arange(num) - 1)
    finite.copy_(torch.arange(num) % 3 > 0)
    on_host = outputs.fetch_pair(token_ids, finite)

    assert torch.equal(on_host[0], token_ids) and torch.equal(on_host[1], finite)
    assert len(outputs.num_bytes) == 1 and outputs.num_bytes[0] < 9 * num + 16
    assert on_host[0].data_ptr() != token_ids.data_ptr()


def test_results_that_lie_apart_come_one_after_the_other():
    outputs = Copies()
    token_ids, finite = torch.arange(3), torch.tensor([True, False, True])
    assert [each.tolist() for each in outputs.fetch_pair(token_ids, finite)] == [
        [0, 1, 2],
        [True, False, True],
    ]
    assert outputs.num_bytes == [24, 3]
    both = OutputBuffers(torch.device("cpu")).fetch_pair(token_ids, finite)
    assert both[0] is token_ids and both[1] is finite
