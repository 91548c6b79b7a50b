"""Weights in safetensors files: one `model.safetensors`, or shards listed in `model.safetensors.index.json`.

Files are memory-mapped. `safetensors_header` reads and checks the headers. A tensor with an unknown dtype is refused
when it is read, not before: old exports keep buffers that are never read.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from ...models.gguf.ggml_types import dequantize
from ...models.weight_files.safetensors_header import INDEX_FILE, SAFE_TO_IGNORE, read_headers
from ...models.weight_files.stored_forms import BLOCKS, SCALES, HeaderEntry
from ...runtime.errors import ConfigError
from ..kernels.blocks.stored_rows import StoredRows
from ..kernels.blocks.tensor_rows import TensorRows
from ..kernels.quantized_weights import BLOCK_SIZE, BlockWeight, Fp8Weight
from .gguf_order import MXFP4, mxfp4_rows
from .mlx_format import MLX_SCALES, mlx_weight
from .reader import Slice

if TYPE_CHECKING:
    from ...models.gguf.ggml_codes import Bytes
    from ...models.spec.model_spec import ModelSpec
    from ...models.spec.quantization import QuantizationSpec

_DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U32": torch.int32,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.int8,
    "I64": torch.int64,
}
_CODES: Final = (torch.float8_e4m3fn, torch.int32, torch.uint8, torch.int8, torch.int64)
"""Dtypes of quantized weights. They have a value only together with scales and are never converted."""


class _Entry(NamedTuple):
    file: _File
    header: HeaderEntry


class _File:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                # Private and writable only because torch wants writable memory; nothing is ever written.
                self.data = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}; download it again") from error


class SafetensorsStore:
    """The tensors of all files of a model folder, by their usual names, see `read_headers`."""

    def __init__(self, folder: Path, spec: ModelSpec | None = None) -> None:
        """Open the files.

        Args:
            folder: the model's.
            spec: the architecture, by which towers, which are left out, and stacks of experts are known.

        Raises:
            ConfigError: there are no files, or one is missing, truncated or damaged.
        """
        headers = read_headers(folder, spec)
        quantization = None if spec is None else spec.quantization
        self._mlx = quantization if quantization is not None and quantization.method == "mlx" else None
        self._whole = headers[0].path if len(headers) == 1 else folder / INDEX_FILE
        self._entries: dict[str, _Entry] = {}
        for header in headers:
            file = _File(header.path)
            self._entries |= {name: _Entry(file, entry) for name, entry in header.entries.items()}

    def names(self) -> set[str]:
        names = (name.removesuffix(BLOCKS) for name in self._entries if not name.endswith(SCALES))
        beside = tuple(f".{part}" for part in MLX_SCALES) if self._mlx is not None else ()
        return {name for name in names if not name.endswith((*SAFE_TO_IGNORE, *beside))}

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        entry = self._entries.get(name)
        if entry is not None:
            form, shape = self._mlx_form(name), entry.header.shape
            return shape if form is None else (*shape[:-1], shape[-1] * 32 // form.bits)
        blocks = self._entries.get(name + BLOCKS)
        if blocks is None or name + SCALES not in self._entries:
            return None
        rows, *columns = blocks.header.shape
        return rows, 2 * math.prod(columns)

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """For a part, only the file pages that hold it are read."""
        if name + BLOCKS in self._entries:
            tensor, where = torch.from_numpy(dequantize(self._mxfp4(name), MXFP4)), self._where(name + BLOCKS)
        elif (weight := self._in_mlx(name, part)) is not None:
            out.copy_(weight.dequantized(out.dtype))
            return
        else:
            tensor, where = self.mapped(name), self._where(name)
        if tensor.dtype != out.dtype and (tensor.dtype in _CODES or out.dtype in _CODES):
            raise ConfigError(
                f"{where} is stored as {_plain_name(tensor.dtype)}, but by config.json it is {_plain_name(out.dtype)}; "
                "its quantization_config does not belong to the weights, or is missing"
            )
        out.copy_(tensor if part is None else tensor.narrow(part.axis, part.start, part.stop - part.start))
        if name in self._entries and self._entries[name].header.added:
            out.sub_(self._entries[name].header.added)

    def mapped(self, name: str) -> Tensor:
        """A tensor in the memory of its file, not to be written.

        Raises:
            ConfigError: its dtype is not read, or it is empty.
        """
        file, entry = self._entries[name]
        dtype = _DTYPES.get(entry.dtype_name)
        if dtype is None:
            raise ConfigError(
                f"{self._where(name)}: dtype {entry.dtype_name} is not supported, only {', '.join(_DTYPES)}; "
                "use the original weights or a GGUF file"
            )
        count = math.prod(entry.shape)
        if count == 0:
            raise ConfigError(
                f"{self._where(name)} holds no values: its shape is {list(entry.shape)}; download it again"
            )
        if entry.strides:
            count = 1 + sum(
                (size - 1) * stride for size, stride in zip(entry.shape, entry.strides, strict=True)
            )
            part = torch.frombuffer(file.data, dtype=dtype, count=count, offset=entry.offset)
            return part.as_strided(entry.shape, entry.strides)
        return torch.frombuffer(file.data, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)

    def _where(self, name: str) -> str:
        return f"{self._entries[name].file.path}: tensor {name!r}"

    def _mlx_form(self, name: str) -> QuantizationSpec | None:
        """The form of a weight that MLX has quantized; None: it is plain."""
        module = name.removesuffix(".weight")
        if self._mlx is None or module == name or f"{module}.{MLX_SCALES[0]}" not in self._entries:
            return None
        return self._mlx.part_of(module)

    def _in_mlx(self, name: str, part: Slice | None) -> BlockWeight | Fp8Weight | None:
        """A part of a weight that MLX has quantized, or all of it; None: it is plain."""
        form, module = self._mlx_form(name), name.removesuffix(".weight")
        if form is None:
            return None
        scales, biases = (f"{module}.{one}" for one in MLX_SCALES)
        own = None if form.symmetric else self.mapped(biases)
        return mlx_weight(self.mapped(name), self.mapped(scales), own, form, part, module)

    def blocks(self, name: str, part: Slice | None = None) -> StoredRows | BlockWeight | None:
        """The experts of gpt-oss are stored in blocks, in MXFP4; and modules in forms of MLX."""
        if (weight := self._in_mlx(name, part)) is not None:
            return weight if isinstance(weight, BlockWeight) else None
        if name + BLOCKS not in self._entries:
            return None
        outputs = slice(part.start, part.stop) if part is not None and part.axis == 0 else slice(None)
        blocks = None
        if part is not None and part.axis == 1:
            blocks = torch.arange(part.start // BLOCK_SIZE, part.stop // BLOCK_SIZE)
        return StoredRows((TensorRows(self._mxfp4(name, outputs), MXFP4, blocks=blocks),))

    def _mxfp4(self, name: str, outputs: slice = slice(None)) -> Bytes:
        """Outputs of a weight in MXFP4, as rows of a GGUF file."""
        numbers, scales = (self.mapped(name + end)[outputs].numpy() for end in (BLOCKS, SCALES))
        return mxfp4_rows(numbers, scales)

    def describe(self, name: str) -> str:
        entry = self._entries.get(name)
        return str(self._whole if entry is None else entry.file.path)


def _plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
