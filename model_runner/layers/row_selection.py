"""Which tokens of a step are computed further after a layer's attention: in the last layer those that need logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch

SelectRows = Callable[["Tensor"], "Tensor"]
"""Selects the rows of the tokens that are computed further from the rows of all tokens."""


def all_rows(x: Tensor) -> Tensor:
    """The `SelectRows` of all layers except the last: every row."""
    return x


def kept_adapters(batch: ForwardBatch, select_rows: SelectRows) -> AdapterRuns | None:
    """The adapters of the rows that `select_rows` selects; None: all use the base model."""
    if batch.adapters is None:
        return None
    return batch.adapters.tokens if select_rows is all_rows else batch.adapters.kept
