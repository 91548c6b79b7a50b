"""`AdapterLayers`: the layers of a model that adapters can change, with the memory of their slots.

Layers are added while the model is built; afterwards each part of an adapter is looked up here by its module's name. A
rank takes the part of the matrices that belongs to its part of the layer: of a layer cut by outputs the rows of B, of
one cut by inputs the columns of A.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ...models.adapters.base_modules import EMBEDDING, EXPERTS, HEAD, BaseModules, target_of
from ...models.adapters.read_adapter import adapter_fingerprint
from ...models.gguf.gguf_file import GGUFFile, is_gguf
from ...models.weight_files.safetensors_header import read_header
from ...runtime.errors import ConfigError
from ..adapter_runs import runs_of
from ..kernels.plain_lora import PlainDelta, PlainEmbeddingDelta
from ..ops.deltas import DeltaShape, ExpertChanges, PackedDelta
from ..weights.gguf_order import pairs_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from ...models.spec.experts_spec import ExpertsSpec
    from ...models.spec.model_spec import ModelSpec
    from ...runtime.adapter_spec import AdapterModule, AdapterSpec
    from ..adapter_runs import AdapterRuns
    from ..ops.deltas import LowRankDelta, MakeDeltas

    Span = tuple[int, int]

_NUMBER: Final = re.compile(rf"\.{EXPERTS}\.\d+\.")
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
        found = LowRank(a, b * module.scale)
        for n, part in enumerate(_of_experts(module, found)) if module.num_experts else ():
            modules[module.name.replace(f"{EXPERTS}.*.", f"{EXPERTS}.{n}.")] = part
        if not module.num_experts:
            modules[module.name] = found
    return modules


def _of_experts(module: AdapterModule, stack: LowRank) -> Iterator[LowRank]:
    """The matrices of each expert of a stack, see `AdapterModule`."""
    assert module.rows is not None
    num, rows = module.num_experts, slice(*module.rows)
    if module.a_is_transposed:
        a, b = stack.a.unflatten(0, (-1, num)), stack.b[:, rows].unflatten(0, (num, -1))
        return (LowRank(a[:, n], b[n].T) for n in range(num))
    a, b = stack.a.unflatten(0, (num, -1)), stack.b[rows].unflatten(1, (-1, num))
    return (LowRank(a[n], b[:, :, n]) for n in range(num))


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

    def put(self, slot: int, packed: PackedLayer | None) -> None:
        """Copy an adapter into a slot; None: it does not change this layer."""
        assert packed is None or isinstance(packed, PackedDelta)
        self.delta.put(slot, packed)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self.delta.num_bytes

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


PackedLayer = PackedDelta | tuple[tuple[PackedDelta | None, ...], tuple[PackedDelta | None, ...]]
"""A layer's part of an adapter; for experts, the part of each expert in each of the two products."""


class AdaptedExperts:
    """The experts of a layer. Slot s of expert e is slot s * E + e of the memory of its two products, for E experts."""

    def __init__(self, first: Sequence[AdaptedLayer], second: Sequence[AdaptedLayer], num_slots: int) -> None:
        """Take the two products of each expert, each with one memory for all."""
        self._products = (first, second)
        self._is_changed = [False] * num_slots
        self.parts = tuple(part for layer in (*first, *second) for part in layer.parts)

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(product[0].num_bytes for product in self._products)

    def pack(self, modules: Mapping[str, LowRank]) -> PackedLayer | None:
        """See `AdaptedLayer`."""
        first, second = (tuple(layer.pack(modules) for layer in product) for product in self._products)
        return (first, second) if any(first) or any(second) else None

    def put(self, slot: int, packed: PackedLayer | None) -> None:
        """See `AdaptedLayer`."""
        assert not isinstance(packed, PackedDelta)
        self._is_changed[slot] = packed is not None
        for n, product in enumerate(self._products):
            for expert, layer in enumerate(product):
                layer.put(slot * len(product) + expert, None if packed is None else packed[n][expert])

    def of_step(self, expert_ids: Tensor, adapters: AdapterRuns) -> ExpertChanges | None:
        """The changes of tokens with these experts, [T, k] int64, which are read on the host; None: there are none."""
        runs = adapters.on_host()
        if not any(self._is_changed[run.slot] for run in runs):
            return None
        num_experts, (first, second) = len(self._products[0]), self._products
        ids = expert_ids.flatten().cpu().numpy()
        slots = np.repeat([run.slot for run in runs], [run.last - run.first for run in runs])
        order = np.argsort(ids, kind="stable")
        own = slots[order // expert_ids.shape[1]] * num_experts + ids[order]
        device = expert_ids.device
        rows = runs_of(own.astype(np.int64), lambda plan: torch.from_numpy(plan).to(device))
        return ExpertChanges(first[0].delta, second[0].delta, rows)


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
        self.layers: list[AdaptedLayer | AdaptedExperts] = []
        self._known = BaseModules(spec).by_name
        self._targets = None if targets is None else frozenset(targets)

    def has(self, name: str) -> bool:
        """Whether a module of this name gets memory."""
        if name not in self._known:  # such as a router
            return False
        if self._targets is None:
            return name not in (EMBEDDING, HEAD) and target_of(name) != EXPERTS
        return target_of(name) in self._targets

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

    def experts(
        self, make: MakeDeltas, name: str, experts: ExpertsSpec, size: int, span: Span | None
    ) -> AdaptedExperts | None:
        """Add the experts of a layer; None if they are not adapted.

        Args:
            name: of the module of all of them.
            size: inputs of an expert.
            span: (start, stop) of its width that the layer has; None: all.
        """
        if self._targets is None or EXPERTS not in self._targets:
            return None
        names, num = experts.names, experts.num_experts
        width = experts.intermediate_size if span is None else _length(span)
        outputs = (width,) * len(experts.first_parts)
        shapes = (self._shape(size, outputs), self._shape(width, (size,)))
        first, second = (make.linear(shape._replace(num_slots=self.num_slots * num)) for shape in shapes)
        added = AdaptedExperts(
            [
                AdaptedLayer(first, tuple(_Part(f"{name}.{n}.{part}", span) for part in experts.first_parts))
                for n in range(num)
            ],
            [AdaptedLayer(second, (_Part(f"{name}.{n}.{names.down}", None, span),)) for n in range(num)],
            self.num_slots,
        )
        self.layers.append(added)
        return added

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
        """Names of the modules that adapters can change; those of experts also as in stacks."""
        found = {part.name for layer in self.layers for part in layer.parts if self.has(part.name)}
        return found | {_NUMBER.sub(f".{EXPERTS}.*.", name) for name in found}

    @property
    def change_experts(self) -> bool:
        """Whether adapters may change experts."""
        return any(isinstance(layer, AdaptedExperts) for layer in self.layers)

    @property
    def are_recordable(self) -> bool:
        """Whether no layer reads on the host which tokens use which slot."""
        host = PlainDelta | PlainEmbeddingDelta
        return not any(
            isinstance(layer, AdaptedExperts) or isinstance(layer.delta, host) for layer in self.layers
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return sum(layer.num_bytes for layer in self.layers)
