"""All operators that ran on the mirrors of a session are compared with torch's table of CUDA kernels at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from . import device_tensor
from .test_operators import NARROW_DTYPES, reasons_against_narrow, without_cuda_kernel


@pytest.fixture(scope="session", autouse=True)
def operators_run_on_cuda() -> Iterator[None]:
    operators: set[str] = set()
    narrow: set[tuple[str, torch.dtype]] = set()
    dispatch = device_tensor.dispatch

    def watched(mirror: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for value in device_tensor.leaves(args, kwargs):
            dtype = value.dtype if isinstance(value, device_tensor.DeviceTensor) else value
            if dtype in NARROW_DTYPES:
                narrow.add((str(func), dtype))
        result = dispatch(mirror, func, args, kwargs)
        operators.update(mirror.operators)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_tensor, "dispatch", watched)
        yield
    if operators:
        assert without_cuda_kernel(operators) == {}
        assert reasons_against_narrow({each for each in narrow if each[0] in operators}) == []
