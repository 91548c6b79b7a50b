"""`AdapterLayers`: the layers of a model that adapters can change, with the memory of their slots.

Layers are added while the model is built; afterwards each part of an adapter is looked up here by its module's name. A
rank takes the part of the matrices that belongs to its part of the layer: of a layer cut by outputs the rows of B, of
one cut by inputs the columns of A.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F

from ...models.adapters.base_modules import EMBEDDING, HEAD, BaseModules
from ...models.adapters.read_adapter import adapter_fingerprint
from ...models.gguf.gguf_file import GGUFFile, is_gguf
from ...models.weight_files.safetensors_header import read_header
from ...runtime.errors import ConfigError
from ..kernels.plain_lora import PlainDelta, PlainEmbeddingDelta
from ..ops.deltas import DeltaShape
from ..weights.gguf_order import pairs_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from ...models.spec.model_spec import ModelSpec
    from ...runtime.adapter_spec import AdapterSpec
    from ..ops.deltas import LowRankDelta, MakeDeltas, PackedDelta

    Span = tuple[int, int]

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_modules(spec: AdapterSpec) -> dict[str, LowRank]:
    """The matrices by module, float32; B is multiplied by the module's scale.

    Raises:
        ConfigError: the files are missing or not those of the spec any more, or a number is not finite.
    """
    path = spec.file
    if adapter_fingerprint(path, spec.modules) != spec.fingerprint:
        raise ConfigError(f"{path}: has changed since adapter {spec.name!r} was loaded; load it again")
    read = _gguf_reader(path) if is_gguf(path) else _safetensors_reader(path)
    modules = {}
    for module in spec.modules:
        a, b = read(module.a), read(module.b)
        for name, tensor in ((module.a, a), (module.b, b)):
            if not bool(torch.isfinite(tensor.sum(dtype=torch.float64))) or not bool(
                torch.isfinite(tensor).all()
            ):
                raise ConfigError(
                    f"{path}: tensor {name!r} holds a value that is not finite (NaN or infinity); train or download "
                    "the adapter again"
                )
        if module.a_is_transposed:
            a = a.T
        if module.heads:
            b = pairs_apart(b, module.heads)
        modules[module.name] = LowRank(a, b * module.scale)
    return modules


def _safetensors_reader(path: Path) -> Callable[[str], Tensor]:
    entries = read_header(path).entries
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error

    def read(name: str) -> Tensor:
        entry = entries.get(name)
        if entry is None:
            raise ConfigError(f"{path}: tensor {name!r} is missing; load the adapter again")
        count = entry.num_bytes // _DTYPES[entry.dtype_name].itemsize
        flat = torch.frombuffer(data, dtype=_DTYPES[entry.dtype_name], count=count, offset=entry.offset)
        return flat.view(entry.shape).to(torch.float32, copy=True)

    return read


def _gguf_reader(path: Path) -> Callable[[str], Tensor]:
    file = GGUFFile(path)
    return lambda name: torch.from_numpy(file.read(name))


class LowRank(NamedTuple):
    """The matrices of one module: A [rank, inputs] and B [outputs, rank], which includes the adapter's scale."""

    a: Tensor
    b: Tensor


class _Part(NamedTuple):
    """The part of a module's matrices that a layer takes; `rows` of B may exceed its end, which is zeros then."""

    name: str
    rows: Span | None = None
    columns: Span | None = None

    def of(self, matrices: LowRank) -> LowRank:
        a, b = matrices
        if self.columns is not None:
            a = a[:, slice(*self.columns)]
        if self.rows is not None:
            found = b[slice(*self.rows)]
            b = F.pad(found, (0, 0, 0, _length(self.rows) - len(found)))
        return LowRank(a, b)


def _length(span: Span) -> int:
    start, stop = span
    return stop - start


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """One layer: the parts of modules whose outputs are stacked in it."""

    delta: LowRankDelta
    parts: tuple[_Part, ...]
    scale: float = 1.0

    def pack(self, modules: Mapping[str, LowRank]) -> PackedDelta | None:
        """The layer's part of an adapter in the layout of its kernel; None if the adapter does not change it."""
        found = [modules.get(part.name) for part in self.parts]
        if not any(found):
            return None
        cut = [
            None if matrices is None else part.of(matrices)
            for part, matrices in zip(self.parts, found, strict=True)
        ]
        if self.scale != 1.0:
            cut = [
                None if matrices is None else LowRank(matrices.a, matrices.b * self.scale) for matrices in cut
            ]
        return self.delta.pack(cut)


class AdapterLayers:
    """The adapted layers of one model.

    Attributes:
        num_slots: slots with memory, and slot 0, the base model.
        max_rank: the largest rank of an adapter.
        layers: in the order in which they were added.
        dtype: of the adapters' weights.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        max_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        targets: Collection[str] | None = None,
    ) -> None:
        """Start without layers.

        Args:
            spec: the whole model.
            max_slots: adapters that steps can use at the same time.
            targets: last part of the names of the modules that get memory, such as "q_proj" and "lm_head"; None: all
                linear layers without the head.
        """
        self.num_slots = max_slots + 1
        self.max_rank = max_rank
        self.dtype = dtype
        self._device = device
        self.layers: list[AdaptedLayer] = []
        self._known = BaseModules(spec).by_name
        self._targets = None if targets is None else frozenset(targets)

    def has(self, name: str) -> bool:
        """Whether a module of this name gets memory."""
        if name not in self._known:  # such as a router
            return False
        if self._targets is None:
            return name not in (EMBEDDING, HEAD)
        return name.rpartition(".")[2] in self._targets

    def linear(
        self,
        make: MakeDeltas,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        *,
        rows: Sequence[Span] | None = None,
        columns: Span | None = None,
    ) -> LowRankDelta | None:
        """Add a linear layer; None if none of its modules is adapted.

        Args:
            in_features, out_features: of the whole modules.
            rows: (start, stop) of the outputs of each module that the layer has; None: all.
            columns: of the inputs that it has; None: all.
        """
        if not any(map(self.has, names)):
            return None
        inputs = in_features if columns is None else _length(columns)
        outputs = tuple(out_features) if rows is None else tuple(map(_length, rows))
        delta = make.linear(self._shape(inputs, outputs))
        spans: Sequence[Span | None] = [None] * len(names) if rows is None else rows
        parts = tuple(_Part(name, span, columns) for name, span in zip(names, spans, strict=True))
        self.layers.append(AdaptedLayer(delta, parts))
        return delta

    def embedding(
        self, make: MakeDeltas, name: str, vocab_size: int, size: int, scale: float | None
    ) -> LowRankDelta | None:
        """Add the embedding; every rank has all of it. `scale`: a factor of the embedding's vectors."""
        if not self.has(name):
            return None
        delta = make.embedding(self._shape(vocab_size, (size,)))
        self.layers.append(AdaptedLayer(delta, (_Part(name),), 1.0 if scale is None else scale))
        return delta

    def _shape(self, inputs: int, outputs: tuple[int, ...]) -> DeltaShape:
        return DeltaShape(inputs, outputs, self.num_slots, self.max_rank, self.dtype, self._device)

    @property
    def module_names(self) -> set[str]:
        """Names of the modules that adapters can change."""
        return {part.name for layer in self.layers for part in layer.parts if self.has(part.name)}

    @property
    def are_recordable(self) -> bool:
        """Whether no layer reads on the host which tokens use which slot."""
        return not any(isinstance(layer.delta, PlainDelta | PlainEmbeddingDelta) for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(layer.delta.num_bytes for layer in self.layers)
