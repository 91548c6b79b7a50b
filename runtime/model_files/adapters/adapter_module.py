"""`AdapterModule`: one adapted module of an adapter, and where its two matrices are in the file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import ConfigError
from .base_modules import BaseModule


class AdapterModule(msgspec.Struct, frozen=True):
    """One module. Its output grows by `scale` * B (A x); for the embedding, A has a column for each token.

    Attributes:
        name: the base model's module.
        rank: rows of A, columns of B.
        scale: alpha / rank, or alpha / sqrt(rank).
        a, b: names of the tensors in the file, A [rank, inputs] and B [outputs, rank].
        heads: number of heads whose rows of B are stored in llama.cpp's order, see `model_runner.weights.gguf`; 0: the
            rows are in Hugging Face's order.
        a_is_transposed: A is stored as [inputs, rank].
    """

    name: str
    rank: int
    scale: float
    a: str
    b: str
    heads: int = 0
    a_is_transposed: bool = False


def check_shapes(
    path: Path,
    base: BaseModule,
    a: tuple[str, tuple[int, ...]],
    b: tuple[str, tuple[int, ...]],
    rank: int | None,
) -> int:
    """Check the shapes of A [rank, inputs] and B [outputs, rank], given with their tensors' names; returns the rank.

    Args:
        rank: the rank that the configuration says; None: it says none.

    Raises:
        ConfigError: they do not belong to the module, or to the rank.
    """
    (a_name, a_shape), (b_name, b_shape) = a, b
    found = a_shape[0] if len(a_shape) == 2 else 0
    if rank is None:
        rank = found
    for name, shape, wanted in (
        (a_name, a_shape, (rank, base.inputs)),
        (b_name, b_shape, (base.outputs, rank)),
    ):
        if shape == wanted and rank > 0:
            continue
        swapped = ""
        if a_shape == (base.outputs, rank) and b_shape == (rank, base.inputs):
            swapped = " (A and B are swapped)"
        elif shape == wanted[::-1]:
            swapped = " (it is transposed)"
        raise ConfigError(
            f"{path}: tensor {name!r} has the shape {list(shape)}, but {base.name} of this model with rank {rank} "
            f"needs {list(wanted)}{swapped}; the adapter belongs to another model, or its file is damaged"
        )
    return rank
