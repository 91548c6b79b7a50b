"""`InputBatch`: one step as the host knows it, complete when constructed.

`BatchBuilder` makes the same one for every step, and a `StepExecutor` brings its arrays to where the model reads them
(`ForwardBatch`): to new memory of the device, or to the fixed memory of a recording.
"""

# Shapes: B requests, T new tokens in the batch, W of them with logits, S requests that sample in this step, R rows of
# logits.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from .attention.backend import BatchLayout
    from .sampling.draft_batch import DraftBatch
    from .sampling.sampling_batch import SamplingBatch

Int64s = npt.NDArray[np.int64]

RELAYED: Final = -1
"""In `InputBatch.input_ids`: the host does not know the token, the `TokenRelay` has it."""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt tokens that get log-probabilities from a chunk.

    Attributes:
        batch_idx: the request's index in the batch.
        start: the token with logits after which the first of them is predicted; the others follow one by one.
        targets: [n] int64, the tokens, device.
        top_k: how many likeliest tokens to report for each.
    """

    batch_idx: int
    start: int
    targets: Tensor
    top_k: int


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step. Arrays are the host's; only `prompt_spans` and `drafts` hold tensors of the device.

    Attributes:
        layout: the requests, and how long they are.
        token_rows: [T] the pool row of each token.
        positions: [T].
        out_cache_loc: [T] the KV slots of the tokens. They are not in the slot table yet.
        input_ids: [T], or `RELAYED`.
        logits_indices: [W] ascending, the tokens whose hidden states are read, at least one of each request; None:
            all T.
        sample_indices: [R] the last token of each sampling request, with drafts (one more row for each) the last of
            them, counted among those with logits; None when these are all W in order.
        sampled_idx: [S] the sampling requests' indices in the batch.
        cut_indices: [n] the last token of each request that does not sample because its prompt goes on in a later
            step, counted among those with logits.
        cut_idx: [n] their indices in the batch.
        sampling: how to choose the next tokens.
        prompt_spans: requests of the batch that want log-probabilities of their prompt.
        drafts: how to check the step's drafts; None without any.
    """

    layout: BatchLayout
    token_rows: Int64s
    positions: Int64s
    out_cache_loc: Int64s
    input_ids: Int64s
    logits_indices: Int64s | None
    sample_indices: Int64s | None
    sampled_idx: Int64s
    cut_indices: Int64s
    cut_idx: Int64s
    sampling: SamplingBatch
    prompt_spans: tuple[PromptSpan, ...]
    drafts: DraftBatch | None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.positions)

    @property
    def samples_all(self) -> bool:
        """Whether the logits of all T tokens in order are all that is read: decodes, with drafts or without."""
        return self.logits_indices is None and self.sample_indices is None and not self.prompt_spans
