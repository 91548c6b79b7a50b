"""Reader of GGUF files, version 2 and 3: metadata, tensor directory and raw tensor bytes, memory-mapped.

Called for architecture facts (`model_spec`), the tokenizer (`gguf_tokenizer`) and by weight loading, which interpret
the keys and tensor names. Written against the format's specification (ggml:docs/gguf.md):

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string, value type u32, value          a string is its length u64 and its UTF-8 bytes
    tensors:  name string, number of dimensions u32, dimensions u64..., type u32, offset u64
    padding to the alignment | tensor data, each tensor at an aligned offset

Files are untrusted: every count is checked against the remaining bytes before anything is allocated, so memory is
bounded by a small multiple of the file's size, and a damaged file raises a `ConfigError` with the position. Reading the
header of a 49k-token model takes about 30 ms.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...runtime.errors import ConfigError
from ..model_files import damage
from .ggml_types import GGML_TYPES, GGMLType
from .ggml_types import dequantize as _dequantize_rows
from .gguf_split import check_part, check_tensors, further_parts

Array = npt.NDArray[np.generic]
Value = bool | int | float | str | list[str] | Array
"""A metadata value; arrays of numbers are numpy arrays, arrays of strings lists."""

MAGIC: Final = b"GGUF"
TOWER_ARCHITECTURE: Final = "clip"
"""llama.cpp's name for all towers."""

_MAX_METADATA: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 16
_MAX_DIMS: Final = 4
_MAX_TENSOR_BYTES: Final = 1 << 44
_MAX_ARRAY_LEN: Final = 1 << 24
_MAX_KEY_BYTES: Final = 1 << 16
_MAX_STRING_BYTES: Final = 1 << 24

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<4sIQQ")

_TYPE_BOOL: Final = 7
_TYPE_STRING: Final = 8
_TYPE_ARRAY: Final = 9
_NUMBER_TYPES: Final[dict[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _TYPE_BOOL: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


class TensorInfo(NamedTuple):
    """The position of one tensor in the file, its type and its shape."""

    name: str
    shape: tuple[int, ...]  # numpy order: the last axis is contiguous (the file lists the axes in reverse)
    ggml_type: GGMLType
    offset: int  # bytes from the start of the file
    num_bytes: int
    part: int = 0  # index of the file, of a split model
    half: int | None = None  # 0 or 1: of the rows of each matrix in the file, see `_with_halves`


class GGUFFile:
    """One open GGUF model, a file or all parts of a split one: checked in full when opened, read through memory maps.

    Attributes:
        path: the file, or the first part.
        paths: all files, with that of a tower.
        version: 2 or 3.
        metadata: by key, in the order of the file.
        tensors: by name, in the order of the file.

    A map is released when the file object and the last array from `raw` are deleted.
    """

    def __init__(self, path: str | os.PathLike[str], *, with_lists: bool = True) -> None:
        """Open `path` and read its header.

        Args:
            with_lists: read metadata that is a list of strings; False: skip it, which takes a third of the time of
                reading a vocabulary and its merges.

        Raises:
            ConfigError: the file cannot be read, is not GGUF, is truncated, or contradicts itself.
        """
        self.path = Path(path)
        self._maps = [_map_file(self.path)]
        reader = _HeaderReader(self.path, self._maps[0], with_lists=with_lists)
        self.version, num_tensors, num_metadata = reader.read_counts()
        self.metadata: Mapping[str, Value] = MappingProxyType(reader.read_metadata(num_metadata))
        tensors = reader.read_tensors(num_tensors, self.metadata)
        self.paths = (self.path, *further_parts(self.path, self.metadata))
        for further in self.paths[1:]:
            self._read_part(further, tensors)
        if len(self.paths) > 1:
            check_tensors(self.path, self.metadata, len(tensors))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(_with_halves(tensors)))

    def add_tower(self, tower: GGUFFile) -> None:
        """Add the tensors of the tower in another file, a `mmproj`, as those of a further part."""
        part = len(self._maps)
        self._maps += tower._maps
        self.paths = (*self.paths, *tower.paths)
        added = {
            name: info._replace(part=part + info.part) for name, info in _with_ups(tower.tensors).items()
        }
        self.tensors = MappingProxyType({**self.tensors, **added})

    def _read_part(self, path: Path, tensors: dict[str, TensorInfo]) -> None:
        """Open a further part and add its tensors."""
        part = len(self._maps)
        self._maps.append(_map_file(path))
        reader = _HeaderReader(path, self._maps[-1], with_lists=False)
        _, num_tensors, num_metadata = reader.read_counts()
        metadata = reader.read_metadata(num_metadata)
        check_part(path, metadata, part, len(self.paths))
        for name, info in reader.read_tensors(num_tensors, metadata).items():
            if name in tensors:
                raise ConfigError(
                    f"{path}: tensor {name!r} is in an earlier part, too; download the model again"
                )
            tensors[name] = info._replace(part=part)

    def raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor: [*shape[:-1], row_bytes] uint8, read-only, a view into the file.

        A row is whole blocks, so a slice of rows (one rank's share) can be passed to `dequantize` on its own.
        """
        num_halves = 1 if info.half is None else 2
        count, data = num_halves * info.num_bytes, self._maps[info.part]
        flat = np.frombuffer(data, dtype=np.uint8, count=count, offset=info.offset)
        row_bytes = info.ggml_type.row_bytes(info.shape[-1])
        if info.half is None:
            return flat.reshape(*info.shape[:-1], row_bytes)
        num, rows, _ = info.shape
        return flat.reshape(num, 2, rows, row_bytes)[:, info.half]

    def release(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> None:
        """Give back the memory of the pages of bytes [start, stop) of a tensor; arrays from `raw` stay valid.

        The pages stay in the system's cache of the file, so reading them again is cheap. With those of one half go
        those of the other one.
        """
        stop = info.num_bytes if stop is None else stop
        if info.half is not None:
            start, stop = 2 * start, 2 * stop
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            first = (info.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
            self._maps[info.part].madvise(mmap.MADV_DONTNEED, first, info.offset + stop - first)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor as float32, in its numpy shape.

        Raises:
            ConfigError: no such tensor, or its type cannot be converted.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ConfigError(f"{self.path}: there is no tensor {name!r}")
        try:
            return dequantize(info, self.raw(info))
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None


def dequantize(info: TensorInfo, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Convert a tensor's bytes, or a slice of its rows as `GGUFFile.raw` gives them, to float32.

    Raises:
        ConfigError: the tensor's type cannot be converted; the message names tensor and type.
    """
    try:
        return _dequantize_rows(raw, info.ggml_type)
    except ConfigError as error:
        raise ConfigError(f"tensor {info.name!r}: {error}") from None


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether the file starts with the GGUF magic; False also if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _with_ups(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of a tower; files from before May 2025 name the two layers of an MLP the other way round."""
    first, size = tensors.get("v.blk.0.ffn_down.weight"), tensors.get("v.blk.0.ln1.weight")
    if (
        first is None
        or size is None
        or first.shape[-1] != size.shape[-1]
        or first.shape[0] == first.shape[-1]
    ):
        return dict(tensors)
    others = {"ffn_down": "ffn_up", "ffn_up": "ffn_down"}

    def renamed(name: str) -> str:
        return re.sub(r"(?<=\.)ffn_(?:down|up)(?=\.)", lambda found: others[found[0]], name)

    return {renamed(name): info._replace(name=renamed(name)) for name, info in tensors.items()}


_GATE_UP: Final = "ffn_gate_up_exps.weight"
_GATE, _UP = "ffn_gate_exps.weight", "ffn_up_exps.weight"


def _with_halves(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors, with two in the place of one that has the gates of an expert before its ups."""
    for name, info in tensors.items():
        if not name.endswith(_GATE_UP) or len(info.shape) != 3 or info.shape[1] % 2:
            yield name, info
            continue
        num, rows, size = info.shape
        for half, part in enumerate((_GATE, _UP)):
            own = name.replace(_GATE_UP, part)
            shape, num_bytes = (num, rows // 2, size), info.num_bytes // 2
            yield own, info._replace(name=own, shape=shape, num_bytes=num_bytes, half=half)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < _HEADER.size:
                raise ConfigError(
                    damage(path, "not a GGUF file (shorter than a GGUF header); download it again")
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    """Reads the header front to back; every method leaves `_pos` after the bytes it read."""

    def __init__(self, path: Path, data: mmap.mmap, *, with_lists: bool) -> None:
        self._path = path
        self._with_lists = with_lists
        self._data = data
        self._size = len(data)
        self._pos = 0

    def read_counts(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of metadata entries."""
        magic, version, num_tensors, num_metadata = _HEADER.unpack_from(self._data, 0)
        if magic != MAGIC:
            raise ConfigError(damage(self._path, f"not a GGUF file (it starts with {magic!r})"))
        if version & 0xFFFF == 0:
            raise self._error("big-endian GGUF is not supported; use the little-endian file")
        if version not in (2, 3):
            raise self._error(
                f"GGUF version {version} is not supported, only 2 and 3; convert the model again"
            )
        self._pos = _HEADER.size
        if num_metadata > _MAX_METADATA:
            raise self._error(f"{num_metadata} metadata entries, the limit is {_MAX_METADATA}")
        if num_tensors > _MAX_TENSORS:
            raise self._error(f"{num_tensors} tensors, the limit is {_MAX_TENSORS}")
        return version, num_tensors, num_metadata

    def read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._string("a metadata key", _MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(f"metadata key {key!r} appears twice")
            value = self._value(key)
            if value is not None:
                metadata[key] = value
        return metadata

    def read_tensors(self, count: int, metadata: Mapping[str, Value]) -> dict[str, TensorInfo]:
        """The tensor directory with absolute offsets; tensors lie inside the file and do not overlap."""
        alignment = metadata.get("general.alignment", 32)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or alignment <= 0
            or alignment & alignment - 1
        ):
            raise self._error(f"general.alignment is {repr(alignment)[:80]}, expected a power of two")
        relative = [self._tensor_info(alignment) for _ in range(count)]
        data_start = -(-self._pos // alignment) * alignment
        infos = [info._replace(offset=data_start + info.offset) for info in relative]
        tensors = {info.name: info for info in infos}
        if len(tensors) != count:
            raise self._error("two tensors have the same name")
        end, before = 0, ""
        for info in sorted(infos, key=lambda info: info.offset):
            if info.offset < end:
                raise self._error(f"tensors {before!r} and {info.name!r} overlap")
            end, before = info.offset + info.num_bytes, info.name
            if end > self._size:
                raise self._error(
                    f"truncated: tensor {info.name!r} ends at byte {end} of {self._size}; download it again"
                )
        return tensors

    def _tensor_info(self, alignment: int) -> TensorInfo:
        name = self._string("a tensor name", _MAX_KEY_BYTES)
        num_dims = self._u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor {name!r} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = tuple(self._u64() for _ in range(num_dims))[::-1]
        type_id = self._u32()
        offset = self._u64()
        ggml_type = GGML_TYPES.get(type_id)
        if ggml_type is None:
            raise self._error(
                f"tensor {name!r} has the unknown type {type_id}; use another quantization of this model, for example "
                "Q4_K_M or Q8_0"
            )
        num_bytes = ggml_type.row_bytes(shape[-1])
        for dim in shape[:-1]:
            num_bytes *= dim
        if not 0 < num_bytes <= _MAX_TENSOR_BYTES or shape[-1] % ggml_type.block_len:
            raise self._error(
                f"tensor {name!r} has the impossible shape {list(shape)} for type {ggml_type.name}"
            )
        if offset % alignment:
            raise self._error(f"tensor {name!r} is not aligned to {alignment} bytes (offset {offset})")
        return TensorInfo(name, shape, ggml_type, offset, num_bytes)

    def _value(self, key: str) -> Value | None:
        """None: a list of strings that is skipped."""
        value_type = self._u32()
        if value_type == _TYPE_STRING:
            return self._string(repr(key), _MAX_STRING_BYTES)
        if value_type != _TYPE_ARRAY:
            number: bool | int | float = self._numbers(key, value_type, 1)[0].item()
            return number
        item_type = self._u32()
        count = self._u64()
        if count > _MAX_ARRAY_LEN:
            raise self._error(f"{key!r} has {count} elements, the limit is {_MAX_ARRAY_LEN}")
        if item_type == _TYPE_STRING:
            if self._with_lists:
                return self._strings(key, count)
            self._skip_strings(key, count)
            return None
        return self._numbers(key, item_type, count)

    def _numbers(self, key: str, value_type: int, count: int) -> Array:
        code = _NUMBER_TYPES.get(value_type)
        if code is None:
            raise self._error(f"{key!r} has the unsupported value type {value_type}")
        dtype = np.dtype(code)
        start = self._take(count * dtype.itemsize, key)
        # A copy: metadata must not keep the whole map alive. Booleans are bytes: any value but 0 is true.
        if value_type == _TYPE_BOOL:
            return np.frombuffer(self._data, dtype=np.uint8, count=count, offset=start).astype(np.bool_)
        return np.frombuffer(self._data, dtype=dtype, count=count, offset=start).copy()

    def _strings(self, key: str, count: int) -> list[str]:
        """A list of strings; inlined because a vocabulary and its merges have up to 500k of them."""
        if count * _U64.size > self._size - self._pos:
            raise self._truncated(key)
        strings: list[str] = []
        data, size, pos = self._data, self._size, self._pos
        unpack = _U64.unpack_from
        for _ in range(count):
            if pos + 8 > size:
                raise self._truncated(key)
            end = pos + 8 + unpack(data, pos)[0]
            if end > size or end - pos > _MAX_STRING_BYTES:
                raise self._truncated(key)
            try:
                strings.append(str(data[pos + 8 : end], "utf-8"))
            except UnicodeDecodeError as error:
                raise self._error(f"element {len(strings)} of {key!r} is not UTF-8") from error
            pos = end
        self._pos = pos
        return strings

    def _skip_strings(self, key: str, count: int) -> None:
        data, size, pos = self._data, self._size, self._pos
        unpack = _U64.unpack_from
        for _ in range(count):
            if pos + 8 > size:
                raise self._truncated(key)
            pos += 8 + unpack(data, pos)[0]
        if pos > size:
            raise self._truncated(key)
        self._pos = pos

    def _string(self, what: str, limit: int) -> str:
        length = self._u64(what)
        if length > limit:
            raise self._error(f"{what} is {length} bytes long, the limit is {limit}; the file is damaged")
        start = self._take(length, what)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8") from error

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._data, self._take(_U32.size, "the header"))[0]
        return value

    def _u64(self, what: str = "the header") -> int:
        value: int = _U64.unpack_from(self._data, self._take(_U64.size, what))[0]
        return value

    def _take(self, num_bytes: int, what: str) -> int:
        """Advance by `num_bytes` and return their start."""
        start = self._pos
        if num_bytes > self._size - start:
            raise self._truncated(what)
        self._pos = start + num_bytes
        return start

    def _truncated(self, what: str) -> ConfigError:
        return self._error(f"truncated or damaged in {what}; download it again")

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._path}: {message} (near byte {self._pos})")
