"""`NativeMatmul`: the common part of the matmuls with packed weights (`native_linear`, `native_blocks`).

Arguments are checked here, once, so that no kernel accesses memory out of bounds. Packing and the choice of the kernel
belong to the subclass.
"""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import ClassVar, Final

import torch
from torch import Tensor

_BF16: Final = 0
_FLOAT: Final = 1
_GATED: Final = 2
"""Output form of a matmul; `Form` of `kernels/cpu/output.h`."""
_LANES: Final = 16
"""Number of gate rows that are stored before their up rows in the weight of a gated matmul."""


class NativeMatmul(ABC):
    """A weight [N, K] in the packed layout of one kernel, its only copy in memory; a `LinearWeight`."""

    PACKED: ClassVar = 0
    COMPRESSED: ClassVar = 1
    BLOCKS: ClassVar = 2
    SUPERBLOCKS: ClassVar = 3
    kind: int
    """Packed layout; `Kind` of `kernels/cpu/experts.cpp`."""

    def __init__(self, library: ctypes.CDLL, outputs: int, inputs: int, packed: Tensor) -> None:
        """`packed`: the weight in the layout of the subclass's kernels, as bytes; kept."""
        self._library = library
        self._keep(packed)
        self._outputs, self._inputs = outputs, inputs
        self._form = _BF16
        self._width = outputs

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._checked(x, bias, torch.bfloat16)

    def fuse_silu_and_mul(self) -> bool:
        """Needs N in whole vectors of gates; otherwise the weight stays unchanged."""
        if self._form != _BF16:
            raise RuntimeError("the weight already fuses its activation; two layers must not share it")
        if self._outputs % (2 * _LANES):
            return False
        self._pair()
        self._form, self._width = _GATED, self._outputs // 2
        return True

    def ungated(self, x: Tensor) -> Tensor:
        assert self.fuses_silu_and_mul and x.dtype == torch.bfloat16 and x.shape[1] == self._inputs, x.shape
        out = x.new_empty((x.shape[0], self._outputs))
        self._form, form = _BF16, self._form  # outputs in the order of the packed weight
        try:
            self._multiply(x if x.stride(1) == 1 else x.contiguous(), None, out)
        finally:
            self._form = form
        return out

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert self._form == _BF16, "a gated matmul rounds to bfloat16"
        return self._checked(x, bias, torch.float32)

    def rows(self, ids: Tensor, scale: float | None = None) -> Tensor:
        """weight[ids] in bfloat16: an embedding tied to this weight needs no table of its own.

        Args:
            ids: [T] int64, 0 <= id < N. Not checked: another id reads out of bounds.
            scale: factor for the rows, which are already bfloat16 and are rounded again, as rows of a table would be.

        Returns:
            [T, K] bfloat16.
        """
        assert ids.dtype == torch.int64 and ids.dim() == 1, (ids.dtype, ids.shape)
        if self._form == _GATED:
            is_up, gate = ids // self._width, ids % self._width
            ids = (gate // _LANES * 2 + is_up) * _LANES + gate % _LANES
        out = torch.empty((len(ids), self._inputs), dtype=torch.bfloat16)
        self._take_rows(ids.contiguous(), out)
        if scale is not None:
            self._library.scale(out.data_ptr(), out.numel(), scale, True)
        return out

    @property
    def fuses_silu_and_mul(self) -> bool:
        """Whether `fuse_silu_and_mul` was called and succeeded."""
        return self._form == _GATED

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._outputs, self._inputs

    @property
    def width(self) -> int:
        """Outputs of a call: N, or N / 2 after `fuse_silu_and_mul`."""
        return self._width

    @property
    def form(self) -> int:
        """Output form of a call; `Form` of `kernels/cpu/output.h`."""
        return self._form

    def as_expert(self) -> tuple[int, int, int, int, int, int, float, int]:
        """The weight as one expert of a layer; `ExpertWeight` of `kernels/cpu/experts.cpp`."""
        return self._address, self.kind, 0, 0, 0, 0, 0.0, 0

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self._packed.nbytes

    def _checked(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert x.dtype == torch.bfloat16 and x.shape[1] == self._inputs, (x.dtype, x.shape)
        if bias is not None:
            assert bias.dtype == torch.bfloat16 and bias.shape == (self._outputs,), (bias.dtype, bias.shape)
            bias = bias.contiguous()
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((x.shape[0], self._width), dtype=dtype)
        self._multiply(x, bias, out)
        return out

    def _keep(self, packed: Tensor) -> None:
        """Replace the packed weight."""
        self._packed = packed
        self._address = packed.data_ptr()

    def _arguments(self, x: Tensor, bias: Tensor | None, out: Tensor) -> tuple[int | None, ...]:
        """Arguments of `_multiply` in the order of the library's panel matmuls."""
        return (
            x.data_ptr(),
            x.stride(0),
            self._address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            self._inputs,
            self._outputs,
            self._form_of(out),
        )

    def _form_of(self, out: Tensor) -> int:
        return _FLOAT if out.dtype == torch.float32 else self._form

    @abstractmethod
    def _multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out = x @ weight.T + bias.

        Args:
            x: [T, K] bfloat16; the values of a row are contiguous.
            bias: [N] bfloat16, contiguous.
            out: [T, N] bfloat16 or float32, contiguous; [T, N / 2] bfloat16 after `fuse_silu_and_mul`.
        """

    @abstractmethod
    def _pair(self) -> None:
        """Interleave blocks of 16 gates with their 16 ups, in place; N is a multiple of 32."""

    @abstractmethod
    def _take_rows(self, ids: Tensor, out: Tensor) -> None:
        """out = weight[ids], unpacked: [T, K] bfloat16 from [T] int64, both contiguous."""
