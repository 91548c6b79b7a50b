"""`ForwardBatch`: the input of a model for one step, on the device; complete when constructed.

It is passed as an argument and is never a global. A `StepExecutor` makes it from an `InputBatch`; models and layers
read it.
"""

# Shapes: T new tokens in the batch, W of them need logits.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .adapter_runs import AdapterBatch
    from .attention.backend import StepAttention
    from .memory.kv_pool import KVPool
    from .memory.state_pool import StateBatch


@dataclass(frozen=True, slots=True)
class StageStates:
    """Tensors that a pipeline stage hands to the next one; see `Layer`.

    Attributes:
        x: [T, hidden] output of the last block, not yet added to the residual stream.
        residual: [T, hidden] the residual stream.
    """

    x: Tensor
    residual: Tensor


class FeaturedStates(NamedTuple):
    """Result of a model that has a drafter.

    Attributes:
        hidden: [W, hidden] of the tokens that need logits; or [T, V] their logits, in recorded decodes.
        features: [T, F], see `StepFeatures`.
    """

    hidden: Tensor
    features: Tensor


class PlacesImages(Protocol):
    """Rows of images, as a model calls them where they enter."""

    def place(self, embedded: Tensor) -> Tensor:
        """Put the rows into the embeddings of tokens, [T, hidden], which may be overwritten."""
        ...

    def add_after(self, layer_id: int, residual: Tensor) -> Tensor:
        """The stream after a layer, [T, hidden], with what the rows add there."""
        ...


class ImageRows(NamedTuple):
    """Rows of the encoder in a step.

    Attributes:
        indices: [n] int64 into the T, ascending.
        vectors: [n, (1 + d) * hidden]: the embeddings of these tokens, and what is added to them after each of the
            first d layers, see `VisionSpec.deepstack_layers`.
    """

    indices: Tensor
    vectors: Tensor

    def num_parts(self, hidden_size: int) -> int:
        """1 + d."""
        return self.vectors.shape[1] // hidden_size

    def place(self, embedded: Tensor) -> Tensor:
        return embedded.index_copy_(0, self.indices, self._part(0, embedded.shape[1]))

    def add_after(self, layer_id: int, residual: Tensor) -> Tensor:
        if layer_id + 1 >= self.num_parts(residual.shape[1]):
            return residual
        return residual.index_add(0, self.indices, self._part(layer_id + 1, residual.shape[1]))

    def _part(self, number: int, hidden_size: int) -> Tensor:
        """[n, hidden] the embeddings (0), or what is added after layer `number` - 1."""
        return self.vectors[:, number * hidden_size : (number + 1) * hidden_size]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step on the device.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64.
        kv_pool, out_cache_loc: the pool and the slots, [T] int64, for the keys and values of the new tokens.
        attention: the planned attention of the step.
        logits_indices: [W] int64, ascending, the tokens that need logits or hidden states; the others are not
            computed after the last layer's attention. None: all T.
        token_types: [T] int64, for models with a table of them; None: all are 0.
        adapters: the adapters of the tokens; None: all tokens use the base model.
        states: the states of the requests; None: the model has no state layers.
        incoming: from the pipeline stage before; None: this is the first one. May be overwritten.
        images: what takes the place of embeddings of tokens; None: nothing does.
        rope_positions: [T] int64, the positions by which heads turn, or [3, T] with axes, see `VisionSpec`; None: those
            in `positions`.
    """

    input_ids: Tensor
    positions: Tensor
    kv_pool: KVPool
    out_cache_loc: Tensor
    attention: StepAttention
    logits_indices: Tensor | None = None
    token_types: Tensor | None = None
    adapters: AdapterBatch | None = None
    states: StateBatch | None = None
    incoming: StageStates | None = None
    images: PlacesImages | None = None
    rope_positions: Tensor | None = None

    @property
    def wants_nothing(self) -> bool:
        """Whether no token needs logits, see `Decoder.stores_only`."""
        return self.logits_indices is not None and not self.logits_indices.shape[0]
