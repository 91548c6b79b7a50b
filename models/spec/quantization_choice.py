"""`with_quantization`: a model with the quantization that `--quantization` selects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from ...runtime.errors import ConfigError
from .quantization import MADE, QuantizationSpec

if TYPE_CHECKING:
    from ...runtime.config.model_choice import Quantization
    from .model_spec import ModelSpec


def with_quantization(spec: ModelSpec, asked: Quantization | None) -> ModelSpec:
    """The model with this quantization; None: as in its files.

    Raises:
        ConfigError: the files have another quantization, or none that can be used.
    """
    found = spec.quantization
    if asked is None or (found is not None and found.method == asked):
        return spec
    if asked == "none":
        # GGUF tensors in blocks are read as plain values unless blocks are requested.
        if found is None or found.method == "gguf" or not found.stored:
            return structs.replace(spec, quantization=None)
        return structs.replace(spec, quantization=structs.replace(found, kept=False))
    if found is not None and (found.method != "gguf" or asked not in MADE):
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's weights are {found.method}; omit --quantization"
        )
    if asked not in MADE:
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's weights are not quantized, and only {', '.join(MADE)} can "
            f"be made while loading; name a checkpoint in {asked}, use one of those, or omit --quantization"
        )
    return structs.replace(spec, quantization=QuantizationSpec(method=asked, stored=False))
