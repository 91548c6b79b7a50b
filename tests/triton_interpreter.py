"""Repairs of Triton's interpreter, without which kernels compute something else there than they do on a GPU.

- A loop to a bound that is no constant ends in an error: the bound is an array of one number, which NumPy 2.4 does not
  turn into an index any more.
- Numbers are cut off where GPUs round them (to bfloat16), or rounded wrongly (to 8-bit floats).
- Products of bfloat16 multiply the bits as if they were whole numbers.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
import pytest
import torch
import triton

_TORCH_DTYPES: Final = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


VERSION: Final = "3.6"
"""Of Triton: that of torch 2.11, with which the GPU commands run. What is repaired here is private to it."""

_repaired = False


def repair_interpreter() -> None:
    """Called by a test module before its kernels run; does nothing where they are compiled.

    With another version of Triton the module is skipped: its interpreter is another one.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    if not triton.__version__.startswith(f"{VERSION}."):
        reason = f"kernels are interpreted by Triton {VERSION}, this is {triton.__version__}"
        pytest.skip(reason, allow_module_level=True)
    from triton.runtime import interpreter

    global _repaired
    if _repaired:
        return
    _repaired = True
    _repair_loop_bounds(interpreter)
    _repair_conversions(interpreter)
    _repair_products(interpreter)


def _repair_loop_bounds(interpreter: Any) -> None:
    patch = interpreter._patch_lang_tensor

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = repaired


def _repair_conversions(interpreter: Any) -> None:
    original = interpreter._convert_float

    def converted(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        known = source.name in _TORCH_DTYPES and target.name in _TORCH_DTYPES
        if not known or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            return original(numbers, source, target, rounding)
        found = torch.frombuffer(bytearray(numbers.tobytes()), dtype=_TORCH_DTYPES[source.name])
        as_bytes = found.to(_TORCH_DTYPES[target.name]).view(torch.uint8).numpy()
        return as_bytes.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(numbers.shape)

    interpreter._convert_float = converted


def _repair_products(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    original = builder.create_dot

    def as_float32(value: Any) -> Any:
        import triton.language as tl

        if value.dtype.scalar != tl.bfloat16:
            return value
        bits = interpreter._convert_float(value.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return original(self, as_float32(a), as_float32(b), d, *options)

    builder.create_dot = create_dot
