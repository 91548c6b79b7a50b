"""Weights of a GGUF file, as stored or converted to the serving dtype, under Hugging Face names and in its layout.

llama.cpp stores some tensors in another layout. They are converted back here, so that models know one layout:

- It orders the rows of Llama's q and k projections so that rotary pairs are adjacent; Hugging Face pairs the first
  half of a head with the second. Only some architectures are stored in this order (`GGUFFamily.neighbors`).
- Gemma's norm weights w are stored as 1 + w, and those of Qwen3.5.
- The value heads of Qwen3.5's delta nets are stored in another order (`GGUFFamily.tiled_values`).
- State layers have -exp(A_log); some of their vectors have a further axis (`full_shape`).
- The experts of a layer are one tensor; Hugging Face has one tensor per expert.
- The matrix from latents to keys and values is two tensors in newer files, see `SplitKV`.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from ...models.families.registry import gguf_of
from ...models.gguf.gguf_file import GGUFFile, TensorInfo, dequantize
from ...models.gguf_names import A_LOG, find_split_kv, full_shape, is_not_read, stored_names
from ...models.spec.quantization import GGUF_FORMS
from ...models.weight_files.gguf_tower_tensors import find_parts, gguf_tower_names
from ...models.weight_files.vision_tensors import POOLED_NORM, TOWER
from ...runtime.errors import ConfigError
from ..kernels.blocks.stored_rows import StoredRows
from ..kernels.blocks.tensor_rows import TensorRows
from ..kernels.quantized_weights import BLOCK_SIZE
from .gguf_order import StoredOrder, whole_blocks
from .reader import Slice, cut_from_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...models.spec.model_spec import ModelSpec

_STATE_LAYER: Final = ".linear_attn."
_ROWS_AT_A_TIME: Final = 4096
"""Rows converted to float32 at a time, before the serving dtype: bounds the temporary for a large embedding."""


class _Stored(NamedTuple):
    """Location of a Hugging Face tensor: a tensor of the file, or one of the experts stacked in it."""

    info: TensorInfo
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.expert is None else self.info.shape[1:]


class GGUFStore:
    """The tensors of one GGUF model."""

    def __init__(self, path: Path, spec: ModelSpec, tower: str = "") -> None:
        """Open the file, and that of a tower.

        Raises:
            ConfigError: the file is truncated or damaged, or its number of experts differs from the model's.
        """
        self._file = GGUFFile(path, with_lists=False)  # another process has the vocabulary
        if tower:
            self._file.add_tower(GGUFFile(tower, with_lists=False))
        family = gguf_of(spec.model_type)
        self._order = StoredOrder(spec)
        self._norms_are_offset = family is not None and family.offset_norms
        self._stored = {
            hf: _Stored(self._file.tensors[gguf], expert)
            for hf, gguf, expert in stored_names(spec)
            if gguf in self._file.tensors
        }
        for hf, gguf in gguf_tower_names(spec):
            if gguf in self._file.tensors:
                self._stored[hf] = _Stored(self._file.tensors[gguf])
        self._split = find_split_kv(self._file, spec) | find_parts(self._file, spec)
        self._not_read = {name for name in self._file.tensors if is_not_read(spec, name)}
        self._check_stacks(spec)

    def _check_stacks(self, spec: ModelSpec) -> None:
        for info, expert in self._stored.values():
            if expert != 0 or spec.experts is None or info.shape[0] == spec.experts.num_experts:
                continue
            raise ConfigError(
                f"{self._file.path}: {info.name} holds {info.shape[0]} experts, the file's metadata says "
                f"{spec.experts.num_experts}; the file is damaged: download it again"
            )

    def names(self) -> set[str]:
        """Tensors without a Hugging Face name keep the file's name."""
        known = {stored.info.name for stored in self._stored.values()}
        known |= {part.name for parts in self._split.values() for part in parts}
        return set(self._stored) | set(self._split) | (set(self._file.tensors) - known - self._not_read)

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        stored = self._split.get(name) or self._stored.get(name)
        return None if stored is None else full_shape(stored.shape, wanted)

    def read(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """A part is cut from the whole tensor, because rows may be stored in another order."""
        if part is not None:
            stored = self._split.get(name) or self._stored[name]
            shape = stored.shape
            if out.ndim == 1:  # see `full_shape`
                shape = (math.prod(shape),)
            elif out.ndim > len(shape) == 2:
                shape = (shape[0], *out.shape[1:])
            cut_from_whole(partial(self.read, name), shape, out, part)
            return
        if name in self._split:
            split = self._split[name]
            out.copy_(torch.from_numpy(split.read(self._file)))
            for one in split:
                self._file.release(one)
            return
        info, expert = self._stored[name]
        raw = self._file.raw(info)
        if expert is not None:
            raw = raw[expert]
        release = self._release_of(self._stored[name])
        try:
            if out.ndim > len(info.shape):  # see `full_shape`
                out = out.view(info.shape)
            if out.ndim == 1:  # a vector: its bytes are one row
                values = torch.from_numpy(dequantize(info, raw)).flatten()
                if self._norms_are_offset and name.endswith("norm.weight") and not self._is_plain(name):
                    values = values - 1.0
                if name.endswith(f".{A_LOG}"):
                    values = torch.log(-values)
                out.copy_(values)
            else:
                for start in range(0, out.shape[0], _ROWS_AT_A_TIME):
                    rows = slice(start, start + _ROWS_AT_A_TIME)
                    out[rows].copy_(torch.from_numpy(dequantize(info, raw[rows])))
                    release()
        except ConfigError as error:
            raise ConfigError(f"{self._file.path}: {error}") from None
        order, inputs = self._order.rows(name, len(out)), self._order.inputs(name)
        if order is not None:
            out.copy_(out[order])
        if inputs is not None:
            out.copy_(out[:, inputs])

    def blocks(self, name: str, part: Slice | None = None) -> StoredRows | None:
        """Nothing is read here, and later only what belongs to the part."""
        if name in self._split:
            return None
        stored = self._stored[name]
        info, expert = stored
        if info.ggml_type.name not in GGUF_FORMS or len(stored.shape) != 2:
            return None
        raw = self._file.raw(info)
        if expert is not None:
            raw = raw[expert]
        order, inputs = self._order.rows(name, len(raw)), self._order.inputs(name)
        blocks = None if inputs is None else whole_blocks(inputs)
        if part is not None and part.axis == 0:
            outputs = slice(part.start, part.stop)
            raw, order = (raw[outputs], None) if order is None else (raw, order[outputs])
        elif part is not None:
            taken = slice(part.start // BLOCK_SIZE, part.stop // BLOCK_SIZE)
            blocks = (torch.arange(stored.shape[1] // BLOCK_SIZE) if blocks is None else blocks)[taken]
        return StoredRows((TensorRows(raw, info.ggml_type, order, blocks, self._release_of(stored)),))

    def _release_of(self, stored: _Stored) -> Callable[[], None]:
        """Gives back the memory of a tensor's pages, or of an expert's."""
        info, expert = stored
        if expert is None:
            return partial(self._file.release, info)
        num_bytes = info.num_bytes // info.shape[0]
        return partial(self._file.release, info, expert * num_bytes, (expert + 1) * num_bytes)

    @staticmethod
    def _is_plain(name: str) -> bool:
        is_of_tower = name.startswith(TOWER) and not name.startswith(POOLED_NORM)
        return _STATE_LAYER in name or is_of_tower

    def describe(self, name: str) -> str:
        return str(self._file.paths[-1] if name.startswith(TOWER) else self._file.path)
