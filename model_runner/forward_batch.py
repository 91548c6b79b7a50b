"""`ForwardBatch`: one step on the device, complete when constructed.

An argument of everything that runs in the step, never a global. Made by `BatchBuilder`, read by models and layers.
"""

# Shapes: B requests, T new tokens in the batch, W of them wanted, S requests that sample in this step.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..runtime.step_plan import ForwardMode
from .attention.backend import StepAttention
from .sampling.sampling_batch import SamplingBatch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .memory.kv_pool import KVPool
    from .recording.recorded_step import RecordedStep
    from .sampling.draft_batch import DraftBatch


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens whose log-probabilities a chunk yields.

    Attributes:
        batch_idx: the request's index in the batch.
        start: the wanted token after which the first of them is predicted; the others follow one by one.
        targets: [n] int64, the tokens, device.
        top_k: how many likeliest tokens to report for each.
    """

    batch_idx: int
    start: int
    targets: Tensor
    top_k: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step.

    Attributes:
        mode: see `ForwardMode`.
        input_ids: [T] int64.
        positions: [T] int64.
        kv_pool, out_cache_loc: where the keys and values of the new tokens go: [T] int64 slots.
        attention: what each token may see.
        wanted: [W] int64, ascending, the tokens whose hidden states are looked at, at least one of each request: behind
            the last layer's attention nothing is computed of the others. None: all T.
        sample_indices: [S] int64, the last token of each sampling request, with drafts (one more for each) the last of
            them, counted among the wanted ones; None when these are all W in order.
        sample_rows: [S] int64, their pool rows.
        sampled_idx_np: [S] their indices in the batch, on the host.
        cut_indices: [n] int64, the last token of each request that does not sample because its prompt goes on in a
            later step, counted in the same way; None if there is none.
        cut_idx_np: [n] their indices in the batch, on the host.
        sampling: how to choose their next tokens.
        prompt_spans: requests of the batch that want log-probabilities of their prompt.
        recorded: what computes the logits instead of the model, of all T tokens in order;
            it has its own input tokens. None: the model does.
        drafts: how to check the step's drafts; None without any.
    """

    mode: ForwardMode
    input_ids: Tensor
    positions: Tensor
    kv_pool: KVPool
    out_cache_loc: Tensor
    attention: StepAttention
    sample_indices: Tensor | None
    sample_rows: Tensor
    sampled_idx_np: npt.NDArray[np.int64]
    cut_indices: Tensor | None
    cut_idx_np: npt.NDArray[np.int64]
    sampling: SamplingBatch
    prompt_spans: tuple[PromptSpan, ...]
    recorded: RecordedStep | None = None
    drafts: DraftBatch | None = None
    wanted: Tensor | None = None
