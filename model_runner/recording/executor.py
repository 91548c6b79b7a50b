"""`StepExecutor`: runs a step and returns its logits.

InputBatch (host)  ->  executor  ->  StepOutput (device)  ->  sampler

EagerExecutor        every step, launched kernel by kernel; on the CPU its forward pass is a native program if
                     one could be made (`forward_program.py`)
PromptGraphExecutor  any step on a GPU, up to a number of tokens, but for attention; other steps by an EagerExecutor
CudaGraphExecutor    decodes on a GPU, also with drafts, up to a number of rows; other steps by one of the above
NativeExecutor       decodes on the CPU, also with drafts; other steps by its EagerExecutor
"""

# Shapes: S requests that sample in this step, R rows of logits, W tokens that need logits, K hidden size, V size of
# the vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..structures.causal_lm import logits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..adapter_runs import AdapterRuns
    from ..input_batch import InputBatch, Int64s
    from ..structures.causal_lm import CausalLM
    from .graph_device import GraphDevice


class StepFeatures(NamedTuple):
    """The T tokens of a step as a drafter reads them, on the device.

    Attributes:
        input_ids, positions, out_cache_loc: [T] int64.
        states: [T, F] features of the tokens: the residual stream after the last layer, or, if `Decoder.feature_layers`
            names layers, the residual streams after these, one after the other.
    """

    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    states: Tensor


class StepOutput(NamedTuple):
    """Results of the model, on the device; valid until the executor runs the next step.

    Attributes:
        logits: [R, V] in `CausalLM.logits_dtype`, see `InputBatch.sample_indices`; None if no request samples.
        sample_rows: [S] int64, the pool rows of the requests that sample.
        hidden: [W, K] of the tokens that need logits; None where only logits are read (`InputBatch.samples_all`).
        cut_indices: [n] int64, see `InputBatch`; None if there are none.
        features: for a drafter; None without one.
    """

    logits: Tensor | None
    sample_rows: Tensor
    hidden: Tensor | None = None
    cut_indices: Tensor | None = None
    features: StepFeatures | None = None


class RecordedBytes(NamedTuple):
    """Device memory of the recordings made at start, of each size, the largest first; see `GraphSizes`.

    Attributes:
        samplers: of the sampling after decodes, see `RecordedSampler`.
    """

    decodes: Sequence[int] = ()
    prompts: Sequence[int] = ()
    samplers: Sequence[int] = ()


class RecordedDecodes(NamedTuple):
    """Logits of replayed decodes, for recordings of the work after them.

    Attributes:
        logits: [n, V], the same memory for all sizes; n is the largest.
        sizes: numbers of rows, ascending. A decode is replayed with the smallest that has room for it.
        device: makes the recordings.
    """

    logits: Tensor
    sizes: Sequence[int]
    device: GraphDevice


class StepExecutor(Protocol):
    """Runs the steps of one model."""

    def run(self, batch: InputBatch) -> StepOutput:
        """Queue a step on the device, including the slot table's entries of its new tokens.

        Steps run in the order of the calls. After a step only the KV pool and the slot table keep its data.
        """
        ...

    @property
    def recorded_bytes(self) -> RecordedBytes:
        """Device memory of the recordings; empty without any."""
        ...

    @property
    def recorded_decodes(self) -> RecordedDecodes | None:
        """Recorded decodes of the last pipeline stage; None: no decodes are recorded here."""
        ...


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
