"""`MEASURED`: the faster backend for decodes, by GPU and head shape, where the general order of backends is wrong.

`python3 benchmarks/gpu/path.py benchmarks.gpu.bench --only attention` measures all of them on a GPU and prints the
lines. Until one has run, the table is empty and the general order holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec

Choices = Mapping[tuple[tuple[int, int], int], str]
"""(compute capability, query heads per KV head) -> name of the backend for decodes."""

MEASURED: Final[Choices] = {}


def measured_decodes(spec: ModelSpec, capability: tuple[int, int], choices: Choices) -> str | None:
    """The backend for decodes of a model; None: not measured, or its layers have several head shapes."""
    shapes = {spec.heads_of(layer_id) for layer_id in range(spec.num_layers)}
    if len(shapes) != 1:
        return None
    return choices.get((capability, spec.num_heads // shapes.pop().num_kv_heads))
