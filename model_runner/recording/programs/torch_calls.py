"""`TorchCalls`: operations of torch as calls of our CPU library, so that steps with them can be recorded.

The engine's own layers call `ops`; transformers' code also adds residual streams, scales and converts with torch. Only
operations on whole contiguous tensors of one dtype have a counterpart; all others remain reasons against a recording.
The library computes in float32 and rounds once, as torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...kernels.native import ACTIVATIONS

if TYPE_CHECKING:
    import ctypes

_MAX_ROWS: Final = 1 << 14
"""Rows of the largest copy."""
_DTYPES: Final = (torch.bfloat16, torch.float32)
_aten: Final = torch.ops.aten


class TorchCalls:
    """Computes operations with the library."""

    def __init__(self, library: ctypes.CDLL, like: Callable[[Tensor], Tensor]) -> None:
        """`like`: the allocator of results, see `native_program.Memory`."""
        self._library = library
        self._like = like
        self._methods: dict[Any, Callable[..., Tensor | None]] = {
            _aten.add.Tensor: self._add,
            _aten.mul.Tensor: self._multiply,
            _aten.mul.Scalar: self._multiply,
            _aten.div.Tensor: self._divide,
            _aten.index_select.default: self._index_select,
            _aten.cat.default: self._join,
            _aten._to_copy.default: self._convert,
            _aten.to.dtype: self._convert,
            _aten.silu.default: functools.partial(self._activate, "silu"),
            _aten.relu.default: functools.partial(self._activate, "relu"),
            _aten.gelu.default: self._gelu,
        }

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation; None: the library has no counterpart."""
        method = self._methods.get(func)
        return None if method is None else method(*args, **kwargs)

    def _add(self, x: Any, y: Any, *, alpha: float = 1) -> Tensor | None:
        if not _are_alike(x, y) or alpha != 1:
            return None
        out = self._copy(y)
        if out is not None:
            self._library.add(x.data_ptr(), out.data_ptr(), out.numel(), out.dtype == torch.bfloat16)
        return out

    def _multiply(self, x: Any, y: Any) -> Tensor | None:
        if isinstance(x, Tensor) and isinstance(y, (int, float)):
            return self._copy(x, float(y))
        return None

    def _divide(self, x: Any, y: Any) -> Tensor | None:
        # A multiplication rounds like the division only for powers of two.
        if isinstance(x, Tensor) and isinstance(y, (int, float)) and y and _is_power_of_two(float(y)):
            return self._copy(x, 1.0 / float(y))
        return None

    def _index_select(self, x: Tensor, dim: int, indices: Tensor) -> Tensor | None:
        if dim != 0 or x.ndim != 2 or not _is_plain(x) or not indices.is_contiguous():
            return None
        if indices.dtype != torch.int64:
            return None
        out = self._like(torch.empty((len(indices), x.shape[1]), dtype=x.dtype))
        self._take_rows(x, indices, out, 1.0)
        return out

    def _join(self, tensors: list[Tensor], dim: int = 0) -> Tensor | None:
        """Matrices of one shape side by side: their rows one after the other, taken in another order."""
        first = tensors[0]
        rows, num = first.shape[0], len(tensors)
        if first.ndim != 2 or dim not in (1, -1) or rows * num > _MAX_ROWS:
            return None
        if not all(_are_alike(first, each) for each in tensors):
            return None
        stacked = self._like(torch.empty((num * rows, first.shape[1]), dtype=first.dtype))
        for number, each in enumerate(tensors):
            self._take_rows(each, _row_numbers()[:rows], stacked[number * rows : (number + 1) * rows], 1.0)
        out = self._like(torch.empty((rows, num * first.shape[1]), dtype=first.dtype))
        self._take_rows(stacked, _rows_side_by_side(rows, num), out, 1.0)
        return out

    def _convert(self, x: Tensor, dtype: torch.dtype | None = None, *_: Any, **options: Any) -> Tensor | None:
        if x.dtype != torch.bfloat16 or dtype != torch.float32 or not _is_plain(x):
            return None
        out = self._like(torch.empty(x.shape, dtype=torch.float32))
        self._library.widen(x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def _activate(self, kind: Any, x: Tensor) -> Tensor | None:
        out = self._copy(x)
        if out is not None:
            is_bf16 = x.dtype == torch.bfloat16
            self._library.activate(out.data_ptr(), out.numel(), ACTIVATIONS.index(kind), is_bf16)
        return out

    def _gelu(self, x: Tensor, *, approximate: str = "none") -> Tensor | None:
        return self._activate("gelu" if approximate == "none" else "gelu_tanh", x)

    def _copy(self, x: Tensor, factor: float = 1.0) -> Tensor | None:
        """A copy of a whole tensor, times a factor."""
        if not _is_plain(x) or x.ndim < 2 or x.numel() // x.shape[-1] > _MAX_ROWS:
            return None
        out = self._like(torch.empty(x.shape, dtype=x.dtype))
        self._take_rows(x, _row_numbers()[: x.numel() // x.shape[-1]], out, factor)
        return out

    def _take_rows(self, x: Tensor, indices: Tensor, out: Tensor, factor: float) -> None:
        self._library.take_rows(
            x.data_ptr(),
            indices.data_ptr(),
            out.data_ptr(),
            len(indices),
            x.shape[-1],
            factor,
            x.dtype == torch.bfloat16,
        )


@functools.cache
def _row_numbers() -> Tensor:
    """0, 1, 2, ... at an address that stays valid."""
    return torch.arange(_MAX_ROWS, dtype=torch.int64)


@functools.cache
def _rows_side_by_side(rows: int, num: int) -> Tensor:
    """0, rows, 2 * rows, ..., 1, rows + 1, ... at an address that stays valid."""
    return torch.arange(rows * num, dtype=torch.int64).view(num, rows).T.flatten()


def _is_plain(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dtype in _DTYPES
        and x.device.type == "cpu"
        and not x.is_mkldnn
        and x.is_contiguous()
        and x.numel() > 0
    )


def _are_alike(x: Any, y: Any) -> bool:
    return _is_plain(x) and _is_plain(y) and x.dtype == y.dtype and x.shape == y.shape


def _is_power_of_two(value: float) -> bool:
    return value > 0 and float(value).hex().split("p")[0] in ("0x1.0000000000000", "0x1")
