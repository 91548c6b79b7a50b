"""`CONNECTORS`: from the patches of a tower to rows for the language model, by family. Names: `vision_tensors`."""

# Shapes: P patches of a tile, K width of the tower, f patches of a row in each direction, H hidden size of the language
# model.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from ...models.weight_files.vision_tensors import (
    ADAPTER_FIRST,
    ADAPTER_SECOND,
    MLP_FIRST,
    MLP_NORM,
    MLP_SECOND,
    NEWLINE,
    NEWLINE_PART,
    POOLED,
    POOLED_NORM,
    POOLED_PROJECTION,
    PROJECTION,
)
from ..layers.linear import Linear
from ..layers.norm import LayerNorm, UnitOffsetRMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.spec.vision_spec import VisionFamily, VisionSpec
    from ..model_context import ModelContext


_NORM_EPS: Final = 1e-5  # torch's default


class Connector(Protocol):
    """Makes the rows of a tile."""

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        """Take the weights from a checkpoint; `context` makes plain linear layers."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[P, K] -> [P / f^2, H]; of LLaVA-NeXT, one row more."""
        ...


class JoinedConnector:
    """Puts patches side by side and projects them (Idefics3)."""

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        self._grid, self._factor = spec.grid, spec.scale_factor
        self._projection = Linear(
            context, [PROJECTION], spec.joined_size, [context.spec.hidden_size], bias=False
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._projection(joined(x, self._grid, self._factor))


class PooledConnector:
    """Takes the mean of patches, norms and projects it (Gemma 3)."""

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        self._rows, self._factor = spec.grid // spec.scale_factor, spec.scale_factor
        size = spec.hidden_size
        self._norm = UnitOffsetRMSNorm(context, POOLED_NORM, size, spec.norm_eps)
        name = f"{POOLED}.{POOLED_PROJECTION}"
        weight = context.weights.tensor(name, (size, context.spec.hidden_size))
        self._project = context.ops.pack_linear(weight.t().contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        rows, factor = self._rows, self._factor
        pooled = x.view(rows, factor, rows, factor, -1).mean(dim=(1, 3)).view(rows * rows, -1)
        return self._project(self._norm(pooled), None)


class MLPConnector:
    """Two linear layers, for a patch (LLaVA), a merged row (Pixtral), or normed patches side by side (InternVL)."""

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        self._grid, self._factor = spec.grid, spec.scale_factor
        size, row_size = spec.joined_size, context.spec.hidden_size
        if spec.family == "pixtral":
            size = spec.hidden_size
        self._norm = (
            LayerNorm(context, MLP_NORM, size, _NORM_EPS, bias=True) if spec.family == "internvl" else None
        )
        self._first = Linear(context, [MLP_FIRST], size, [row_size], bias=spec.has_mlp_bias)
        self._second = Linear(context, [MLP_SECOND], row_size, [row_size], bias=spec.has_mlp_bias)
        self._activate = context.ops.activate

    def __call__(self, x: Tensor) -> Tensor:
        if self._norm is not None:
            x = self._norm(joined(x, self._grid, self._factor))
        return self._second(self._activate(self._first(x), "gelu"))


class NewlineConnector(MLPConnector):
    """Two linear layers, and one row more for each tile, which ends rows of patches in a prompt (LLaVA-NeXT)."""

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        super().__init__(context, spec)
        shape = (context.spec.hidden_size,)
        self._newline = context.weights.tensor(f"{NEWLINE}.{NEWLINE_PART}", shape)[None]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat((super().__call__(x), self._newline))


class AdapterConnector:
    """Two linear layers with an activation after each, for patches side by side, and a projection (Llama 4)."""

    def __init__(self, context: ModelContext, spec: VisionSpec) -> None:
        self._grid, self._factor, size = spec.grid, spec.scale_factor, spec.connector_size
        self._first = Linear(context, [ADAPTER_FIRST], spec.joined_size, [size], bias=False)
        self._second = Linear(context, [ADAPTER_SECOND], size, [size], bias=False)
        self._projection = Linear(context, [MLP_FIRST], size, [context.spec.hidden_size], bias=False)
        self._activate = context.ops.activate

    def __call__(self, x: Tensor) -> Tensor:
        x = self._activate(self._first(joined(x, self._grid, self._factor)), "gelu")
        return self._projection(self._activate(self._second(x), "gelu"))


def joined(x: Tensor, grid: int, factor: int) -> Tensor:
    """The pixel shuffle of Idefics3: each f x f patches become one row; [P, K] -> [P / f^2, f^2 * K]."""
    rows = grid // factor
    return x.view(rows, factor, rows, factor, -1).transpose(1, 2).reshape(rows * rows, -1)


CONNECTORS: Final[dict[VisionFamily, type[Connector]]] = {
    "idefics3": JoinedConnector,
    "gemma3": PooledConnector,
    "llava": MLPConnector,
    "llava_next": NewlineConnector,
    "internvl": MLPConnector,
    "llama4": AdapterConnector,
}
