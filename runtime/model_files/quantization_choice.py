"""`with_quantisation`: a model in the form that `--quantization` wants its weights in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from ..errors import ConfigError
from .quantization import MADE, QuantisationSpec

if TYPE_CHECKING:
    from .model_spec import ModelSpec
    from .quantization import Quantization


def with_quantisation(spec: ModelSpec, asked: Quantization | None) -> ModelSpec:
    """The model as `--quantization` wants it; None: as its files say.

    Raises:
        ConfigError: the files say something else, or hold no weights of that kind.
    """
    found = spec.quantisation
    if asked is None or (found is not None and found.method == asked):
        return spec
    if asked == "none":
        # What GGUF calls a tensor is read as plain numbers by whoever does not ask for its blocks.
        if found is None or found.method == "gguf" or not found.stored:
            return structs.replace(spec, quantisation=None)
        return structs.replace(spec, quantisation=structs.replace(found, kept=False))
    if found is not None and (found.method != "gguf" or asked not in MADE):
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's weights are {found.method}; leave --quantization out"
        )
    if asked not in MADE:
        raise ConfigError(
            f"quantization is {asked}, but the checkpoint's weights are not quantised, and only {', '.join(MADE)} can "
            f"be made while loading; name a checkpoint in {asked}, use one of those, or leave --quantization out"
        )
    return structs.replace(spec, quantisation=QuantisationSpec(method=asked, stored=False))
