"""`CausalLM`: what every structure builds; the structure of a model's family is imported on demand."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from ...models.families.registry import FAMILIES
from ...models.weight_files.needed_tensors import is_unused
from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..forward_batch import FeaturedStates, ForwardBatch, StageStates
    from ..model_context import ModelContext


class CausalLM(Protocol):
    """A decoder with a language-model head. The two are separate calls because few positions need logits.

    Encoders have the same form, and no logits.

    Attributes:
        logits_dtype: see `OutputHead`.
    """

    @property
    def logits_dtype(self) -> torch.dtype: ...

    def forward(self, batch: ForwardBatch) -> Tensor | StageStates | FeaturedStates:
        """Run the batch's tokens through all layers: [W, hidden] of those that need logits, before the final norm.

        Of a pipeline stage that is not the last one: all tokens after its own layers. With features if the model has
        `Decoder.feature_layers`.
        """
        ...

    def final_states(self, hidden: Tensor) -> Tensor:
        """The model's output at rows of `forward`'s result, after the final norm; [n, hidden] -> [n, hidden]."""
        ...

    def logits(self, hidden: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """Turn rows of `forward`'s result into logits: [n, hidden] -> [n, vocab]. Not called for encoders.

        Args:
            adapters: of the n rows; None: all use the base model.
        """
        ...

    def write_logits(self, hidden: Tensor, adapters: AdapterRuns | None, out: Tensor) -> None:
        """The result of `logits`, into `out`: [n, vocab] in `logits_dtype`, contiguous."""
        ...


def logits_of(model: CausalLM, hidden: Tensor, adapters: AdapterRuns | None) -> Tensor:
    """Models without adapters take no second argument."""
    return model.logits(hidden) if adapters is None else model.logits(hidden, adapters)


def build_model(context: ModelContext) -> CausalLM:
    """Build the model with its weights.

    Raises:
        ConfigError: the architecture is unknown, or a weight is missing in the checkpoint.
    """
    spec = context.spec
    family = FAMILIES.get(spec.model_type)
    if family is None:
        raise ConfigError(
            f"model_type {spec.model_type!r} is not supported; supported are: {', '.join(FAMILIES)}"
        )
    if not family.is_encoder:
        context.weights.ignore_where(partial(is_unused, spec))
    structure: Any = import_module(f".{family.structure}", __package__)
    model: CausalLM = structure.build(context)
    return model
