"""`mlx_weight`: weights in the forms of MLX (ml-explore/mlx:python/src/ops.cpp, `quantize`).

The tensors of a module, which is a linear layer, a table or a router:

    <name>.weight   uint32 [N, K * bits / 32]   integers of neighboring inputs, without gaps, the first in the low bits
    <name>.scales   [N, K / group]
    <name>.biases   [N, K / group]              weight = integer * scale + bias

The modes `nvfp4`, `mxfp4` and `mxfp8` have no biases. Scales are then bytes: e4m3 for 16 inputs (`nvfp4`), or e8m0 for
32; and the integers are codes of e2m1 or e4m3.
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from ...models.spec.quantization import MXFP4
from ...runtime.errors import ConfigError
from ..kernels.quantized_weights import BLOCK_SIZE, FP8, HALF_BLOCK, BlockWeight, Fp8Weight
from .fp8_format import powers_of_two
from .reader import Slice

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec

MLX_SCALES: Final = ("scales", "biases")
_HALF: Final = 0.5
"""The values of `MXFP4.table` are twice the floats."""


def mlx_weight(
    words: Tensor,
    scales: Tensor,
    biases: Tensor | None,
    form: QuantizationSpec,
    part: Slice | None,
    name: str,
) -> BlockWeight | Fp8Weight:
    """The weight of a module, or a rank's part of it.

    Args:
        words, scales, biases: tensors of the whole weight; biases if the form has these.
        form: bits and group of the module.
        part: outputs, or inputs in whole groups.
        name: of the module, for messages.

    Raises:
        ConfigError: a cut lies inside a group, or a scale or bias is not finite.
    """
    group = form.group_size
    if part is not None and part.axis == 0:
        rows = slice(part.start, part.stop)
        words, scales, biases = words[rows], scales[rows], None if biases is None else biases[rows]
    numbers = _numbers(words, form.bits)
    if part is not None and part.axis == 1:
        step = max(group, BLOCK_SIZE)
        if part.start % step or part.stop % step:
            raise ConfigError(
                f"{name}: a rank takes inputs {part.start} to {part.stop - 1}, but {step} neighbors share a scale and "
                "cannot be split; use a smaller --tp"
            )
        numbers, groups = numbers[:, part.start : part.stop], slice(part.start // group, part.stop // group)
        scales, biases = scales[:, groups], None if biases is None else biases[:, groups]
    if biases is not None:
        scales, biases = scales.to(torch.float32), biases.to(torch.float32)
    else:
        scales = scales.view(FP8).to(torch.float32) if group == HALF_BLOCK else powers_of_two(scales)
    if not all(one.isfinite().all() for one in (scales, biases) if one is not None):
        raise ConfigError(
            f"{name}: holds scales that are not finite; the file is damaged: download the model again"
        )
    if form.symmetric and form.bits == 8:
        return Fp8Weight(numbers.contiguous().view(FP8), scales, group)
    if form.symmetric:
        factor = _HALF if group == HALF_BLOCK else None
        scales = scales if factor is not None else scales.mul(_HALF)
        return BlockWeight(numbers, scales, None, MXFP4.zero, 4, MXFP4.table, factor)
    assert biases is not None
    scales, biases = (one.repeat_interleave(group // BLOCK_SIZE, dim=1) for one in (scales, biases))
    return BlockWeight(numbers, scales, biases, 0, 8 if form.bits > 4 else 4)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """[N, K] uint8."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if bits == 4:
        return torch.stack([octets & 15, octets >> 4], dim=2).flatten(1)
    single = np.unpackbits(octets.numpy(), axis=1, bitorder="little").reshape(len(words), -1, bits)
    return torch.from_numpy(np.packbits(single, axis=2, bitorder="little").squeeze(2))
