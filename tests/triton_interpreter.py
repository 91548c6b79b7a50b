"""Repairs of Triton's interpreter, without which kernels compute something else there than they do on a GPU.

- A loop to a bound that is no constant ends in an error: the bound is an array of one number, which NumPy 2.4 does not
  turn into an index any more.
- Numbers are cut off where GPUs round them (to bfloat16), or rounded wrongly (to 8-bit floats).
- Products of bfloat16 multiply the bits as if they were whole numbers.

And it is made faster: most of its time goes into preparing Triton's modules again for each function that a kernel
calls, and into the types of shapes, which are made anew for each value.
"""

from __future__ import annotations

import inspect
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
    _prepare_modules_once_a_launch(interpreter)
    _remember_types(interpreter)


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


def _prepare_modules_once_a_launch(interpreter: Any) -> None:
    """Not for each function that a kernel calls, and with the builtins that were found in them before."""
    prepared: set[int] = set()
    run = interpreter.InterpretedFunction.run

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        return run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.run = launch
    interpreter.InterpretedFunction.__call__ = call

    builtins: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:  # nothing in it is patched yet
            members = inspect.getmembers(package)
            builtins[package] = [each for each in members if interpreter.tl.core.is_builtin(each[1])]
        for name, member in builtins[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _remember_types(interpreter: Any) -> None:
    """The type of a tuple of plain numbers, and NumPy's type for one of Triton's."""
    core = interpreter.tl.core
    type_of_values, numpy_type = core._type_for_tuple_values, interpreter._get_np_dtype
    tuple_types: dict[tuple[int, ...], Any] = {}
    numpy_types: dict[str, Any] = {}

    def type_for_tuple_values(values: Any, fields: Any = None) -> Any:
        numbers = tuple(each.value if type(each) is core.constexpr else each for each in values)
        if fields is not None or any(type(number) is not int for number in numbers):
            return type_of_values(values, fields)
        if numbers not in tuple_types:
            tuple_types[numbers] = type_of_values(values)
        return tuple_types[numbers]

    def unwrap_shape(shape: Any) -> list[Any]:
        return [
            core._unwrap_if_constexpr(size)
            for size in (shape.value if type(shape) is core.constexpr else shape)
        ]

    def get_np_dtype(dtype: Any) -> Any:
        if type(dtype) is not core.dtype:
            return numpy_type(dtype)
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = numpy_type(dtype)
        return numpy_types[dtype.name]

    core._type_for_tuple_values = type_for_tuple_values
    core._unwrap_shape = unwrap_shape
    interpreter._get_np_dtype = get_np_dtype
