"""`StepExecutor`: the place where a step runs: launched kernel by kernel, as a CUDA graph, or as a native program.

InputBatch (host)  ->  executor  ->  StepOutput (device)  ->  sampler

`EagerExecutor`      every step
`CudaGraphExecutor`  decodes on a GPU, up to a number of requests; others by its `EagerExecutor`
`NativeExecutor`     decodes on the CPU, with drafts, too; others by its `EagerExecutor`
"""

# Shapes: S requests that sample in this step, R rows of logits, W wanted tokens, K hidden size, V size of the
# vocabulary.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..input_batch import InputBatch


class StepOutput(NamedTuple):
    """What the model computed, on the device; valid until the executor runs the next step.

    Attributes:
        logits: [R, V] float32, see `InputBatch.sample_indices`; None if no request samples.
        sample_rows: [S] int64, the pool rows of the requests that sample.
        hidden: [W, K] of the wanted tokens; None where only logits are read (`InputBatch.samples_all`).
        cut_indices: [n] int64, see `InputBatch`; None if there is none.
    """

    logits: Tensor | None
    sample_rows: Tensor
    hidden: Tensor | None = None
    cut_indices: Tensor | None = None


class StepExecutor(Protocol):
    """Runs the steps of one model."""

    def run(self, batch: InputBatch) -> StepOutput:
        """Queue a step on the device, the slot table's entries of its new tokens included.

        Steps run in the order of the calls. Nothing of a step is kept by the executor but what the KV pool and the
        slot table hold.
        """
        ...

    @property
    def recorded_bytes(self) -> Sequence[int]:
        """Memory of the device that each recording made at start took, the largest first; empty without any."""
        ...
