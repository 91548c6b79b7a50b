"""`SafetensorsFile`: the checked header of one safetensors file, and which files of a folder are loaded.

Follows the format's specification (huggingface/safetensors:README.md):

    header length u64 | header JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data, offsets relative to it

Every header is checked in full when it is read; a file from the internet is not trusted. A tensor with an unknown dtype
is no error here: old exports keep buffers that are never read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...runtime.errors import ConfigError
from ..families.registry import FAMILIES
from ..hf.multimodal_types import MULTIMODAL
from ..model_files import damage
from .stored_forms import (
    HeaderEntry,
    cut_embedding,
    from_mlx,
    unstacked,
    usual_block_name,
    without_image_layers,
)
from .vision_tensors import is_unused_of_tower

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_STATIC_SCALES: Final = (
    *("input_scale", "activation_scale", "input_scale_ub", "input_global_scale", "output_scale"),
    *("input_zero_point", "q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
)
SAFE_TO_IGNORE: Final = (
    *(".rotary_emb.inv_freq", ".masked_bias", ".attention.bias"),
    *(f".{name}" for name in _STATIC_SCALES),
)
"""Suffixes of tensors that are not read: some of old exports that are not weights; and scales and zero points of
activations and of the KV cache in quantized ones, because both are scaled as they are made."""

_OLD_NAMES: Final = {
    ".LayerNorm.gamma": ".LayerNorm.weight",
    ".LayerNorm.beta": ".LayerNorm.bias",
    "._weight_qdata": ".weight",
    "._weight_scale": ".weight_scale",
    "._weight_zero_point": ".weight_zero_point",
}
"""Suffixes of tensor names -> the usual ones: of legacy BERT, and of the parts of torchao's tensors."""
_BODY: Final = "model."
_OWN_TABLE: Final = "embed_tokens.weight"

_MAX_HEADER_BYTES: Final = 100 << 20
_ITEM_BYTES: Final = {
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "I8": 1,
    "I64": 8,
}
"""Dtypes that are read, with the bytes of an element."""


class SafetensorsFile(NamedTuple):
    """One file.

    Attributes:
        num_bytes: of the whole file.
        entries: its tensors by name.
        ignored: the tensors of towers, which are not read.
    """

    path: Path
    num_bytes: int
    entries: dict[str, HeaderEntry]
    ignored: tuple[HeaderEntry, ...] = ()


def read_header(path: Path) -> SafetensorsFile:
    """Read and check a header; the tensors are inside of the file and do not overlap.

    Raises:
        ConfigError: the file is no safetensors file, truncated or damaged.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ConfigError(
                    damage(path, "truncated, or not a safetensors file; download it again")
                    if size
                    else f"{path}: cannot be read: it is empty; download it again"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}; download it again") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        entries = {
            _current(name): _entry(8 + header_bytes, value)
            for name, value in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(damage(path, f"the header is damaged ({error!r}); download it again")) from error
    _check_places(path, size, 8 + header_bytes, entries)
    return SafetensorsFile(path, size, entries)


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
        raise ConfigError(damage(index, f"damaged ({error!r}); download it again")) from error
    for path in paths:
        if path.parent != folder or not path.exists():
            raise ConfigError(f"{index}: names {path.name!r}, which is not in the folder; download it again")
    return paths


def usual_names(names: Iterable[str], language_of: str = "", *, sees: bool = False) -> dict[str, str]:
    """Tensors of a folder -> what they are called in a folder with a language model only; without those of towers.

    A decoder that was saved without an output head, as an embedder is, has names like `layers.0.mlp.up_proj.weight`.

    Args:
        names: of all files of the folder.
        language_of: see `FilesSpec`.
        sees: with the tensors of towers.

    Raises:
        ConfigError: two tensors are the same one of the language model.
    """
    kind = MULTIMODAL.get(language_of)
    usual = {name: name if kind is None else kind.usual_name(name, sees=sees) for name in names}
    prefix = _BODY if _OWN_TABLE in usual.values() else ""
    found = {stored: prefix + name for stored, name in usual.items() if name is not None}
    holder: dict[str, str] = {}
    for stored, name in found.items():
        if name in holder:
            raise ConfigError(
                f"tensors {holder[name]!r} and {stored!r} are both {name!r}; remove one of them from the files"
            )
        holder[name] = stored
    return found


def read_headers(folder: Path, spec: ModelSpec | None = None) -> list[SafetensorsFile]:
    """All weight files of a folder; their tensors have the usual names, see `usual_names` and `stored_forms`.

    Args:
        folder: with the files.
        spec: the architecture, by which towers and stacks of experts are known.

    Raises:
        ConfigError: there are no files, one is missing, truncated or damaged, or two hold the same tensor.
    """
    files = [read_header(path) for path in weight_files(folder)]
    holder: dict[str, str] = {}
    for file in files:
        for name in file.entries:
            if name in holder:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} is also in {holder[name]}; keep one of the files"
                )
            holder[name] = file.path.name
    names = _usual_names_in(folder, holder, spec)
    if spec is not None and spec.files.image_layers:
        names = without_image_layers(spec, names)
    if spec is not None and spec.form.mlp_layers:
        names = {stored: usual_block_name(spec, name) for stored, name in names.items()}
    files = [_renamed(file, names, spec) for file in files]
    if spec is None:
        return files
    entries = from_mlx([file.entries for file in files], spec)
    return [file._replace(entries=each) for file, each in zip(files, entries, strict=True)]


def _usual_names_in(folder: Path, names: Iterable[str], spec: ModelSpec | None) -> dict[str, str]:
    """`usual_names` of the tensors of this folder, which an error names."""
    family = None if spec is None else FAMILIES.get(spec.model_type)
    own = {name: name if family is None else family.tensor_name(name) for name in names}
    try:
        stored = filter(None, own.values())
        if spec is None:
            usual = usual_names(stored)
        else:
            usual = usual_names(stored, spec.files.language_of, sees=spec.vision is not None)
        vision = None if spec is None else spec.vision
        return {
            stored: usual[name]
            for stored, name in own.items()
            if name in usual and not is_unused_of_tower(vision, usual[name])
        }
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _renamed(file: SafetensorsFile, names: dict[str, str], spec: ModelSpec | None) -> SafetensorsFile:
    entries = {names[name]: entry for name, entry in file.entries.items() if name in names}
    if spec is not None and spec.files.image_layers:
        entries = cut_embedding(spec, entries)
    return file._replace(
        entries=entries if spec is None else unstacked(entries, spec),
        ignored=tuple(entry for name, entry in file.entries.items() if name not in names),
    )


def _check_places(path: Path, size: int, data_start: int, entries: dict[str, HeaderEntry]) -> None:
    begin = taken = data_start
    before = ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        end = entry.offset + entry.num_bytes
        if end > size:
            raise ConfigError(
                f"{path}: truncated: tensor {name!r} ends at byte {end}, the file has {size}; download it again"
            )
        if entry.num_bytes and begin < entry.offset < taken:  # at one place: tied weights of old exports
            raise ConfigError(
                f"{path}: the header is damaged: tensors {before!r} and {name!r} overlap; download it again"
            )
        if end > taken:
            begin, taken, before = entry.offset, end, name


def _entry(data_start: int, value: dict[str, Any]) -> HeaderEntry:
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    numbers = (*shape, begin, end)
    if (
        not isinstance(value["dtype"], str)
        or any(type(n) is not int or n < 0 for n in numbers)
        or begin > end
    ):
        raise ValueError(f"impossible shape {shape} or offsets {begin}, {end}")
    item_bytes = _ITEM_BYTES.get(value["dtype"])
    if item_bytes is not None and math.prod(shape) * item_bytes != end - begin:
        raise ValueError(f"shape {shape} does not take {end - begin} bytes")
    return HeaderEntry(value["dtype"], shape, data_start + begin, end - begin)


def _current(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of the header; two tensors with one name are an error, because they are ambiguous."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields
