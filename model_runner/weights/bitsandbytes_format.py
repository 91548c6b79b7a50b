"""`BitsAndBytesParts`: weights of bitsandbytes (bitsandbytes-foundation/bitsandbytes:bitsandbytes/functional.py).

nf4 and fp4 (`QuantState`), over the whole matrix, row by row:

    <name>.weight                       uint8 [N * K / 2, 1]    codes of two neighbors, the first in the high half
    <name>.weight.absmax                float32 [blocks]        of 64 neighbors, or of another block; or, nested, uint8:
                                                                codes of `nested_quant_map`
    <name>.weight.quant_map             float32 [16]            the values of the codes
    <name>.weight.nested_absmax         float32                 factors of 256 codes; `nested_offset` is added
    <name>.weight.nested_quant_map      float32 [256]
    <name>.weight.quant_state.bitsandbytes__nf4   a JSON object as bytes

int8:

    <name>.weight   int8 [N, K]
    <name>.SCB      float32 [N]   127 times the scale
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...models.spec.quantization import FP4_CODES, NF4_CODES, CodeTable
from ...runtime.errors import ConfigError
from ..kernels.quantized_weights import BLOCK_SIZE, BlockWeight, IntWeight
from .reader import ModuleWeight, read_plain

if TYPE_CHECKING:
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part

_STATE: Final = "quant_state.bitsandbytes__"
_TABLES: Final = {"nf4": NF4_CODES, "fp4": FP4_CODES}
_RANGE: Final = 127
"""The largest integer of 8 bits, which stands for the largest value of an output."""
_MAX_BLOCK: Final = 1 << 16
"""Larger blocks than those of bitsandbytes (4096); it bounds the memory that a damaged file can ask for."""
_MAX_OFFSET: Final = 1e30


class BitsAndBytesParts:
    """`PartReader` of weights in 4 or 8 bits. A module without scales is plain."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization

    def read(self, module: ModuleWeight) -> Part:
        if self._quantization.bits == 8:
            return _read_int8(module)
        weights, name = module.reader, module.name
        states = {kind: weights.shape(f"{name}.weight.{_STATE}{kind}", (1,)) for kind in _TABLES}
        kind = next((kind for kind, shape in states.items() if shape not in (None, (1,))), None)
        if kind is None:  # plain, or a dummy
            return read_plain([module])
        shape = states[kind]
        assert shape is not None
        state = _state(module, f"{name}.weight.{_STATE}{kind}", shape)
        return _read_codes(module, _TABLES[kind], state)


def _read_int8(module: ModuleWeight) -> Part:
    weights, name, (rows, columns), part = module
    if weights.shape(f"{name}.SCB", (rows,)) is None:
        return read_plain([module])
    if weights.shape(f"{name}.weight_format", ()) is not None:
        layout = int(weights.tensor(f"{name}.weight_format", (), torch.uint8))
        if layout:
            raise ConfigError(f"{name}: weight_format is {layout}, only rows (0) are supported")
    slices = None if part is None else [part]
    signed = weights.stacked([f"{name}.weight"], [(rows, columns)], torch.int8, slices)
    scales = weights.tensor(f"{name}.SCB", (rows,), torch.float32).div_(_RANGE)
    if part is not None and part.axis == 0:
        scales = scales[part.start : part.stop]
    numbers = signed.add_(-128).view(torch.uint8).t()
    zeros = torch.full((1, len(scales)), 128, dtype=torch.uint8, device=scales.device)
    return IntWeight(numbers, scales.unsqueeze(0), zeros, len(numbers), bits=8)


def _state(module: ModuleWeight, name: str, shape: tuple[int, ...]) -> dict[str, object]:
    text = bytes(module.reader.tensor(name, shape, torch.uint8).tolist())
    try:
        state = json.loads(text)
        if not isinstance(state, dict):
            raise ValueError(f"{type(state).__name__} instead of an object")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: is damaged ({error}); download the model again") from None
    if state.get("shape") != list(module.shape):
        raise ConfigError(
            f"{name}: the weight has the shape {state.get('shape')}, but the configuration asks for "
            f"{list(module.shape)}; the weights and the configuration do not belong together"
        )
    return state


def _read_codes(module: ModuleWeight, table: CodeTable, state: dict[str, object]) -> Part:
    weights, name, (rows, columns), part = module
    size = state.get("blocksize")
    if not isinstance(size, int) or not 1 <= size <= _MAX_BLOCK:
        raise ConfigError(f"{name}: blocksize is {size}, a number from 1 to {_MAX_BLOCK} is expected")
    values = weights.tensor(f"{name}.weight.quant_map", (16,), torch.float32)
    if not torch.allclose(values.cpu(), torch.tensor(table.values), atol=1e-6, rtol=0.0):
        raise ConfigError(f"{name}: quant_map is not the table of {state.get('quant_type')}")
    pairs = weights.tensor(f"{name}.weight", (rows * columns // 2, 1), torch.uint8)
    numbers = torch.cat([pairs >> 4, pairs & 15], dim=1).view(rows, columns)
    largest = _largest(module, -(-rows * columns // size), state)
    if not largest.isfinite().all():
        raise ConfigError(
            f"{name}: holds scales that are not finite; the file is damaged: download the model again"
        )
    if columns % size or size % BLOCK_SIZE:  # blocks that are parts of several outputs
        scales = largest.repeat_interleave(size)[: rows * columns].view(rows, columns)
        plain = values[numbers.int()].mul_(scales).to(weights.dtype)
        return plain if part is None else plain.narrow(part.axis, part.start, part.stop - part.start)
    scales = largest.view(rows, -1).repeat_interleave(size // BLOCK_SIZE, dim=1)
    if part is not None and part.axis == 0:
        numbers, scales = numbers[part.start : part.stop], scales[part.start : part.stop]
    elif part is not None:
        if part.start % BLOCK_SIZE or part.stop % BLOCK_SIZE:
            raise ConfigError(
                f"{name}: a rank takes inputs {part.start} to {part.stop - 1}, but {BLOCK_SIZE} neighbors share a "
                "scale and cannot be split; use a smaller --tp"
            )
        scales = scales[:, part.start // BLOCK_SIZE : part.stop // BLOCK_SIZE]
        numbers = numbers[:, part.start : part.stop]
    form = table.form
    scaled = scales.div(table.divisor).contiguous()
    return BlockWeight(numbers.contiguous(), scaled, None, form.zero, 4, form.table, values=table.scaled)


def _largest(module: ModuleWeight, num_blocks: int, state: dict[str, object]) -> Tensor:
    """The factor of each block, [blocks] float32."""
    weights, name = module.reader, f"{module.name}.weight"
    if "nested_blocksize" not in state:
        return weights.tensor(f"{name}.absmax", (num_blocks,), torch.float32)
    size, offset = state["nested_blocksize"], state.get("nested_offset")
    if not isinstance(size, int) or not 1 <= size <= _MAX_BLOCK:
        raise ConfigError(f"{name}: nested_blocksize is {size}, a number from 1 to {_MAX_BLOCK} is expected")
    if not isinstance(offset, int | float) or not abs(offset) <= _MAX_OFFSET:
        raise ConfigError(f"{name}: nested_offset is {offset}, a number up to {_MAX_OFFSET:g} is expected")
    codes = weights.tensor(f"{name}.absmax", (num_blocks,), torch.uint8)
    factors = weights.tensor(f"{name}.nested_absmax", (-(-num_blocks // size),), torch.float32)
    values = weights.tensor(f"{name}.nested_quant_map", (256,), torch.float32)
    return values[codes.int()].mul_(factors.repeat_interleave(size)[:num_blocks]).add_(offset)
