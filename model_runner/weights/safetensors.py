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

from ...runtime.errors import ConfigError
from ...runtime.model_files.gguf.ggml_types import dequantize
from ...runtime.model_files.weight_files.safetensors_header import (
    INDEX_FILE,
    SAFE_TO_IGNORE,
    HeaderEntry,
    read_header,
    usual_names_in,
    weight_files,
)
from ...runtime.model_files.weight_files.stacked_experts import ExpertPart, expert_parts
from .gguf_blocks import MXFP4, block_weight, mxfp4_rows
from .reader import Slice

if TYPE_CHECKING:
    from ...runtime.model_files.gguf.ggml_bytes import Bytes
    from ...runtime.model_files.model_spec import ModelSpec
    from ..kernels.quantized_weights import BlockWeight

_DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_CODES: Final = (torch.float8_e4m3fn, torch.int32, torch.uint8)
"""Dtypes of quantized weights. They have a value only together with scales and are never converted."""


class _Entry(NamedTuple):
    file: _File
    header: HeaderEntry


class _File:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read_header(path).entries
        try:
            with open(path, "rb") as file:
                # Private and writable only because torch wants writable memory; nothing is ever written.
                self.data = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}; download it again") from error


class SafetensorsStore:
    """The tensors of all files of a model folder, by their usual names, see `usual_names`."""

    def __init__(self, folder: Path, language_of: str = "", spec: ModelSpec | None = None) -> None:
        """Open the files.

        Args:
            folder: the model's.
            language_of: see `ModelSpec`; the tensors of towers are left out.
            spec: the architecture, to find the experts in files that stack them; None: there are none.

        Raises:
            ConfigError: there are no files, or one is missing, truncated or damaged.
        """
        paths = weight_files(folder)
        self._whole = paths[0] if len(paths) == 1 else folder / INDEX_FILE
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            file = _File(path)
            for name, entry in file.entries.items():
                if name in self._entries:
                    raise ConfigError(
                        f"{path}: tensor {name!r} is also in {self._entries[name].file.path.name}; "
                        "keep one of the files"
                    )
                self._entries[name] = _Entry(file, entry)
        names = usual_names_in(folder, self._entries, language_of)
        self._entries = {usual: self._entries[stored] for stored, usual in names.items()}
        self._num_experts = 0 if spec is None or spec.experts is None else spec.experts.num_experts
        self._parts = {} if spec is None else expert_parts(spec, self._entries)

    def names(self) -> set[str]:
        """See `TensorStore`."""
        stacks = {part.stored for part in self._parts.values()}
        stacks |= {part.scales for part in self._parts.values() if part.is_blocks}
        names = set(self._entries) - stacks | set(self._parts)
        return {name for name in names if not name.endswith(SAFE_TO_IGNORE)}

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorStore`."""
        part = self._parts.get(name)
        entry = self._entries.get(name if part is None else part.stored)
        if entry is None:
            return None
        return entry.header.shape if part is None else part.shape(entry.header.shape, self._num_experts)

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """See `TensorStore`. For a part, only the file pages that hold it are read."""
        if (expert := self._parts.get(name)) is None:
            tensor, where = self.mapped(name), self._where(name)
        elif expert.is_blocks:
            tensor, where = self._dequantized(expert), self._where(expert.stored)
        else:
            tensor, where = self._of_expert(expert), self._where(expert.stored)
        if tensor.dtype != out.dtype and (tensor.dtype in _CODES or out.dtype in _CODES):
            raise ConfigError(
                f"{where} is stored as {_plain_name(tensor.dtype)}, but by config.json it is {_plain_name(out.dtype)}; "
                "its quantization_config does not belong to the weights, or is missing"
            )
        out.copy_(tensor if part is None else tensor.narrow(part.axis, part.start, part.stop - part.start))

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
        return torch.frombuffer(file.data, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)

    def _where(self, name: str) -> str:
        return f"{self._entries[name].file.path}: tensor {name!r}"

    def blocks(self, name: str, part: Slice | None = None) -> BlockWeight | None:
        """See `TensorStore`; only experts can be in blocks, in MXFP4."""
        expert = self._parts.get(name)
        if expert is None or not expert.is_blocks:
            return None
        weight = block_weight(self._rows(expert, part), MXFP4)
        return weight.inputs(part.start, part.stop) if part is not None and part.axis == 1 else weight

    def _of_expert(self, expert: ExpertPart) -> Tensor:
        tensor = self.mapped(expert.stored)[expert.expert]
        return (tensor.T if expert.transposed else tensor)[expert.outputs]

    def _dequantized(self, expert: ExpertPart) -> Tensor:
        return torch.from_numpy(dequantize(self._rows(expert, None), MXFP4))

    def _rows(self, expert: ExpertPart, part: Slice | None) -> Bytes:
        """The outputs of an expert in MXFP4 as rows of a GGUF file; `part`: only some of them, if it is of outputs."""
        numbers, scales = (
            self.mapped(name)[expert.expert, expert.outputs].numpy()
            for name in (expert.stored, expert.scales)
        )
        if part is not None and part.axis == 0:
            numbers, scales = numbers[part.start : part.stop], scales[part.start : part.stop]
        return mxfp4_rows(numbers, scales)

    def describe(self, name: str) -> str:
        """See `TensorStore`."""
        entry = self._entries.get(name)
        return str(self._whole if entry is None else entry.file.path)


def _plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
