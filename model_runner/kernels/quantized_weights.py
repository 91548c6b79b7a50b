"""`Fp8Weight`, `IntWeight`, `BlockWeight`: quantized weights, one class per form, for all checkpoint formats.

Formats (`weights/`) read checkpoints into these; kernels (`quantized`) take them. `dequantized` defines the value of a
weight, and every kernel is tested against it.
"""

# Shapes: K inputs, N outputs, G groups of inputs that share a scale.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
BLOCK_SIZE: Final = 32
"""Inputs per block of a `BlockWeight`."""
HALF_BLOCK: Final = 16
"""Inputs that share a scale in NVFP4."""
SMALLEST_AMAX: Final = 1e-12
"""Replaces the largest absolute value of a row of zeros, whose scale would be 0."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """8-bit floats with a scale per output, or per output and group of inputs.

    Attributes:
        numbers: [N, K] e4m3.
        scales: [N, G] float32; weight = number * scale.
        group_size: K where G is 1; the last group may be shorter.
        activation_bound: activations are clamped to this magnitude when they are quantized; None: not clamped.
        weights_only: activations must not be quantized.
    """

    numbers: Tensor
    scales: Tensor
    group_size: int
    activation_bound: float | None = None
    weights_only: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory in the layout of the kernels."""
        return self.numbers.nbytes + self.scales.nbytes

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded once."""
        out = torch.empty(self.numbers.shape, dtype=dtype, device=self.numbers.device)
        for group, columns in enumerate(_groups(self.numbers.shape[1], self.group_size)):
            scale = self.scales[:, group].unsqueeze(1)
            out[:, columns] = self.numbers[:, columns].to(torch.float32).mul_(scale).to(dtype)
        return out

    def stacks_with(self, other: Fp8Weight) -> bool:
        """Whether both can become one weight with the outputs of both."""
        mine, others = (
            (one.group_size, one.numbers.shape[1], one.activation_bound, one.weights_only)
            for one in (self, other)
        )
        return mine == others


@dataclass(frozen=True, slots=True)
class IntWeight:
    """Integers of 4 or 8 bits with a scale and a zero point per output and group of inputs.

    Attributes:
        numbers: [K, N] uint8, 0..15 or 0..255; weight = (number - zero) * scale.
        scales: [G, N] float16 or float32.
        zeros: [G, N] uint8, in the same range.
        group_size: K where G is 1, else a divisor of K.
        order: [K] int64: row k of `numbers` belongs to input order[k]; None: to input k.
        bits: per integer, 4 or 8.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    order: Tensor | None = None
    bits: int = 4

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.numbers.shape[1], self.numbers.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory in the layout of the kernels."""
        return self.numbers.nbytes * self.bits // 8 + self.scales.nbytes + self.zeros.nbytes

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded once."""
        num_inputs, num_outputs = self.numbers.shape
        out = torch.empty((num_inputs, num_outputs), dtype=dtype, device=self.numbers.device)
        for group, rows in enumerate(_groups(num_inputs, self.group_size)):
            whole = self.numbers[rows].to(torch.float32).sub_(self.zeros[group])
            out[rows] = whole.mul_(self.scales[group].to(torch.float32)).to(dtype)
        if self.order is not None:
            out = torch.empty_like(out).index_copy_(0, self.order, out)
        return out.t().contiguous()

    def as_blocks(self) -> BlockWeight | None:
        """The same weight in blocks, each with the scale of its group, and without minima if it has one zero point.

        None: groups are not whole blocks of neighboring inputs, or a scale is not finite.
        """
        if self.order is not None or self.group_size % BLOCK_SIZE or not self.scales.isfinite().all():
            return None
        per_group = self.group_size // BLOCK_SIZE
        scales = self.scales.to(torch.float32)
        numbers, minima, zero = self.numbers.t().contiguous(), None, int(self.zeros[0, 0])
        if (self.zeros != zero).any():
            minima, zero = (self.zeros * -scales).t().repeat_interleave(per_group, dim=1), 0
        return BlockWeight(numbers, scales.t().repeat_interleave(per_group, dim=1), minima, zero, self.bits)

    def stacks_with(self, other: IntWeight) -> bool:
        """Whether both can become one weight with the outputs of both."""
        mine, others = ((one.bits, one.group_size, one.numbers.shape[0]) for one in (self, other))
        if mine != others:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)


class NotFiniteError(ValueError):
    """A weight in blocks has a scale or a minimum that is not finite."""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Integers with a scale and a minimum per output and block of 32 inputs; many formats of GGUF are of this form.

    Attributes:
        numbers: [N, K] uint8, 0..15 or 0..255; K is a multiple of 32, or of 16.
        scales: [N, K / 32] float32; with a `factor` [N, K / 16], values of e4m3.
        minima: [N, K / 32] float32, or None where each is -zero * scale; weight = number * scale + minimum.
        zero: see `minima`.
        bits: bits per integer, 4 or 8.
        table: values 0..255 of the 16 integers, each at most 127 from `zero`; None: integers are their own values. Only
            with 4 bits and without minima; weight = (table[number] - zero) * scale.
        factor: of all scales, which kernels keep as bytes; None: scales are for whole blocks. Only with a table.
        values: of the 16 integers, exact, where the table minus `zero` is these rounded.
    """

    numbers: Tensor
    scales: Tensor
    minima: Tensor | None
    zero: int
    bits: int
    table: tuple[int, ...] | None = None
    factor: float | None = None
    values: tuple[float, ...] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory in the layout of the kernels: integers of `bits` bits, scales and minima of 16 bits, or of 8."""
        scale_bytes = 1 if self.factor is not None else 4 if self.minima is not None else 2
        num_scales = self.scales.numel()
        if self.bits == 4 and self.factor is None:
            num_scales //= self.scale_len // BLOCK_SIZE
        return self.numbers.numel() * self.bits // 8 + num_scales * scale_bytes

    @property
    def scale_len(self) -> int:
        """Neighboring inputs that share a scale in the kernels' layouts; with 8 bits 64 only without minima."""
        if self.factor is not None:
            return HALF_BLOCK
        if self.bits == 8:
            return 2 * BLOCK_SIZE if self.minima is None and self.has_shared_scales(2) else BLOCK_SIZE
        return next((n * BLOCK_SIZE for n in (4, 2) if self.has_shared_scales(n)), BLOCK_SIZE)

    @property
    def is_finite(self) -> bool:
        """Whether all values are: integers always are, NaN and inf can only be in the scales and minima."""
        return all(part is None or bool(part.isfinite().all()) for part in (self.scales, self.minima))

    def has_shared_scales(self, num: int) -> bool:
        """Whether each `num` neighboring blocks have the same scale, and minimum: in effect larger groups."""
        if not self.scales.numel() or self.scales.shape[1] % num:
            return False
        parts = (part for part in (self.scales, self.minima) if part is not None)
        return all(torch.equal(part[:, ::num], part[:, n::num]) for part in parts for n in range(1, num))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded once."""
        if self.values is not None:
            exact = torch.tensor(self.values, device=self.numbers.device)[self.numbers.int()].view(
                *self.scales.shape, -1
            )
            return exact.mul_(self.scales.unsqueeze(2)).to(dtype).flatten(1)
        blocks = self._values().view(*self.scales.shape, -1).to(torch.float32)
        if self.minima is None:
            scales = self.scales if self.factor is None else self.scales * self.factor
            return blocks.sub_(self.zero).mul_(scales.unsqueeze(2)).to(dtype).flatten(1)
        return blocks.mul_(self.scales.unsqueeze(2)).add_(self.minima.unsqueeze(2)).to(dtype).flatten(1)

    def take_blocks(self, blocks: Tensor) -> BlockWeight:
        """The weight with these blocks of 32 of its inputs, [K / 32] int64."""
        rows, num_blocks = len(self.scales), self.shape[1] // BLOCK_SIZE
        return replace(
            self,
            numbers=self.numbers.view(rows, num_blocks, -1)[:, blocks].flatten(1),
            scales=self.scales.view(rows, num_blocks, -1)[:, blocks].flatten(1),
            minima=None if self.minima is None else self.minima[:, blocks],
        )

    def padded(self, rows: int) -> BlockWeight:
        """The weight with outputs of zeros at the end, [rows, K]."""
        more = (0, 0, 0, rows - len(self.scales))
        return replace(
            self,
            numbers=F.pad(self.numbers, more),
            scales=F.pad(self.scales, more),
            minima=None if self.minima is None else F.pad(self.minima, more),
        )

    def widened(self) -> BlockWeight:
        """The same weight in the most general form, 8 bits and minima; rounded if its scales are for 16 inputs."""
        if self.factor is not None:
            blocks = self.dequantized(torch.float32).view(len(self.scales), -1, BLOCK_SIZE)
            scales = blocks.abs().amax(dim=2) / 127
            numbers = (blocks / scales.clamp(min=SMALLEST_AMAX).unsqueeze(2)).round() + 128
            return BlockWeight(numbers.to(torch.uint8).flatten(1), scales, scales * -128, 0, 8)
        minima = self.scales * -self.zero if self.minima is None else self.minima
        return BlockWeight(self._values(), self.scales, minima, 0, 8)

    def _values(self) -> Tensor:
        """[N, K] uint8: the numbers, or their values in the table."""
        if self.table is None:
            return self.numbers
        return torch.tensor(self.table, dtype=torch.uint8, device=self.numbers.device)[self.numbers.int()]

    def stacks_with(self, other: BlockWeight) -> bool:
        """Whether both can become one weight with the outputs of both."""
        return self.shape[1] == other.shape[1] and self.factor == other.factor


def stack_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    """One weight with the outputs of all; they must stack."""
    if len(weights) == 1:
        return weights[0]
    # As bytes: torch cannot concatenate 8-bit floats on every device.
    numbers = torch.cat([weight.numbers.view(torch.uint8) for weight in weights]).view(FP8)
    scales = torch.cat([weight.scales for weight in weights])
    return replace(weights[0], numbers=numbers, scales=scales)


def stack_ints(weights: Sequence[IntWeight]) -> IntWeight:
    """One weight with the outputs of all; they must stack."""
    if len(weights) == 1:
        return weights[0]
    numbers, scales, zeros = (
        torch.cat(parts, dim=1)
        for parts in zip(*((weight.numbers, weight.scales, weight.zeros) for weight in weights), strict=True)
    )
    return replace(weights[0], numbers=numbers, scales=scales, zeros=zeros)


def stack_blocks(weights: Sequence[BlockWeight]) -> BlockWeight:
    """One weight with the outputs of all; they must stack. Where their forms differ, all are widened.

    Some files store v with more bits than q and k: one matmul with a few more bytes is faster than two.
    """
    if len(weights) == 1:
        return weights[0]
    forms = {(one.bits, one.zero, one.minima is None, one.table, one.factor) for one in weights}
    if len(forms) > 1:
        weights = [weight.widened() for weight in weights]
    minima = [weight.minima for weight in weights if weight.minima is not None]
    return replace(
        weights[0],
        numbers=torch.cat([weight.numbers for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        minima=torch.cat(minima) if minima else None,
    )


def quantize_to_fp8(weight: Tensor) -> Fp8Weight:
    """Quantize [N, K], floating point, to 8 bits, with a scale per output that maps its largest value to 448."""
    numbers = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = weight.abs().amax(dim=1, keepdim=True).to(torch.float32).clamp_(min=SMALLEST_AMAX) / FP8_MAX
    for start in range(0, weight.shape[0], _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        scaled = weight[rows].to(torch.float32) / scales[rows]
        numbers[rows] = scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Weight(numbers, scales, weight.shape[1])


_ROWS_AT_A_TIME: Final = 4096
"""Bounds the float32 copy of a large weight."""


def _groups(num_inputs: int, group_size: int) -> list[slice]:
    return [slice(start, min(start + group_size, num_inputs)) for start in range(0, num_inputs, group_size)]
