"""How arrays travel: their values, dtypes and shapes survive, and it takes one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model_runner.memory.io_buffers import InputBuffers, fill, layout, views

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
