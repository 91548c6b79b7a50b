"""`check_block_values`: whether loading takes the values of a model whose weights are kept in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...models.weight_files.needed_tensors import needed_modules
from ..kernels.blocks.stored_rows import StoredRows
from ..kernels.quantized_weights import BlockWeight
from .block_format import BlockParts, check_finite
from .gguf import GGUFStore
from .reader import ModuleWeight, WeightReader
from .safetensors import SafetensorsStore

if TYPE_CHECKING:
    from ...models.source import ModelSource
    from ...models.spec.model_spec import ModelSpec


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
    store = GGUFStore(path, spec) if source.kind == "gguf" else SafetensorsStore(path, spec)
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
