"""`check_weights`: whether the files of a model hold the weights that its configuration asks for, by their headers.

A start asks this before it makes processes, and `engine doctor` asks nothing else about weights: both give the same
verdict. The values are not read, except for a tied output head, and loading checks everything once more.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import structs

from ...runtime.errors import ConfigError
from ..families.registry import FAMILIES
from .encoder_tensors import NAMES, encoder_modules, is_beside_encoder, prefix_of
from .needed_tensors import Module, is_unused, needed_modules
from .safetensors_header import SAFE_TO_IGNORE, SINGLE_FILE, SafetensorsFile, read_headers
from .stored_forms import BLOCKS, SCALES, HeaderEntry
from .vision_tensors import TOWER, vision_modules

if TYPE_CHECKING:
    from ..gguf.gguf_file import GGUFFile
    from ..spec.encoder_spec import DenseSpec
    from ..spec.model_spec import ModelSpec
    from ..spec.quantization import QuantizationSpec

logger = logging.getLogger(__name__)

_PLAIN: Final = ("F32", "F16", "BF16")
_READ: Final = (*_PLAIN, "F8_E4M3", "I32")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QUANTIZED: Final = {
    "fp8": ("weight_scale_inv", "weight_scale"),
    "awq": ("qweight",),
    "gptq": ("qweight",),
    **dict.fromkeys(("compressed-tensors", "nvfp4", "mxfp4", "torchao"), ("weight_scale",)),
    "bitsandbytes": ("weight.absmax", "SCB"),
}
"""Tensors of which a quantized module has one, by method."""
_COMPARED_BYTES: Final = 1 << 20


class WeightsSummary(NamedTuple):
    """Summary of the weight files."""

    num_files: int
    num_tensors: int
    num_bytes: int
    num_ignored: int = 0  # tensors of towers, which are not read
    ignored_bytes: int = 0


def check_folder_weights(folder: Path, spec: ModelSpec) -> tuple[ModelSpec, WeightsSummary]:
    """Check the safetensors files of a folder.

    Returns:
        the architecture with what only the weights show (an output head of its own, the number of parameters), and a
        summary.

    Raises:
        ConfigError: a file is missing, truncated or damaged; a tensor is missing, of another shape or dtype, or one
            that the model does not have.
    """
    files = read_headers(folder, spec)
    for dense in () if spec.pooling is None else spec.pooling.dense:
        if dense.folder:
            _check_dense(folder / dense.folder, dense)
    tensors = {name: entry for file in files for name, entry in file.entries.items()}
    ignored = [entry.num_bytes for file in files for entry in file.ignored]
    num_bytes = sum(file.num_bytes for file in files)
    all_names = list(tensors)
    summary = WeightsSummary(len(files), len(tensors), num_bytes, len(ignored), sum(ignored))
    tensors = {
        name: entry
        for name, entry in tensors.items()
        if not name.endswith(SAFE_TO_IGNORE) and not is_unused(spec, name)
    }
    if spec.encoder is not None:
        prefix = prefix_of(NAMES[spec.model_type], tensors.__contains__)
        tensors = {name: entry for name, entry in tensors.items() if not is_beside_encoder(name, prefix)}
        _check_names(_Place(folder, files), tensors, spec, encoder_modules(spec, prefix))
        return spec, summary
    spec = _with_own_head(folder, files, spec)
    if spec.mtp is not None and not any(name.startswith(f"{spec.mtp.projection}.") for name in all_names):
        spec = structs.replace(spec, mtp=None)
    if spec.model_type in FAMILIES:
        needed = chain(needed_modules(spec), vision_modules(spec))
        _check_names(_Place(folder, files), tensors, spec, needed)
        return spec, summary
    if spec.tie_word_embeddings:
        tensors.pop(_HEAD, None)
    own = structs.replace(spec.files, num_parameters=_num_parameters(tensors))
    return structs.replace(spec, files=own), summary


def check_gguf_weights(file: GGUFFile, spec: ModelSpec) -> WeightsSummary:
    """Check the tensors of a GGUF file, and of that of its tower; opening has checked the places.

    Raises:
        ConfigError: a tensor is missing, of another shape, or of a type that is not read.
    """
    from ..gguf.ggml_types import check_convertible
    from ..gguf_names import find_split_kv, full_shape, is_not_read, stored_names
    from .gguf_tower_tensors import find_parts, gguf_tower_names

    stored = {hf: (gguf, expert) for hf, gguf, expert in stored_names(spec)}
    stored |= {hf: (gguf, None) for hf, gguf in gguf_tower_names(spec)}
    left = {name for name in file.tensors if not is_not_read(spec, name)}
    split = find_split_kv(file, spec) | find_parts(file, spec)
    left -= {part.name for parts in split.values() for part in parts}
    for module in chain(needed_modules(spec), vision_modules(spec)):
        for name, shape in _tensors_of(module):
            path = file.paths[-1] if name.startswith(TOWER) else file.path
            if name in split:
                if split[name].shape != shape:
                    raise ConfigError(f"{path}: {_other_shape(name, split[name].shape, shape)}")
                continue
            gguf, expert = stored[name]
            info = file.tensors.get(gguf)
            if info is None:
                raise ConfigError(f"{path}: {_missing(name)}")
            if expert is not None and spec.experts is not None and info.shape[0] != spec.experts.num_experts:
                raise ConfigError(
                    f"{file.path}: {gguf} holds {info.shape[0]} experts, the file's metadata says "
                    f"{spec.experts.num_experts}; the file is damaged: download it again"
                )
            left.discard(gguf)
            found = full_shape(info.shape if expert is None else info.shape[1:], shape)
            if found != shape:
                raise ConfigError(f"{path}: {_other_shape(name, found, shape)}")
            try:
                check_convertible(info.ggml_type)
            except ConfigError as error:
                raise ConfigError(f"{path}: tensor {gguf!r}: {error}") from None
    if left:
        raise ConfigError(f"{file.path}: {_unexpected(left)}")
    num_bytes = sum(info.num_bytes for info in file.tensors.values())
    return WeightsSummary(len(file.paths), len(file.tensors), num_bytes)


def _check_dense(folder: Path, dense: DenseSpec) -> None:
    """Check a layer after pooling that has a folder of its own."""
    if not (folder / SINGLE_FILE).exists() and any(folder.glob("*.bin")):
        raise ConfigError(
            f"{folder}: has only pickled weights (.bin), which are refused because loading them runs code from the "
            "file; save the model again with a new version of sentence-transformers"
        )
    (file,) = read_headers(folder)
    shapes: dict[str, tuple[int, ...]] = {dense.weight: (dense.out_features, dense.in_features)}
    if dense.bias:
        shapes[dense.bias] = (dense.out_features,)
    for name, shape in shapes.items():
        entry = file.entries.get(name)
        if entry is None:
            raise ConfigError(f"{file.path}: {_missing(name)}")
        if entry.shape != shape:
            raise ConfigError(f"{file.path}: {_other_shape(name, entry.shape, shape)}")
    if left := set(file.entries) - set(shapes):
        raise ConfigError(f"{file.path}: {_unexpected(left)}")


class _Place(NamedTuple):
    """Names the file of a tensor in messages."""

    folder: Path
    files: list[SafetensorsFile]

    def of(self, name: str) -> Path:
        return next((file.path for file in self.files if name in file.entries), self._whole)

    @property
    def _whole(self) -> Path:
        return self.files[0].path if len(self.files) == 1 else self.folder / "model.safetensors.index.json"


def _check_names(
    place: _Place, tensors: Mapping[str, HeaderEntry], spec: ModelSpec, needed: Iterable[Module]
) -> None:
    """Check the tensors of a model of the engine."""
    left = set(tensors)
    if spec.tie_word_embeddings:
        left.discard(_HEAD)
    quantized: set[str] = set()
    for module in needed:
        if module.is_linear and f"{module.name}.weight{BLOCKS}" in tensors:
            left -= _check_mxfp4(place, tensors, module)
            continue
        if spec.quantization is not None and spec.quantization.method == "mlx":
            if f"{module.name}.scales" in tensors:
                left -= _check_mlx(place, tensors, module, spec.quantization)
                continue
        elif _is_quantized(module, tensors, spec):
            quantized.add(module.name)
            continue
        for name, shape in _tensors_of(module):
            entry = tensors.get(name)
            if entry is None:
                raise ConfigError(f"{place.of(name)}: {_missing(name)}")
            if entry.shape != shape:
                raise ConfigError(f"{place.of(name)}: {_other_shape(name, entry.shape, shape)}")
            if entry.dtype_name not in _READ:
                raise ConfigError(
                    f"{place.of(name)}: tensor {name!r}: dtype {entry.dtype_name} is not supported, only "
                    f"{', '.join(_READ)}; use the original weights or a GGUF file"
                )
            if entry.dtype_name not in _PLAIN:
                raise ConfigError(
                    f"{place.of(name)}: tensor {name!r} is stored as {entry.dtype_name}, but by config.json it is not "
                    "quantized; its quantization_config does not belong to the weights, or is missing"
                )
            left.discard(name)
    # Scales and zeros have several names, and some are of the module around a quantized one.
    around = {name.rpartition(".")[0] for name in quantized}
    left = {name for name in left if _owner(name) not in quantized | around}
    if left:
        raise ConfigError(f"{place.of(min(left))}: {_unexpected(left)}")


def _owner(name: str) -> str:
    """The module of a tensor; bitsandbytes names tensors after a weight."""
    module, found, _ = name.partition(".weight.")
    return module if found else name.rpartition(".")[0]


def _check_mxfp4(place: _Place, tensors: Mapping[str, HeaderEntry], module: Module) -> set[str]:
    """Check the tensors of an expert in MXFP4; returns their names."""
    rows, columns = module.shape
    weight = f"{module.name}.weight"
    shapes = {weight + BLOCKS: (rows, columns // 32, 16), weight + SCALES: (rows, columns // 32)}
    if module.has_bias:
        shapes[f"{module.name}.bias"] = (rows,)
    for name, shape in shapes.items():
        _checked(place, tensors, name, shape)
    return set(shapes)


def _checked(
    place: _Place, tensors: Mapping[str, HeaderEntry], name: str, shape: tuple[int, ...]
) -> HeaderEntry:
    """The tensor of a name, which must be there in this shape."""
    if name not in tensors:
        raise ConfigError(f"{place.of(name)}: {_missing(name)}")
    if tensors[name].shape != shape:
        raise ConfigError(f"{place.of(name)}: {_other_shape(name, tensors[name].shape, shape)}")
    return tensors[name]


def _check_mlx(
    place: _Place, tensors: Mapping[str, HeaderEntry], module: Module, quantization: QuantizationSpec
) -> set[str]:
    """Check the tensors of a module in a form of MLX; returns their names."""
    form = quantization.part_of(module.name)
    assert form is not None
    rows, columns = (*module.shape, 0, 0)[:2]
    if columns % form.group_size:
        raise ConfigError(
            f"{place.of(f'{module.name}.scales')}: {module.name} has {columns} inputs, which are no whole groups of "
            f"{form.group_size}; the quantization of config.json does not belong to the weights"
        )
    groups = (rows, columns // form.group_size)
    weight, scales = f"{module.name}.weight", f"{module.name}.scales"
    shapes: dict[str, tuple[int, ...]] = {weight: (rows, columns * form.bits // 32), scales: groups}
    dtypes = {weight: ("U32",), scales: ("U8",) if form.symmetric else _PLAIN}
    if not form.symmetric:
        shapes[f"{module.name}.biases"] = groups
    if module.has_bias:
        shapes[f"{module.name}.bias"] = (rows,)
    for name, shape in shapes.items():
        dtype, expected = _checked(place, tensors, name, shape).dtype_name, dtypes.get(name, _PLAIN)
        if dtype not in expected:
            raise ConfigError(
                f"{place.of(name)}: tensor {name!r} is stored as {dtype}, expected {' or '.join(expected)}; "
                "the quantization of config.json does not belong to the weights"
            )
    return set(shapes)


def _is_quantized(module: Module, tensors: Mapping[str, HeaderEntry], spec: ModelSpec) -> bool:
    """Whether loading takes the quantized form of this module; its own tensors are checked there."""
    found = spec.quantization
    if found is None or not found.stored:
        return False
    may_be = module.is_linear or (module.name == "lm_head" and found.may_have_head)
    found = found.part_of(module.name) if may_be else None
    if found is None:
        return False
    if found.method == "gguf":  # experts in MXFP4, which have other names
        return False
    return any(f"{module.name}.{name}" in tensors for name in _QUANTIZED[found.method])


def _tensors_of(module: Module) -> list[tuple[str, tuple[int, ...]]]:
    tensors = [(f"{module.name}.{module.part}", module.shape)]
    return [*tensors, (f"{module.name}.bias", module.shape[:1])] if module.has_bias else tensors


def _missing(name: str) -> str:
    way_out = ", or serve its text with --language-model-only" if name.startswith(TOWER) else ""
    return f"tensor {name!r} is missing; download the model again, or check that config.json belongs to it{way_out}"


def _other_shape(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> str:
    way_out = (
        "; without its tower the model is served with --language-model-only" if name.startswith(TOWER) else ""
    )
    return (
        f"tensor {name!r} has the shape {list(found)}, but the configuration asks for {list(shape)}; the weights and "
        f"the configuration do not belong together{way_out}"
    )


def _unexpected(names: set[str]) -> str:
    return (
        f"unexpected tensor {min(names)!r} ({len(names)} in all); the weights belong to another architecture than the "
        "configuration says, check config.json"
    )


def _num_parameters(tensors: Mapping[str, HeaderEntry]) -> int:
    """Numbers in all tensors: what only loading would show of shared layers and experts."""
    return sum(math.prod(entry.shape) for entry in tensors.values())


def _with_own_head(folder: Path, files: list[SafetensorsFile], spec: ModelSpec) -> ModelSpec:
    """The architecture, untied if the files have an output head that is not equal to the embedding.

    transformers takes such a head, too, and not the embedding that config.json says.
    """
    if not spec.tie_word_embeddings or (spec.pooling is not None and not spec.pooling.label_tokens):
        return spec  # an embedder's head is not used
    places = [
        (file, file.entries[name]) for name in (_EMBEDDING, _HEAD) for file in files if name in file.entries
    ]
    if len(places) != 2 or _are_equal(*places):
        return spec
    logger.warning(
        "%s: tie_word_embeddings is true, but %s is not equal to %s: the head of the file is used; set "
        "tie_word_embeddings to false in config.json",
        folder,
        _HEAD,
        _EMBEDDING,
    )
    return structs.replace(spec, tie_word_embeddings=False)


def _are_equal(
    first: tuple[SafetensorsFile, HeaderEntry], second: tuple[SafetensorsFile, HeaderEntry]
) -> bool:
    """Whether two tensors have the same bytes, a part at a time."""
    (file, entry), (other_file, other) = first, second
    if (entry.dtype_name, entry.shape) != (other.dtype_name, other.shape):
        return False
    with _mapped(file.path) as data, _mapped(other_file.path) as other_data:
        for start in range(0, entry.num_bytes, _COMPARED_BYTES):
            stop = min(start + _COMPARED_BYTES, entry.num_bytes)
            part = data[entry.offset + start : entry.offset + stop]
            if part != other_data[other.offset + start : other.offset + stop]:
                return False
    return True


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
