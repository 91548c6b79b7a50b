"""`BlockFormat`: linear layers with block-quantized weights, read from a GGUF file or quantized while loading.

The output head is block-quantized too: in a small model it is a fifth of the weights. A head quantized while loading
has 8 bits, and a tied embedding reads its rows. Other embedding tables stay in the serving dtype.
"""

# Shapes: [N, K] a whole weight: N outputs, K inputs.

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.spec.quantization import BLOCK_LEN, is_of_expert, unnumbered
from ...models.weight_files.needed_tensors import needed_modules
from ...runtime.errors import ConfigError
from ..kernels.blocks.block_rounding import round_to_blocks
from ..kernels.blocks.stored_rows import StoredRows
from ..kernels.quantized_weights import BlockWeight, NotFiniteError
from ..ops.linear import LinearWithRows
from .gguf import GGUFStore
from .linear_format import QuantizedFormat
from .reader import ModuleWeight, Slice, WeightReader, read_plain
from .safetensors import SafetensorsStore

if TYPE_CHECKING:
    from ...models.source import ModelSource
    from ...models.spec.model_spec import ModelSpec
    from ...models.spec.quantization import QuantizationSpec
    from ..kernels.quantized import Part, QuantizedLinears
    from ..ops.linear import LinearWeight

logger = logging.getLogger(__name__)


class BlockParts:
    """`PartReader` of modules with block-quantized weights."""

    def __init__(self, quantization: QuantizationSpec) -> None:
        self._quantization = quantization
        self._warned_of: set[str] = set()

    def has(self, name: str, columns: int) -> bool:
        """Whether a module with `columns` inputs is block-quantized."""
        return self._quantization.form_of(name, columns) is not None

    def read(self, module: ModuleWeight, plain: Callable[[], Tensor] | None = None) -> Part:
        """See `PartReader`; `plain`: reads the weight in the serving dtype, with padding."""
        weights, name, shape, part = module
        form = self._quantization.form_of(name, shape[1])
        if form is not None and part is not None and part.axis == 1 and _parts_blocks(part):
            self._warn_of_cut(unnumbered(name), part)
            form = None
        if form is not None and self._quantization.stored:
            blocks = weights.blocks(f"{name}.weight", shape, part)
            if blocks is not None or self._quantization.method == "gguf":
                assert blocks is not None, f"{name} was seen in blocks when the file's header was read"
                return blocks
            form = None  # MLX leaves some modules plain without a list of them
        values = plain() if plain else read_plain([module])
        if form is None:
            return values
        made = round_to_blocks(values, form.bits, paired_scales=True)
        check_finite(made, name)
        return made

    def _warn_of_cut(self, name: str, part: Slice) -> None:
        """Warn once for all experts of a layer."""
        if name in self._warned_of:
            return
        self._warned_of.add(name)
        logger.warning(
            "%s stays in the serving dtype: a rank takes inputs %d to %d, and blocks of %d cannot be split",
            name,
            part.start,
            part.stop - 1,
            BLOCK_LEN,
        )


class BlockFormat(QuantizedFormat):
    """The `LinearFormat` of block-quantized models."""

    def __init__(self, quantization: QuantizationSpec, linears: QuantizedLinears) -> None:
        self._blocks = BlockParts(quantization)
        super().__init__(self._blocks, linears)

    def load(self, modules: Sequence[ModuleWeight]) -> LinearWeight:
        return self._pack([one.name for one in modules], [self._blocks.read(one) for one in modules])

    def dense(self, modules: Sequence[ModuleWeight]) -> Tensor:
        """The store converts the weights to the serving dtype."""
        return read_plain(modules)

    def head(self, module: ModuleWeight, rows: range, plain_rows: Callable[[], Tensor]) -> LinearWeight:
        part = self._rows(module, rows, plain_rows)
        return self._pack([module.name], [plain_rows() if part is None else part])

    def table(self, module: ModuleWeight, rows: range) -> LinearWithRows | None:
        part = self._rows(module, rows)
        packed = self._pack([module.name], [part]) if isinstance(part, BlockWeight | StoredRows) else None
        return packed if isinstance(packed, LinearWithRows) else None

    def _pack(self, names: Sequence[str], parts: Sequence[Part]) -> LinearWeight:
        """Pack the parts of these modules. The values of a file are checked while they are packed: it is read once."""
        try:
            return self._linears.pack(parts, as_one=any(is_of_expert(name) for name in names))
        except NotFiniteError:
            for name, part in zip(names, parts, strict=True):
                if isinstance(part, BlockWeight | StoredRows):
                    check_finite(part, name)
            raise

    def _rows(
        self, module: ModuleWeight, rows: range, plain_rows: Callable[[], Tensor] | None = None
    ) -> Part | None:
        """Rows of a head or a table, padded; None: they are not in blocks."""
        num_rows, columns = module.shape
        stop = min(rows.stop, num_rows)
        if rows.start >= stop or not self._blocks.has(module.name, columns):
            return None
        part = self._blocks.read(module._replace(part=Slice(0, rows.start, stop)), plain_rows)
        if stop == rows.stop or isinstance(part, Tensor):
            return part
        assert isinstance(part, BlockWeight | StoredRows), type(part)
        return part.padded(len(rows))


def _parts_blocks(part: Slice) -> bool:
    return part.start % BLOCK_LEN != 0 or part.stop % BLOCK_LEN != 0


def check_finite(weight: BlockWeight | StoredRows, name: str) -> None:
    """Refuse a weight in blocks with a scale or a minimum that is not finite.

    Raises:
        ConfigError: there is one.
    """
    if not weight.is_finite:
        raise ConfigError(
            f"{name}.weight holds values that are not finite, which block quantization cannot represent; the file is "
            "damaged: download the model again, or load it as it is with --quantization none"
        )


def check_block_values(source: ModelSource, spec: ModelSpec) -> None:
    """Read every weight that is kept in blocks, one at a time; of other forms loading takes any values.

    Args:
        source: the files.
        spec: the architecture, with the quantization that will be used, which has blocks.

    Raises:
        ConfigError: a weight has values that are not finite.
    """
    assert spec.quantization is not None
    path = Path(source.path)
    store = GGUFStore(path, spec, source.tower) if source.kind == "gguf" else SafetensorsStore(path, spec)
    weights = WeightReader(store, torch.bfloat16, torch.device("cpu"))
    parts = BlockParts(spec.quantization)
    head = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
    for module in needed_modules(spec):
        if module.is_linear or module.name == head:
            rows, columns = module.shape
            if parts.has(module.name, columns):
                part = parts.read(ModuleWeight(weights, module.name, (rows, columns)))
                if isinstance(part, BlockWeight | StoredRows):
                    check_finite(part, module.name)
