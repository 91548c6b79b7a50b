"""`NativeMatmul`: what our products with packed weights have in common (`native_linear`, `native_blocks`).

They are checked here, once, so that no kernel reads or writes beside its tensors; how a weight is packed and which
kernel is called is the subclass's.
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
"""What is written; `Form` of `kernels/cpu/output.h`."""
_LANES: Final = 16
"""Gates that stand before their ups in a weight of a gated product."""


class NativeMatmul(ABC):
    """A weight [N, K] packed for one of our kernels, which needs no other copy of it; a `LinearWeight`."""

    PACKED: ClassVar = 0
    COMPRESSED: ClassVar = 1
    BLOCKS: ClassVar = 2
    kind: ClassVar[int]
    """Of the weight's form; `Kind` of `kernels/cpu/experts.cpp`."""

    def __init__(self, library: ctypes.CDLL, outputs: int, inputs: int, packed: Tensor) -> None:
        """`packed`: the weight as the subclass's kernels read it, in bytes; it is kept."""
        self._library = library
        self._keep(packed)
        self._outputs, self._inputs = outputs, inputs
        self._form = _BF16
        self._width = outputs

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearWeight`."""
        return self._checked(x, bias, torch.bfloat16)

    def fuse_silu_and_mul(self) -> bool:
        """See `GateableWeight`. For gates in whole vectors; with others it stays what it is."""
        if self._form != _BF16:
            raise RuntimeError("the weight ends with its activation already; two layers must not share it")
        if self._outputs % (2 * _LANES):
            return False
        self._pair()
        self._form, self._width = _GATED, self._outputs // 2
        return True

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearToFloat32`."""
        assert self._form == _BF16, "a gated product is rounded"
        return self._checked(x, bias, torch.float32)

    def rows(self, ids: Tensor, scale: float | None = None) -> Tensor:
        """weight[ids] in bfloat16: an embedding that shares its weight needs no table of its own.

        Args:
            ids: [T] int64, 0 <= id < N: not checked, as memory beside the weight would be read.
            scale: a factor of the rows in bfloat16, which are rounded once more, as those of a table would be.

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
            self._library.scale(out.data_ptr(), out.numel(), scale)
        return out

    @property
    def ends_with_silu(self) -> bool:
        """Whether `fuse_silu_and_mul` was asked for and has said yes."""
        return self._form == _GATED

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._outputs, self._inputs

    @property
    def width(self) -> int:
        """Of what a call gives: N, or half of it once it ends with silu."""
        return self._width

    @property
    def form(self) -> int:
        """What a call writes; `Form` of `kernels/cpu/output.h`."""
        return self._form

    def as_expert(self) -> tuple[int, int, int, int, int, int, float]:
        """The weight as one of a layer's experts; `ExpertWeight` of `kernels/cpu/experts.cpp`."""
        return self._address, self.kind, 0, 0, 0, 0, 0.0

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
        """From now on this is the weight."""
        self._packed = packed
        self._address = packed.data_ptr()

    def _arguments(self, x: Tensor, bias: Tensor | None, out: Tensor) -> tuple[int | None, ...]:
        """Of `_multiply`, as the library's products of panels take them."""
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
            x: [T, K] bfloat16; numbers of a row are neighbors.
            bias: [N] bfloat16, contiguous.
            out: [T, N] contiguous, bfloat16 or float32; [T, N / 2] bfloat16 once it ends with silu.
        """

    @abstractmethod
    def _pair(self) -> None:
        """Bring 16 gates and their 16 ups side by side, in place; N is a multiple of 32."""

    @abstractmethod
    def _take_rows(self, ids: Tensor, out: Tensor) -> None:
        """out = weight[ids] as it is packed: [T, K] bfloat16 from [T] int64, both contiguous."""
