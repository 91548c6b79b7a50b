"""Whether CUDA can run an operator: by the table that comes with torch, and by a list for dtypes of few kernels."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

import torch

NARROW_DTYPES: Final = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64}
)
_NARROW: Final = {
    "aten.view.dtype": "a view",
    "aten.view.default": "a view",
    "aten.select.int": "a view",
    "aten.slice.Tensor": "a view",
    "aten.t.default": "a view",
    "aten.detach.default": "a view",
    "aten.alias.default": "a view",
    "aten.empty.memory_format": "computes nothing",
    "aten.empty_like.default": "computes nothing",
    "aten.new_empty.default": "computes nothing",
    "aten.zeros.default": "fill_cuda is dispatched over float8 and unsigned dtypes",
    "aten.zero_.default": "as zeros",
    "aten.fill_.Scalar": "as zeros",
    "aten.copy_.default": "copies bytes between equal dtypes, and converts float8",
    "aten._to_copy.default": "as copy_",
    "aten._scaled_mm.default": "made for float8",
}
"""Operators that CUDA runs in `NARROW_DTYPES`, and why; torch's table does not say, its sources (`AT_DISPATCH`) do."""
_SPACES: Final = ("aten.",)  # others, such as sgl_kernel, are CUDA kernels themselves


def without_cuda_kernel(operators: set[str]) -> dict[str, str]:
    """The members of `operators` ("aten.mm.default") that CUDA cannot run, and why."""
    generator: Any = importlib.import_module("torchgen.gen")
    folder = Path(generator.__file__).parent / "packaged/ATen/native"
    table = generator.parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    on_cuda = table.backend_indices[generator.DispatchKey.CUDA]
    known = {str(function.func.name): function for function in table.native_functions}
    reasons = {}
    for operator in operators:
        if not operator.startswith(_SPACES):
            continue
        function = known.get(operator.removeprefix("aten.").removesuffix(".default"))
        if function is None:
            reasons[operator] = "not in torch's table"
        elif function.structured_delegate is not None:
            if not on_cuda.has_kernel(known[str(function.structured_delegate)]):
                reasons[operator] = "its structured kernel is not for CUDA"
        elif not (on_cuda.has_kernel(function) or function.has_composite_kernel):
            reasons[operator] = "no kernel"
    return reasons


def reasons_against_narrow(used: set[tuple[str, torch.dtype]]) -> list[str]:
    """Uses of `NARROW_DTYPES` by operators that are not known to have them on CUDA."""
    return sorted(f"{operator} in {dtype}" for operator, dtype in used if operator not in _NARROW)


def test_an_operator_without_a_kernel_for_cuda_is_named():
    operators = {
        "aten.mm.default",
        "aten.add_.Tensor",
        "aten.cat.default",
        "aten.stack.default",
        "aten.view.dtype",
    }
    assert without_cuda_kernel(operators | {"sgl_kernel.rmsnorm.default"}) == {}
    assert without_cuda_kernel(operators | {"aten.mkldnn_linear.default", "aten.no_such.default"}) == {
        "aten.mkldnn_linear.default": "no kernel",
        "aten.no_such.default": "not in torch's table",
    }


def test_operators_in_float8_are_those_of_the_list():
    dtype = torch.float8_e4m3fn
    assert reasons_against_narrow({("aten.view.dtype", dtype), ("aten._to_copy.default", dtype)}) == []
    assert reasons_against_narrow({("aten.index_copy_.default", dtype)}) == [
        "aten.index_copy_.default in torch.float8_e4m3fn"
    ]
