"""`ReadRows`: which rows of a step's hidden states are read after the model, on the device."""

# Shapes: S requests that sample in this step, R rows of logits, W tokens that need logits, K hidden size.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..structures.causal_lm import logits_of
from .executor import StepOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..input_batch import InputBatch, Int64s
    from ..structures.causal_lm import CausalLM


class ReadRows(NamedTuple):
    """The indices of an `InputBatch` on the device, int64.

    Attributes:
        sampled: [S] pool rows of the requests that sample.
        logits_indices, sample_indices: see `InputBatch`; None: all, in order.
        cut_indices: see `InputBatch`; None: there are none.
    """

    sampled: Tensor
    logits_indices: Tensor | None
    sample_indices: Tensor | None
    cut_indices: Tensor | None

    @staticmethod
    def arrays(batch: InputBatch) -> list[Int64s]:
        """The arrays to upload; empty ones for those that are None."""
        nothing = batch.cut_indices[:0]
        return [
            batch.layout.rows[batch.sampled_idx],
            nothing if batch.logits_indices is None else batch.logits_indices,
            nothing if batch.sample_indices is None else batch.sample_indices,
            batch.cut_indices,
        ]

    @classmethod
    def of(cls, batch: InputBatch, uploaded: Sequence[Tensor]) -> ReadRows:
        """The rows of a batch; `uploaded`: its `arrays`."""
        sampled, logits_indices, sample_indices, cut_indices = uploaded
        return cls(
            sampled,
            None if batch.logits_indices is None else logits_indices,
            None if batch.sample_indices is None else sample_indices,
            cut_indices if len(batch.cut_idx) else None,
        )

    def output(self, model: CausalLM, hidden: Tensor, adapters: AdapterRuns | None) -> StepOutput:
        """The output of a step with these rows.

        Args:
            hidden: [W, K] of the tokens that need logits.
            adapters: of the R rows; None: all use the base model.
        """
        logits = None
        if len(self.sampled):
            # In most steps these are all tokens that need logits, and no selection is needed.
            last = hidden if self.sample_indices is None else hidden.index_select(0, self.sample_indices)
            logits = logits_of(model, last, adapters)
        return StepOutput(logits, self.sampled, hidden, self.cut_indices)
