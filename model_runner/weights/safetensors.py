"""Weights in safetensors files: one `model.safetensors`, or shards listed in `model.safetensors.index.json`.

Follows the format's specification (huggingface/safetensors:README.md):

    header length u64 | header JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data, offsets relative to it

Files are memory-mapped and every header is checked in full when opened; a file from the internet is not trusted. A
tensor with an unknown dtype is refused when it is read, not before: old exports keep buffers that are never read.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from .reader import Slice

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_MAX_HEADER_BYTES: Final = 100 << 20
_DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}
_CODES: Final = (torch.float8_e4m3fn, torch.int32)
"""Dtypes of quantized weights. They have a value only together with scales and are never converted."""
_SAFE_TO_IGNORE: Final = (".rotary_emb.inv_freq", ".masked_bias", ".attention.bias")
"""Suffixes of tensors in old exports that are not weights."""


class _Entry(NamedTuple):
    file: _File
    dtype_name: str  # as in the header
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class _File:
    """One mapped file and its checked header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                # Private and writable only because torch wants writable memory; nothing is ever written.
                self.data = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ConfigError(f"{path}: cannot be read: {error}; download it again") from error
        self.entries = self._read_header()

    def _read_header(self) -> dict[str, _Entry]:
        size = len(self.data)
        header_bytes = int.from_bytes(self.data[:8], "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ConfigError(f"{self.path}: truncated, or not a safetensors file; download it again")
        try:
            header = json.loads(self.data[8 : 8 + header_bytes], object_pairs_hook=_unique)
            entries = {
                name: self._entry(8 + header_bytes, value)
                for name, value in header.items()
                if name != "__metadata__"
            }
        except ConfigError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self.path}: the header is damaged ({error!r}); download it again") from error
        begin = taken = 8 + header_bytes
        before = ""
        for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
            end = entry.offset + entry.num_bytes
            if end > size:
                raise ConfigError(
                    f"{self.path}: truncated: tensor {name!r} ends at byte {end}, the file has {size}; "
                    "download it again"
                )
            if entry.num_bytes and begin < entry.offset < taken:  # at one place: tied weights of old exports
                raise ConfigError(
                    f"{self.path}: the header is damaged: tensors {before!r} and {name!r} overlap; download it again"
                )
            if end > taken:
                begin, taken, before = entry.offset, end, name
        return entries

    def _entry(self, data_start: int, value: dict[str, Any]) -> _Entry:
        begin, end = value["data_offsets"]
        shape = tuple(value["shape"])
        dtype = _DTYPES.get(value["dtype"])
        numbers = (*shape, begin, end)
        if (
            not isinstance(value["dtype"], str)
            or any(type(n) is not int or n < 0 for n in numbers)
            or begin > end
        ):
            raise ValueError(f"impossible shape {shape} or offsets {begin}, {end}")
        if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"shape {shape} does not take {end - begin} bytes")
        return _Entry(self, value["dtype"], shape, data_start + begin, end - begin)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of the header; two tensors with one name are an error, because they are ambiguous."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


class SafetensorsStore:
    """The tensors of all files of a model folder."""

    def __init__(self, folder: Path) -> None:
        """Open the files.

        Raises:
            ConfigError: there are no files, or one is missing, truncated or damaged.
        """
        paths = weight_files(folder)
        self._whole = paths[0] if len(paths) == 1 else folder / INDEX_FILE
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            for name, entry in _File(path).entries.items():
                if name in self._entries:
                    raise ConfigError(
                        f"{path}: tensor {name!r} is also in {self._entries[name].file.path.name}; "
                        "keep one of the files"
                    )
                self._entries[name] = entry

    def names(self) -> set[str]:
        """See `TensorStore`."""
        return {name for name in self._entries if not name.endswith(_SAFE_TO_IGNORE)}

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorStore`."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """See `TensorStore`. For a part, only the file pages that hold it are read."""
        entry = self._entries[name]
        dtype, where = _DTYPES.get(entry.dtype_name), f"{entry.file.path}: tensor {name!r}"
        if dtype is None:
            raise ConfigError(
                f"{where}: dtype {entry.dtype_name} is not supported, only {', '.join(_DTYPES)}; "
                "use the original weights or a GGUF file"
            )
        if dtype != out.dtype and (dtype in _CODES or out.dtype in _CODES):
            raise ConfigError(
                f"{where} is stored as {_plain_name(dtype)}, but by config.json it is {_plain_name(out.dtype)}; its "
                "quantization_config does not belong to the weights, or is missing"
            )
        count = math.prod(entry.shape)
        if count == 0:
            raise ConfigError(f"{where} holds no values: its shape is {list(entry.shape)}; download it again")
        stored = torch.frombuffer(entry.file.data, dtype=dtype, count=count, offset=entry.offset)
        tensor = stored.view(entry.shape)
        out.copy_(tensor if part is None else tensor.narrow(part.axis, part.start, part.stop - part.start))

    def blocks(self, name: str, part: Slice | None = None) -> None:
        """See `TensorStore`; always None: safetensors has no block-quantized dtype."""

    def describe(self, name: str) -> str:
        """See `TensorStore`."""
        entry = self._entries.get(name)
        return str(self._whole if entry is None else entry.file.path)


def _plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder that are loaded, sorted by name.

    Raises:
        ConfigError: there are no weight files, or one is missing.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        if (folder / SINGLE_FILE).exists():
            return [folder / SINGLE_FILE]
        raise ConfigError(
            f"{folder}: there is neither {SINGLE_FILE} nor {INDEX_FILE}; download the model again, "
            "or use --load-format dummy for random weights"
        )
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        paths = [folder / shard for shard in sorted(shards)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index}: damaged ({error!r}); download it again") from error
    for path in paths:
        if path.parent != folder or not path.exists():
            raise ConfigError(f"{index}: names {path.name!r}, which is not in the folder; download it again")
    return paths
