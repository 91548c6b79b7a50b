"""`PoolingHead`: the layers after pooling: projections of an embedder, the classifier of a reranker. In float32."""

# Shapes: n texts, K hidden size, D numbers of a result.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..weights.dummy import DummyStore
from ..weights.reader import WeightReader
from ..weights.safetensors import SafetensorsStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...models.spec.encoder_spec import DenseSpec, PoolingSpec

_NORM_EPS: Final = 1e-5

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


class _Dense(NamedTuple):
    """A layer: weight [out, in], bias [out] or None, activation, weight [out] of a LayerNorm or None."""

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]
    norm: Tensor | None

    def apply(self, x: Tensor) -> Tensor:
        x = self.activation(functional.linear(x, self.weight, self.bias))
        return (
            x if self.norm is None else functional.layer_norm(x, self.norm.shape, self.norm, None, _NORM_EPS)
        )


class PoolingHead:
    """See the module; [n, K] float32 -> [n, D] float32."""

    def __init__(self, layers: Sequence[_Dense]) -> None:
        self._layers = layers

    def __call__(self, pooled: Tensor) -> Tensor:
        """Apply the layers in order, each text alone: a text's bits do not depend on the others of its step."""
        if len(pooled) > 1 and pooled.device.type == "cpu":
            return torch.cat([self(row) for row in pooled.split(1)])
        for layer in self._layers:
            pooled = layer.apply(pooled)
        return pooled


def load_pooling_head(
    spec: PoolingSpec | None,
    weights: WeightReader,
    folder: Path,
    device: torch.device,
    *,
    seed: int | None = None,
) -> PoolingHead | None:
    """Read the layers after pooling; None if the model has none.

    Args:
        weights: the model's own tensors; those that the layers take count as taken.
        folder: the model's, which has the folders of other layers.
        seed: of dummy weights; None: the files are read.

    Raises:
        ConfigError: a file or tensor is missing, or has another shape.
    """
    if spec is None or not spec.dense:
        return None
    layers = []
    for dense in spec.dense:
        reader = weights
        if dense.folder:
            store = SafetensorsStore(folder / dense.folder) if seed is None else DummyStore(seed)
            reader = WeightReader(store, torch.float32, device)
        layers.append(_read(dense, reader))
    return PoolingHead(layers)


def _read(dense: DenseSpec, reader: WeightReader) -> _Dense:
    width = dense.out_features
    return _Dense(
        reader.tensor(dense.weight, (width, dense.in_features), torch.float32),
        reader.tensor(dense.bias, (width,), torch.float32) if dense.bias else None,
        _ACTIVATIONS[dense.activation],
        reader.tensor(dense.norm, (width,), torch.float32) if dense.norm else None,
    )
