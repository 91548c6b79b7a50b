"""`Launches`: launches of Triton kernels on a mirror, checked as Triton does on a GPU, and queued for its interpreter.

Triton compiles a kernel for each combination of types, constants, options, and facts such as "divisible by 16". A
combination that is first seen while serving, or in a capture, is a fault.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from torch import Tensor
from torch.utils._pytree import tree_map

from .device_tensor import DeviceTensor, host_of

if TYPE_CHECKING:
    from .mirror import Mirror

MAX_GRID = (2**31 - 1, 65_535, 65_535)


class Variant(NamedTuple):
    """A kernel as it is compiled.

    Attributes:
        module, kernel: where the function is.
        arguments: (name, type in Triton's words, "D" if divisible by 16) of each; "constexpr" has no type.
        constants: (name, value) of the constants.
        options: (name, value), such as `num_warps`.
    """

    module: str
    kernel: str
    arguments: tuple[tuple[str, str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


class Launches:
    """All launches of one mirror.

    Attributes:
        variants: what was compiled; True: while serving.
        computes: False: launches are checked and queued, and compute nothing; the interpreter is most of the time.
    """

    def __init__(self, mirror: Mirror) -> None:
        self.variants: dict[Variant, bool] = {}
        self.computes = True
        self._mirror = mirror

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take over all launches with tensors of the mirror, until the patch is undone."""
        from tests.triton_interpreter import repair_interpreter

        repair_interpreter()
        from triton.runtime.interpreter import InterpretedFunction

        interpret = InterpretedFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if not any(isinstance(each, DeviceTensor) for each in (*args, *kwargs.values())):
                return interpret(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            self._check(kernel, given)
            sizes = tuple(grid(given) if callable(grid) else grid)
            self._check_grid(kernel.__name__, sizes)
            host_args, host_kwargs = tree_map(host_of, args), tree_map(host_of, kwargs)

            def compute() -> None:
                if self.computes:
                    interpret(kernel, *host_args, grid=sizes, warmup=warmup, **host_kwargs)

            self._mirror.streams.current.put(compute)
            return None

        patch.setattr(InterpretedFunction, "run", run)

    def _check(self, kernel: Any, given: dict[str, Any]) -> None:
        name = kernel.__name__
        for argument, value in given.items():
            if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
                self._mirror.faults.add("host tensor", f"{name}: {argument}, {tuple(value.shape)}")
                raise ValueError(f"Pointer argument {argument} cannot be accessed from Triton (cpu tensor?)")
        variant = variant_of(kernel, given)
        if variant in self.variants:
            return
        faults = self._mirror.faults
        self.variants[variant] = faults.serving
        if self._mirror.streams.capturing is not None:
            faults.add("compiled in a capture", name)
        if faults.serving:
            faults.add("compiled while serving", f"{name} {variant.arguments} {variant.constants}")

    def _check_grid(self, name: str, sizes: tuple[int, ...]) -> None:
        sizes_fit = all(0 < size <= most for size, most in zip(sizes, MAX_GRID, strict=False))
        if not sizes_fit or math.prod(sizes) == 0:
            self._mirror.faults.add("grid", f"{name} {sizes}")


def variant_of(kernel: Any, given: dict[str, Any]) -> Variant:
    """The variant that Triton would compile for CUDA; `given`: arguments and options of the launch."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    unspecialized = kernel.kwargs.get("do_not_specialize") or ()
    annotations = {name: str(kind) for name, kind in kernel.fn.__annotations__.items()}
    arguments, constants = [], []
    for name in kernel.arg_names:
        if name not in given:
            continue
        value = given[name]
        if "constexpr" in annotations.get(name, "") or value is None:
            arguments.append((name, "constexpr", ""))
            constants.append((name, value))
            continue
        if isinstance(value, DeviceTensor):
            value = SimpleNamespace(dtype=value.dtype, data_ptr=value.data_ptr)
        kind, key = native_specialize_impl(CUDABackend, value, False, name not in unspecialized, True)
        arguments.append((name, kind, "" if key is None else str(key)))
        if kind == "constexpr":  # 1 is compiled in
            constants.append((name, value))
    options = tuple(sorted((name, value) for name, value in given.items() if name not in kernel.arg_names))
    return Variant(kernel.fn.__module__, kernel.fn.__qualname__, tuple(arguments), tuple(constants), options)
